"""Glossaries: terms with given translations."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sightline.base.text.words import word_spans
from sightline.translation.protected import Kept, kept_within


class Term(NamedTuple):
    """A part of a text whose translation a glossary gives."""

    start: int
    end: int
    text: str  # the translation


class Glossary:
    """Terms and their translations."""

    def __init__(self, terms: Mapping[str, str]) -> None:
        """Read terms: those without a capital match also words with capitals."""
        self._terms: dict[str, list[tuple[Sequence[str], str]]] = {}  # by their first word, in lower case
        for source, target in terms.items():
            words = _words(source)
            if words:
                self._terms.setdefault(words[0].casefold(), []).append((words, " ".join(target.split())))
        for of_word in self._terms.values():
            of_word.sort(key=lambda term: -len(term[0]))

    def find(self, text: str, kept: Sequence[Kept] = ()) -> list[Term]:
        """Return the terms in a text as whole words: the longest, and outside of what is kept."""
        if not self._terms:
            return []
        spans = word_spans(text)
        words = [text[slice(*span)] for span in spans]
        found: list[Term] = []
        for index, word in enumerate(words):
            if found and found[-1].end > spans[index][0]:
                continue
            for term, target in self._terms.get(word.casefold(), ()):
                own = words[index : index + len(term)]
                start, end = spans[index][0], spans[index + len(own) - 1][1]
                is_free = len(own) == len(term) and not kept_within(kept, start, end)
                if is_free and all(map(_matches, term, own)):
                    found.append(Term(start, end, target))
                    break
        return found


def _words(text: str) -> list[str]:
    return [text[slice(*span)] for span in word_spans(text)]


def _matches(term: str, word: str) -> bool:
    return word == term or (term == term.lower() and word.casefold() == term.casefold())
