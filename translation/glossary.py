"""Glossaries: terms with given translations."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sightline.base.text.words import word_spans
from sightline.translation.marks import Mark, MarkedText

MAX_CHARACTERS = 200  # of a term


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

    def mark(self, text: MarkedText) -> MarkedText:
        """Return a text with marks of its terms."""
        return replace(text, marks=[*text.marks, *self.find(text.text)])

    def find(self, text: str) -> list[Mark]:
        """Return marks of the terms in a text as whole words: the longest."""
        spans = word_spans(text)
        words = [text[slice(*span)] for span in spans]
        found: list[Mark] = []
        for index, word in enumerate(words):
            if found and found[-1].end > spans[index][0]:
                continue
            for term, target in self._terms.get(word.casefold(), ()):
                own = words[index : index + len(term)]
                if len(own) == len(term) and all(map(_matches, term, own)):
                    found.append(Mark(spans[index][0], spans[index + len(own) - 1][1], "term", text=target))
                    break
        return found


def read_terms(lines: Iterable[str], separator: str) -> dict[str, str]:
    """Return terms and their translations, which each line of a table has. Raises `ValueError`.

    The tables of DeepL may also have the two languages in each line.
    """
    terms: dict[str, str] = {}
    reader = csv.reader(lines, delimiter=separator)
    try:
        for row in filter(any, reader):
            pair = [cell.strip() for cell in row[:2]]
            if len(row) not in (2, 4) or not all(0 < len(cell) <= MAX_CHARACTERS for cell in pair):
                most = f"of at most {MAX_CHARACTERS} characters each"
                raise ValueError(f"line {reader.line_num} must have a term and its translation, {most}")
            terms[pair[0]] = pair[1]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} cannot be read: {error}") from None
    return terms


def _words(text: str) -> list[str]:
    return [text[slice(*span)] for span in word_spans(text)]


def _matches(term: str, word: str) -> bool:
    return word == term or (term == term.lower() and word.casefold() == term.casefold())
