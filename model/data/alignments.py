"""Files of word links for the pairs of train, in the Pharaoh format.

Line N has the links of pair N: `0-0 1-2`, the indices of a source word and of a target word. Words
are separated by whitespace, as for fast_align and eflomal.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from sightline.model.data.corpus import Split
from sightline.model.data.examples import Example, Examples, MemoryExamples
from sightline.model.data.files import CorpusError, read_lines
from sightline.model.data.records import PairRecord

_LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")

Link = tuple[int, int]
WordTokens = tuple[list[int], list[int]]  # tokens of a word with letters or digits, and with marks only


def read_links(path: Path, split: Split, tokenizer: Tokenizer, examples: Examples) -> tuple[MemoryExamples, str]:
    """Return the indices of linked source and target tokens of each encoded example of train, and a
    note. Raises `CorpusError`, with the line, for a file that does not belong to the pairs.
    """
    found, num_linked = list[Example](), 0
    for number, pair, links in _linked_pairs(path, split):
        source, target = tokenizer.encode_batch([pair.source, pair.target])
        words = _tokens(pair.source, source), _tokens(pair.target, target)
        try:
            tokens = sorted({token for link in links for token in _token_links(link, *words)})
        except IndexError:
            raise CorpusError(
                f"{path}, line {number}: a link is beyond the words of the pair, which whitespace separates and which "
                f"are counted from 0; align the pairs of {split} again"
            ) from None
        if len(found) < len(examples) and examples[len(found)] == (source.ids, target.ids):  # not too long
            num_linked += bool(links)
            found.append(([one for one, _ in tokens], [other for _, other in tokens]))
    return MemoryExamples(found), f"{path}: {num_linked:,} pairs have links of words, separated by whitespace"


def _linked_pairs(path: Path, split: Split) -> Iterator[tuple[int, PairRecord, list[Link]]]:
    """Yield the line number, the pair and the links of each pair of a split."""
    lines, number = read_lines(path), 0
    for _, record in replace(split, part=None).numbered():
        number, line = next(lines, (0, ""))
        matches = [_LINK.fullmatch(word) for word in line.split()]
        if not number or None in matches:
            problem = f", line {number} has other words than links such as 0-0 1-2" if number else " has too few lines"
            raise CorpusError(f"{path}{problem}; line N must have the links of pair N of {split}")
        if isinstance(record, PairRecord) and (split.part is None or split.part.contains(record)):
            yield number, record, [(int(match[1]), int(match[2])) for match in matches if match]
    if next(lines, None) is not None:
        raise CorpusError(f"{path} has more than {number:,} lines; line N must have the links of pair N of {split}")


def _tokens(text: str, encoding: Encoding) -> list[WordTokens]:
    """Return the tokens of each word; a token belongs to the word of its last character."""
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    words: list[WordTokens] = [([], []) for _ in starts]
    for token, (start, end) in enumerate(encoding.offsets):
        if text[start:end].strip() and (word := bisect_right(starts, end - 1) - 1) >= 0:
            words[word][not any(map(str.isalnum, text[start:end]))].append(token)
    return words


def _token_links(link: Link, sources: Sequence[WordTokens], targets: Sequence[WordTokens]) -> Iterator[Link]:
    """Yield the links of all tokens of two words. If both have letters, as in "sky," and "Himmel,",
    their marks are linked with marks only. Raises `IndexError` for a link beyond the words.
    """
    (letters, marks), (other_letters, other_marks) = sources[link[0]], targets[link[1]]
    pairs = [(letters, other_letters), (marks, other_marks)]
    if not (letters and other_letters):
        pairs = [(letters + marks, other_letters + other_marks)]
    yield from ((one, other) for first, second in pairs for one in first for other in second)
