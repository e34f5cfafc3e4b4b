"""Pairs of sentences in which it is known which words are omitted or made up."""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from lab.study.word_links import Links
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


def inserted(group: int, pair: Pair, material: Material, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the source with words of other sentences, which the target omits."""
    for text, span in islice(material.insert_into(pair[0], rng), INSERTIONS):
        yield Case(group, text, pair[1], [span])


def made_up(group: int, pair: Pair, material: Material, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the target with words of other sentences."""
    for case in inserted(group, pair[::-1], material, rng):
        yield Case(group, pair[0], case.source, case.errors)


def negated(group: int, pair: Pair) -> Iterator[Case]:
    """Yield the source with an added "not" after "is" or "are"."""
    if match := re.search(r"\b(is|are) ", pair[0]):
        start = match.end()
        yield Case(group, f"{pair[0][:start]}not {pair[0][start:]}", pair[1], [(start, start + len("not"))])


def deleted(group: int, pair: Pair, links: Links, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the target without the words that are linked to only a part of the source."""
    source, words, linked = pair[0], word_spans(pair[0]), linked_words(links)
    for length in LENGTHS:
        for first in rng.permutation(max(0, len(words) - length + 1)).tolist():
            part = range(first, first + length)
            cut = {other for word, other in links if word in part}
            is_free = all(word in part for word, other in links if other in cut)
            if cut and is_free and all(is_name(source[slice(*words[word])]) for word in part):
                unknown = [words[word] for word in part if word not in linked]
                yield Case(group, source, _without(pair[1], cut), [words[word] for word in part], unknown)
                break


def _without(text: str, cut: Container[int]) -> str:
    """Return a text without some of its words."""
    kept, last = "", 0
    for word, (start, end) in enumerate(word_spans(text)):
        if word in cut:
            kept, last = kept + text[last:start].rstrip(), end
    return (kept + text[last:]).strip()


def left_out(group: int, pairs: Sequence[Pair]) -> Case:
    """Return several sentences in one source, of which the target omits one."""
    left = group % len(pairs)
    sources, targets = zip(*pairs, strict=True)
    start = sum(len(source) + 1 for source in sources[:left])
    kept = " ".join([*targets[:left], *targets[left + 1 :]])
    return Case(group, " ".join(sources), kept, [(start, start + len(sources[left]))])


def judged(group: int, pair: Pair, links: Links, known: Container[int]) -> Case:
    """Return a pair that omits the words without a link, if their translation is known."""
    linked, words = linked_words(links), list(enumerate(word_spans(pair[0])))
    errors = [span for word, span in words if word not in linked]
    return Case(group, *pair, errors, [span for word, span in words if word not in known])


def linked_words(links: Links) -> set[int]:
    return {word for word, _ in links}
