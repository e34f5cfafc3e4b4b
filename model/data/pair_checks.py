"""Warnings about pairs of sentences that are probably no translations of each other.

The corpus itself shows what is usual, so that the measures hold for all languages: which words are
of which side, and how the lengths of both sides are related. Pairs unlike most others are named.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log

import numpy as np
from numpy.typing import NDArray

from sightline.model.data.corpus import Corpus, Split
from sightline.model.data.records import PairRecord

SHOWN = 10  # lines of a warning
# Problems of single pairs, and what to do. A pair is counted for the first that it has.
PROBLEMS = {
    "exchanged": ("seem to have source and target exchanged", "exchange or remove them"),
    "untranslated": ("seem to have both sides in the same language", "translate or remove them"),
    "lengths": ("have sides whose lengths do not fit", "check that line and line belong together"),
}

_MIN_PAIRS = 50  # with which others are compared
_MAX_WORDS = 25_000  # of a side that are counted; rare ones are forgotten
_MIN_EVIDENCE, _MIN_MEAN = 4.0, 0.5  # logarithms of odds that words are of the other side: sum, and mean of the words
_OFFSETS = [offset for distance in range(1, 11) for offset in (distance, -distance)]  # of lines, nearest first

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ufaff"  # letters of scripts without spaces
_WORD = re.compile(rf"[{_ALONE}]|[^\W\d_{_ALONE}]+")


def pair_warnings(corpus: Corpus) -> Iterator[str]:
    """Yield a sentence for each kind of problem of the pairs of each split."""
    words = Counter[str](), Counter[str]()  # of each side of train, which is the first
    for split in corpus.splits:
        if corpus.split_seed is None or split.name != "dev":  # a part of the file of train
            yield from _check(replace(split, part=None), words)


def _pairs(split: Split) -> Iterator[tuple[int, tuple[str, str]]]:
    for number, record in split.numbered():
        if isinstance(record, PairRecord):
            yield number, (record.source, record.target)


def _check(split: Split, words: tuple[Counter[str], Counter[str]]) -> Iterator[str]:
    lines, sizes, is_train = array("L"), array("f"), split.name == "train"
    for number, texts in _pairs(split):
        lines.append(number)
        sizes.extend(log(len(text) + 10) for text in texts)
        for counts, text in zip(words if is_train else (), texts, strict=False):
            counts.update(_words_of(text))
            if len(counts) > 2 * _MAX_WORDS:
                for word, _ in counts.most_common()[_MAX_WORDS:]:
                    del counts[word]
    lengths = np.frombuffer(sizes, np.float32).reshape(-1, 2)
    if len(lines) < _MIN_PAIRS:
        return
    if shift := find_shift(lengths):
        start, end, offset = shift
        where = f"{split.line(lines[start])} to {lines[end - 1]}"
        yield (
            f"from {where}, the lengths of the sides do not fit, but would if each target were that of "
            f"{abs(offset)} {'line' if abs(offset) == 1 else 'lines'} {'later' if offset > 0 else 'earlier'}; "
            "find where a line is missing on one side"
            if offset
            else f"from {where}, the lengths of the sides are unrelated; check that line N of one is the translation "
            "of line N of the other"
        )
    found = {problem: array("L") for problem in PROBLEMS}
    for (number, texts), is_unusual in zip(_pairs(split), _unusual_lengths(lengths), strict=True):
        is_other = [
            _are_others(_words_of(text), own, other, is_train)
            for text, own, other in zip(texts, words, words[::-1], strict=True)
        ]
        if any(is_other):
            found["exchanged" if all(is_other) else "untranslated"].append(number)
        elif is_unusual:
            found["lengths"].append(number)
    for problem, numbers in found.items():
        if numbers:
            text, advice = PROBLEMS[problem]
            more = f" and {len(numbers) - SHOWN:,} more" if len(numbers) > SHOWN else ""
            shown = ", ".join(map(str, numbers[:SHOWN]))
            yield f"{len(numbers):,} of {len(lines):,} pairs {text}: {split}, lines {shown}{more}; {advice}"


def _words_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _are_others(words: Sequence[str], own: Counter[str], other: Counter[str], is_train: bool) -> bool:
    """Return whether most words are those of the other side. Those of this pair do not count."""
    evidence = 0.0
    for word in words:
        odds = log((other[word] + 0.5) / (max(own[word] - is_train, 0) + 0.5))
        evidence += min(max(odds, -3.0), 3.0)  # one word alone is not enough
    return evidence > max(_MIN_EVIDENCE, _MIN_MEAN * len(words))


def find_shift(lengths: NDArray[np.float32]) -> tuple[int, int, int] | None:
    """Return start and end of the part of a corpus whose lines are misaligned, and the offset of
    the targets, which is 0 if no offset makes their lengths fit; None if there is no such part.

    `lengths` has the logarithms of the lengths of both sides. Their products, as standard scores,
    have the correlation as mean. The part is that with the largest sum of gains over no offset.
    """
    number, deviation = len(lengths), lengths.std(axis=0)
    scores = np.clip((lengths - lengths.mean(axis=0)) / np.where(deviation > 0, deviation, 1), -3, 3)
    source, target = scores.T
    products = source * target
    best, least = None, 20 + 4 * log(number)  # sums that chance makes if lengths are unrelated
    for offset in _OFFSETS:
        moved = np.full(number, -1, np.float32)
        first, last = max(0, -offset), number - max(0, offset)
        moved[first:last] = source[first:last] * target[first + offset : last + offset]
        total, start, end = _largest_sum(moved - products - 0.25)
        if total > least:
            best, least = (start, end, offset), total
    if best is None and number >= 4 * _MIN_PAIRS and deviation.min() > 0.1:
        total, start, end = _largest_sum(max(products.mean() / 2, 0.1) - products)
        best = (start, end, 0) if total > least and end - start >= 2 * _MIN_PAIRS else None
    return best


def _largest_sum(gains: NDArray[np.float32]) -> tuple[float, int, int]:
    """Return the largest sum of consecutive gains, with their start and end."""
    sums = np.concatenate([[0.0], np.cumsum(gains, dtype=np.float64)])
    totals = sums - np.minimum.accumulate(sums)
    end = int(totals.argmax())
    return float(totals[end]), int(sums[: end + 1].argmin()), end


def _unusual_lengths(lengths: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return for each pair whether the ratio of its lengths is far from the usual one."""
    ratios = lengths[:, 1] - lengths[:, 0]
    distances = np.abs(ratios - np.median(ratios))
    unusual: NDArray[np.bool_] = distances > max(log(2.5), 6 * 1.4826 * float(np.median(distances)))
    return unusual
