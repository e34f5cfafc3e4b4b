"""Annotated word alignments: their file, the alignment error rate, and the agreement of passes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sightline.base.text.words import word_spans

PAIRS = Path(__file__).with_name("alignment.tsv")
Links = frozenset[tuple[int, int]]  # index of the source word and of the target word
Counts = NDArray[np.float64]
_LINK = re.compile(r"(\d+)([-p])(\d+)")


@dataclass(frozen=True)
class Reference:
    """The annotated links of a pair of sentences."""

    sure: Links
    possible: Links  # includes the sure links


@dataclass(frozen=True)
class AnnotatedPair:
    """A sentence, its translation, and their links."""

    source: str
    target: str
    passes: tuple[Reference, Reference]  # the two annotations
    links: Reference  # the adjudicated annotation

    @property
    def source_words(self) -> list[str]:
        return words_in(self.source)

    @property
    def target_words(self) -> list[str]:
        return words_in(self.target)


def words_in(text: str) -> list[str]:
    return [text[start:end] for start, end in word_spans(text)]


def read_pairs(path: Path) -> list[AnnotatedPair]:
    """Read a table of annotated pairs.

    The first line has the names of the columns. The columns are the source, the target, the links
    of the first and of the second pass, and the adjudicated links, separated by tabs. A link is
    `i-j` if it is sure and `ipj` if it is possible; `i` is the index of a source word and `j` that
    of a target word. Words are those of `word_spans`. Raises `ValueError` for a line with other
    columns, or a link that is malformed or out of range.
    """
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], 2):
        columns = line.split("\t")
        if len(columns) != 5:
            raise ValueError(f"{path}, line {number} must have 5 columns separated by tabs, got {len(columns)}")
        source, target, *annotations = columns
        size = len(words_in(source)), len(words_in(target))
        try:
            first, second, links = (_reference(text, *size) for text in annotations)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        pairs.append(AnnotatedPair(source, target, (first, second), links))
    if not pairs:
        raise ValueError(f"{path} has no pairs; add at least one line after the names of the columns")
    return pairs


def _reference(text: str, num_sources: int, num_targets: int) -> Reference:
    sure, possible = set(), set()
    for part in text.split():
        match = _LINK.fullmatch(part)
        if match is None:
            raise ValueError(f"a link must be i-j (sure) or ipj (possible), got {part}")
        link = int(match[1]), int(match[3])
        if link[0] >= num_sources or link[1] >= num_targets:
            raise ValueError(f"the indices of {part} must be below {num_sources} and {num_targets}")
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return Reference(frozenset(sure), frozenset(possible))


def error_counts(links: Links, reference: Reference) -> tuple[float, float]:
    """Return |A ∩ S| + |A ∩ P| and |A| + |S| of the links A of a pair; see `error_rate`."""
    return len(links & reference.sure) + len(links & reference.possible), len(links) + len(reference.sure)


def error_rate(counts: Counts) -> Counts:
    """Return the alignment error rate (Och and Ney 2003, section 5), given sums of `error_counts`
    (..., 2).

    AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|) for the links A, the sure links S and the possible
    links P, which include S.
    """
    rates: Counts = 1 - counts[..., 0] / counts[..., 1]
    return rates


def diagonal(num_sources: int, num_targets: int) -> Links:
    """Return links of each target word to the source word at the same relative position."""
    return frozenset((int((word + 0.5) * num_sources / num_targets), word) for word in range(num_targets))


def best_links(reference: Reference, num_targets: int) -> Links:
    """Return the links with the lowest error rate that have one source word for each target word. A
    target word without links is linked to a source word that does not exist, an error like any
    other.
    """

    def best(word: int) -> tuple[int, int]:
        own = [link for link in reference.possible if link[1] == word]
        return min(own, key=lambda link: (link not in reference.sure, link), default=(-1, word))

    return frozenset(map(best, range(num_targets)))


def random_counts(reference: Reference, num_sources: int, num_targets: int) -> tuple[float, float]:
    """Return the expected `error_counts` if each target word is linked to a random source word."""
    hits = (len(reference.sure) + len(reference.possible)) / num_sources
    return hits, num_targets + len(reference.sure)


def agreement(pairs: Sequence[AnnotatedPair]) -> dict[str, float]:
    """Return the agreement of the two passes over all pairs.

    The final period is left out, because both passes link it by rule. Cohen's kappa compares the
    labels sure, possible and none of all pairs of words. The error rate is that of the second
    pass's sure links against the first pass.
    """
    table = np.zeros((3, 3))  # labels of the first and of the second pass
    for pair in pairs:
        for source in range(len(pair.source_words) - 1):
            for target in range(len(pair.target_words) - 1):
                first, second = (_label(annotation, (source, target)) for annotation in pair.passes)
                table[first, second] += 1
    total = table.sum()
    observed = np.trace(table) / total
    expected = float(table.sum(axis=1) @ table.sum(axis=0)) / total**2
    sure, linked = table[2], table[1:, 1:]
    hits = table[2, 2] + table[1:, 2].sum()
    return {
        "sure_f1": 2 * table[2, 2] / (sure.sum() + table[:, 2].sum()),
        "all_f1": 2 * linked.sum() / (table[1:].sum() + table[:, 1:].sum()),
        "kappa": (observed - expected) / (1 - expected),
        "aer": 1 - hits / (table[:, 2].sum() + sure.sum()),
    }


def _label(reference: Reference, link: tuple[int, int]) -> int:
    """Return 2 for a sure link, 1 for a possible link, and 0 for none."""
    return (link in reference.possible) + (link in reference.sure)
