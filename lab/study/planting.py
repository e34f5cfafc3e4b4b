"""Pairs of sentences in which it is known which words are omitted or made up."""

import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np

from lab.study.word_links import Links, words_in
from sightline.base.text.words import Span, is_name, word_spans
from sightline.export.check.coverage import Material

INSERTIONS = 2  # into each sentence
LENGTHS = (1, 3)  # of what is deleted, in words of the source
Pair = tuple[str, str]  # source and target


@dataclass(frozen=True)
class Case:
    """A source and its target, with ranges of one of them."""

    group: int  # cases of a group are resampled together
    source: str
    target: str
    errors: Sequence[Span]  # omitted or made-up words
    unknown: Sequence[Span] = ()  # words that may be errors


def inserted(group: int, pair: Pair, links: Links, material: Material, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the source with words of other sentences, which the target omits."""
    for text, span in islice(material.insert_into(pair[0], rng), INSERTIONS):
        yield _grown(group, pair, links, text, span)


def negated(group: int, pair: Pair, links: Links) -> Iterator[Case]:
    """Yield the source with an added "not" after "is" or "are"."""
    if match := re.search(r"\b(is|are) ", pair[0]):
        start = match.end()
        yield _grown(group, pair, links, f"{pair[0][:start]}not {pair[0][start:]}", (start, start + len("not")))


def _grown(group: int, pair: Pair, links: Links, text: str, span: Span) -> Case:
    size = len(text) - len(pair[0])
    words = unlinked(pair[0], links)
    moved = [(start + size, end + size) if start >= span[0] else (start, end) for start, end in words]
    return Case(group, text, pair[1], [span], moved)


def made_up(group: int, pair: Pair, material: Material, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the target with words of other sentences."""
    for text, span in islice(material.insert_into(pair[1], rng), INSERTIONS):
        yield Case(group, pair[0], text, [span])


def deleted(group: int, pair: Pair, links: Links, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the target without the words that are linked to only a part of the source."""
    source, words = pair[0], word_spans(pair[0])
    for length in LENGTHS:
        for first in rng.permutation(max(0, len(words) - length + 1)).tolist():
            part = range(first, first + length)
            cut = {other for word, other in links if word in part}
            is_free = all(word in part for word, other in links if other in cut)
            if cut and is_free and all(is_name(source[slice(*words[word])]) for word in part):
                errors = [words[word] for word in part]
                yield Case(group, source, _without(pair[1], cut), errors, unlinked(source, links))
                break


def _without(text: str, cut: Container[int]) -> str:
    """Return a text without some of its words."""
    kept, last = "", 0
    for word, (start, end) in enumerate(word_spans(text)):
        if word in cut:
            kept, last = kept + text[last:start].rstrip(), end
    return (kept + text[last:]).strip()


def _starts(pairs: Sequence[Pair]) -> list[int]:
    """Return the index at which each source starts if a space is between them, and their end."""
    return list(accumulate((len(source) + 1 for source, _ in pairs), initial=0))


def left_out(group: int, pairs: Sequence[Pair], links: Sequence[Links]) -> Case:
    """Return several sentences in one source, of which the target omits one.

    Words that are in several of the sentences do not count: a target says for none of them which
    one it translates.
    """
    left, starts = group % len(pairs), _starts(pairs)
    source = " ".join(source for source, _ in pairs)
    counts = Counter(word.lower() for word in words_in(source))
    unknown = [
        (start + first, start + last)
        for start, (text, _), of_pair in zip(starts, pairs, links, strict=False)
        for first, last in unlinked(text, of_pair)
    ]
    unknown += [(start, end) for start, end in word_spans(source) if counts[source[start:end].lower()] > 1]
    kept = " ".join(target for number, (_, target) in enumerate(pairs) if number != left)
    return Case(group, source, kept, [(starts[left], starts[left + 1])], unknown)


def joined(group: int, pairs: Sequence[Pair], links: Sequence[Links], target: str, found: Links) -> Case:
    """Return several sentences in one source with a target for all.

    A word is omitted if no `found` link leads from it to the target, and what it is linked to in
    the translation of its sentence alone is not there either. It is translated if neither holds.
    Other words do not count, nor do those that are linked to words of several sentences.
    """
    known, errors, unknown = {word.lower() for word in words_in(target)}, list[Span](), list[Span]()
    translations = [[word.lower() for word in words_in(each)] for _, each in pairs]
    counts = Counter(word for words in translations for word in set(words))
    source = " ".join(source for source, _ in pairs)
    without_link = set(unlinked(source, found))
    for start, (text, _), words, of_pair in zip(_starts(pairs), pairs, translations, links, strict=False):
        for index, (first, last) in enumerate(word_spans(text)):
            own, span = {words[other] for word, other in of_pair if word == index}, (start + first, start + last)
            is_omitted = own.isdisjoint(known)
            if not own or any(counts[word] > 1 for word in own) or is_omitted != (span in without_link):
                unknown.append(span)
            elif is_omitted:
                errors.append(span)
    return Case(group, source, target, errors, unknown)


def judged(group: int, pair: Pair, links: Links, known: Links) -> Case:
    """Return a pair that omits the words without a link, of those that have one in another pair."""
    return Case(group, *pair, unlinked(pair[0], links), unlinked(pair[0], known))


def unlinked(text: str, links: Links) -> list[Span]:
    """Return the words of a source without a link."""
    linked = {word for word, _ in links}
    return [span for word, span in enumerate(word_spans(text)) if word not in linked]
