"""Warnings about pairs of sentences that are probably no translations of each other.

The corpus itself shows what is usual, so that the measures hold for all languages: which words are
of which side, and how the lengths of both sides are related. Pairs unlike most others are named.
"""

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log

import numpy as np
from babel.core import get_global
from numpy.typing import NDArray

from sightline.base.text.languages import find_language
from sightline.model.data.corpus import Corpus, Split
from sightline.model.data.records import PairRecord

SHOWN = 10  # lines of a warning
# Problems of single pairs, and what to do. A pair is counted for the first that it has.
PROBLEMS = {
    "identical": ("have the same text on both sides", "translate or remove them"),
    "script": ("are not in the script of their languages", "check that --source and --target are not exchanged"),
    "exchanged": ("seem to have source and target exchanged", "exchange or remove them"),
    "untranslated": ("seem to have both sides in the same language", "translate or remove them"),
    "numbers": ("have other numbers on one side than on the other", "check that line and line belong together"),
    "lengths": ("have sides whose lengths do not fit", "check that line and line belong together"),
}

_MAX_WORDS = 25_000  # of a side that are counted; rare ones are forgotten
_MIN_IDENTICAL = 3  # words; shorter texts may be names
_MIN_EVIDENCE, _MIN_MEAN = 4.0, 0.5  # logarithms of odds that words are of the other side: sum, and mean of the words
_MIN_PAIRS = 50  # for measures that compare a pair with the others
_OFFSETS = [offset for distance in range(1, 11) for offset in (distance, -distance)]  # of lines, nearest first

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ufaff"  # letters of scripts without spaces
_WORD = re.compile(rf"[{_ALONE}]|[^\W\d_{_ALONE}]+")
_NUMBER = re.compile(r"\d(?:[.,'\u00a0\u202f]?\d)+")  # of several digits, because words also stand for others
_SCRIPTS = (  # and how names of their letters begin in Unicode
    "Arab ARABIC,Armn ARMENIAN,Beng BENGALI,Cyrl CYRILLIC,Deva DEVANAGARI,Geor GEORGIAN,Grek GREEK,Hans CJK,Hant CJK,"
    "Hebr HEBREW,Jpan CJK HIRAGANA KATAKANA,Kore HANGUL CJK,Latn LATIN,Taml TAMIL,Telu TELUGU,Thai THAI"
)

Words = tuple[Counter[str], Counter[str]]  # of source and target


def pair_warnings(corpus: Corpus) -> Iterator[str]:
    """Yield a sentence for each kind of problem of the pairs of each split."""
    scripts = [_names_of_script(tag) for tag in corpus.languages or ("", "")]
    words = Counter[str](), Counter[str]()  # of each side of train, which is the first
    for split in corpus.splits:
        if corpus.split_seed is None or split.name != "dev":  # a part of the file of train
            yield from _check(replace(split, part=None), words, scripts)


def _check(split: Split, words: Words, scripts: Sequence[set[str]]) -> Iterator[str]:
    lines, sizes, is_train = array("L"), array("f"), split.name == "train"
    for number, record in split.numbered():
        if isinstance(record, PairRecord):
            lines.append(number)
            sizes.extend((log(len(record.source) + 10), log(len(record.target) + 10)))
            for counts, text in zip(words if is_train else (), (record.source, record.target), strict=False):
                counts.update(_words_of(text))
                if len(counts) > 2 * _MAX_WORDS:
                    for word, _ in counts.most_common()[_MAX_WORDS:]:
                        del counts[word]
    if not lines:
        return
    if is_train and len(lines) < _MIN_PAIRS:
        for counts in words:
            counts.clear()  # they are no evidence
    lengths = np.frombuffer(sizes, np.float32).reshape(-1, 2)
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
    unusual = iter(_unusual_lengths(lengths).tolist())
    for number, record in split.numbered():
        if isinstance(record, PairRecord):
            is_unusual = next(unusual, False)
            problem = _problem((record.source, record.target), words, scripts, is_train)
            if problem or is_unusual:
                found[problem or "lengths"].append(number)
    for problem, numbers in found.items():
        if numbers:
            text, advice = PROBLEMS[problem]
            more = f" and {len(numbers) - SHOWN:,} more" if len(numbers) > SHOWN else ""
            shown = ", ".join(map(str, numbers[:SHOWN]))
            yield f"{len(numbers):,} of {len(lines):,} pairs {text}: {split}, lines {shown}{more}; {advice}"


def _problem(texts: tuple[str, str], words: Words, scripts: Sequence[set[str]], is_train: bool) -> str | None:
    source, target = map(_words_of, texts)
    if source == target:
        return "identical" if len(source) >= _MIN_IDENTICAL else None
    if any(names and _is_foreign(text, names) for text, names in zip(texts, scripts, strict=True)):
        return "script"
    is_other = [_are_others(source, *words, is_train), _are_others(target, *words[::-1], is_train)]
    if any(is_other):
        return "exchanged" if all(is_other) else "untranslated"
    numbers = [
        {tuple(map(unicodedata.digit, re.sub(r"\D", "", one))) for one in _NUMBER.findall(text)} for text in texts
    ]
    return "numbers" if all(numbers) and numbers[0].isdisjoint(numbers[1]) else None


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
    number = len(lengths)
    if number < _MIN_PAIRS:
        return None
    deviation = lengths.std(axis=0)
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
    return unusual & (len(lengths) >= _MIN_PAIRS)


def _names_of_script(tag: str) -> set[str]:
    """Return how names of the letters of a language begin, nothing if its script is not known."""
    likely = get_global("likely_subtags")
    given = [subtag.title() for subtag in re.split("[-_]", tag)[1:] if len(subtag) == 4]
    usual = likely.get(find_language(tag, likely) or "", "").split("_")[1:2]
    script = (*given, *usual, "")[0]
    return next((set(names.split()[1:]) for names in _SCRIPTS.split(",") if names.split()[0] == script), set())


def _is_foreign(text: str, names: set[str]) -> bool:
    """Return whether most letters of a text are of another script."""
    letters = [_script_of(character) for character in text if character.isalpha()]
    return len(letters) >= 4 and 2 * sum(name in names for name in letters) < len(letters)


@lru_cache(2**14)
def _script_of(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0]
