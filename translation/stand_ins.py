"""Sentences as a model reads them: a name stands in for each part that it must not change, and is
replaced in the translation, at the place to which alignment points. There, the term of a glossary
replaces another translation.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise, takewhile
from operator import eq

import numpy as np
from numpy.typing import NDArray

from sightline.base.text.words import Span, word_spans
from sightline.translation.alignment import Translated, Weights, best_range, share_of, shared
from sightline.translation.marks import Mark
from sightline.translation.protected import Kept

# Names that all models know and copy.
_NAMES = ("Peter", "Anna", "Paul", "Maria", "David", "Laura", "Martin", "Sara", "Robert", "Julia", "Thomas", "Eva")
# What a model reads instead of a character that it does not know.
_PLAIN = {
    "’": "'", "‘": "'", "‚": ",", "‛": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‹": "'", "›": "'",
    "–": "-", "—": "-", "‑": "-", "‐": "-", "−": "-", "…": "...", "\u00a0": " ", "\u202f": " ", "\t": " ", "\n": " ",
    "\r": " ",
}  # fmt: skip
_LEAST_SHARE = 0.2  # of a word that stands for a stand-in which the model changed, or for a term and others
_LEAST_SHARE_OF_TERM = 0.55  # on average, of words that a term replaces
_LEAST_SHARE_OF_FORM = 0.05  # of a word that is a form of a term
_MAX_BETWEEN = 3  # marks between two copies that have one stand-in
_MAX_ENDING = 3  # letters that a model adds to a name, such as a genitive's
_LEAST_STEM = 4  # letters that two forms of a word share


@dataclass(frozen=True)
class Edit:
    """A part of a sentence that the model reads in another form."""

    start: int
    end: int
    text: str  # a space separates a name from a word that touches what it stands for
    written: str | None = None  # what its place in the translation gets; None for what the model writes
    is_term: bool = False  # the model reads it as it is

    @property
    def name(self) -> str:
        return self.text.strip(" ")

    def is_in(self, word: str) -> bool:
        """Return True for a form of the term, or a compound with it at its start or its end."""
        term, word = _form(self.written or ""), _form(word)
        stem = len([*takewhile(bool, map(eq, term, word))])
        is_other_form = stem >= _LEAST_STEM and max(len(term), len(word)) - stem <= _MAX_ENDING
        return is_other_form or word.startswith(term) or word.endswith(term)


Piece = tuple[str, int, Edit | None]  # a text, and its place in what the model wrote or what it is a copy of


@dataclass(frozen=True)
class AlignedWord:
    """A word of a sentence."""

    start: int
    end: int
    is_mark: bool = False  # a punctuation mark
    kept: Span | None = None  # the part of the source that the word is a copy of


@dataclass(frozen=True)
class Aligned:
    """A translated sentence with its words and the shares between them."""

    text: str
    source_words: Sequence[AlignedWord]
    target_words: Sequence[AlignedWord]
    shares: Weights  # of each source word in the target words: (target words, source words)
    places: Sequence[Span]  # of each character that the model wrote


class Sentence:
    """A sentence, and its form for the model."""

    def __init__(
        self,
        text: str,
        kept: Sequence[Kept],
        terms: Sequence[Mark],
        unknown: Sequence[int],
        edges: Collection[int] = (),
    ) -> None:
        """Make stand-ins for what is kept and for words with characters that the model lacks.

        At the `edges` of marks, what is kept before and after has stand-ins of its own.
        """
        self.text = text
        self.edits = _edits(text, kept, terms, unknown, edges)
        gaps = [*pairwise([0, *chain.from_iterable((edit.start, edit.end) for edit in self.edits), len(text)])][::2]
        words = " ".join(text[start:end] for start, end in gaps)
        self._is_upper = words.isupper() and len(words.split()) > 1
        if self._is_upper:  # models know few words in capitals
            lower = text[:1] + _cased(text[1:], str.lower)
            plain = [Edit(start, end, lower[start:end]) for start, end in gaps]
            self.edits = sorted([*self.edits, *plain], key=lambda edit: (edit.start, edit.end))
        self.model_text, position = "", 0
        self.origins: list[Span] = []  # of each character that the model reads
        for edit in [*self.edits, Edit(len(text), len(text), "")]:
            self.model_text += text[position : edit.start] + edit.text
            is_same_size = len(edit.text) == edit.end - edit.start and (edit.written is None or edit.is_term)
            self.origins += [(at, at + 1) for at in range(position, edit.end if is_same_size else edit.start)]
            self.origins += [] if is_same_size else [(edit.start, edit.end)] * len(edit.text)
            position = edit.end

    @property
    def kept(self) -> list[Edit]:
        return [edit for edit in self.edits if edit.written is not None]

    def aligned(self, translated: Translated, groups: Sequence[Span]) -> Aligned:
        """Return the translation with what is kept in the place of its stand-ins.

        `groups` are the marks of the sentence as ranges of the source: what is kept inside of each
        must stay together. The first and the last character stand for what precedes and follows.
        """
        shares = shared(translated.weights)
        sources = [
            _word(self.text, self.origins[start][0], self.origins[end - 1][1]) for start, end in translated.source_words
        ]
        columns = {
            edit: [index for index, word in enumerate(sources) if word.start < edit.end and edit.start < word.end]
            for edit in self.kept
        }
        targets, copies = _Targets(translated, shares), [edit for edit in self.kept if not edit.is_term]
        found = {edit: targets.find(edit, columns[edit]) for edit in sorted(copies, key=targets.certainty)}
        places = {edit: found[edit] or targets.beside(columns[edit]) for edit in copies}
        if not _are_together(copies, [*places.values()], groups, len(self.text)):
            places = dict(zip(copies, sorted(places.values()), strict=True))
        terms = {edit: targets.find_term(edit, columns[edit]) for edit in self.kept if edit.is_term}
        places |= {edit: place for edit, place in terms.items() if place is not None}
        own = {column for edit in copies for column in columns[edit]}
        left = [(word, index) for index, word in enumerate(sources) if index not in own]
        left += [(AlignedWord(edit.start, edit.end, kept=(edit.start, edit.end)), -1) for edit in copies]
        return self._restored(translated, places, columns, sorted(left, key=lambda source: source[0].start))

    def _restored(
        self,
        translated: Translated,
        places: dict[Edit, Span],
        columns: dict[Edit, list[int]],
        sources: Sequence[tuple[AlignedWord, int]],
    ) -> Aligned:
        """Return a translation with what is kept over its places, and the words of both sides.

        `sources` are the words of the source with their columns; -1 for what is kept.
        """
        chosen = [index for _, index in sources]
        # A word with little weight, such as an article, counts as much as others.
        votes = translated.weights / np.maximum(translated.weights.sum(axis=0), np.finfo(np.float32).tiny)
        padded = np.pad(votes, ((0, 0), (0, 1)))  # no share of what is kept
        text, words, rows = "", list[AlignedWord](), list[Weights]()
        written = [(0, 0)] * len(translated.text)  # where each character of the model is
        for piece, place, edit in self._pieces(translated, places):
            if edit is not None:
                kept = None if edit.is_term else (edit.start, edit.end)
                words.append(AlignedWord(len(text), len(text) + len(piece), kept=kept))
                found = [column in columns[edit] if edit.is_term else word.kept == kept for word, column in sources]
                rows.append(np.array(found, np.float32))
                first, last = places[edit]
                written[first:last] = [(len(text), len(text) + len(piece))] * (last - first)
            else:
                written[place : place + len(piece)] = [(at, at + 1) for at in range(len(text), len(text) + len(piece))]
            for index, (start, end) in enumerate(translated.target_words if edit is None else ()):
                first, last = max(start - place, 0), min(end - place, len(piece))
                if first < last:
                    words.append(_word(piece, first, last, len(text)))
                    rows.append(padded[index, chosen])
            text += _cased(piece, str.upper) if self._is_upper and edit is None else piece
        rows_of_words = np.array(rows).reshape(len(rows), len(sources))
        return Aligned(text, [word for word, _ in sources], words, rows_of_words, written)

    def _pieces(self, translated: Translated, places: dict[Edit, Span]) -> list[Piece]:
        """Return a translation in pieces: what is kept, and what the model wrote between."""
        text, pieces, position = translated.text, list[Piece](), 0

        def add(piece: str, place: int = len(text), edit: Edit | None = None) -> None:
            if piece:
                pieces.append((piece, place, edit))

        def widened(start: int, end: int, before: bool, after: bool) -> Span:
            return start - (before and text[:start].endswith(" ")), end + (after and text[end:].startswith(" "))

        changes: list[tuple[Span, Span, Edit | None]] = [
            (widened(*place, edit.text.startswith(" "), edit.text.endswith(" ")), place, edit)
            for edit, place in sorted(places.items(), key=lambda item: item[0].start)
        ]
        # A name that a model repeats is debris.
        names = {edit.name for edit in places if not edit.is_term}
        for start, end in translated.target_words:
            if text[start:end] in names and not any(start < last and end > first for first, last in places.values()):
                changes.append((widened(start, end, True, not text[:start].endswith(" ")), (start, end), None))
        for (start, end), place, edit in sorted(changes, key=lambda change: change[1]):
            add(text[position:start], position)
            position = max(position, end)
            if edit is None:
                continue
            is_new, touches = place[0] == place[1], text[position : position + 1].isalnum()
            if is_new and not edit.text.startswith(" ") and pieces and not pieces[-1][0][-1].isspace():
                add(" ")
            written = edit.written or ""
            if edit.is_term and not pieces and self.text[:1].isupper():
                written = written[:1].upper() + written[1:]
            add(written, edit=edit)
            if touches and not edit.text.endswith(" "):
                add(" " if is_new else "-" * (text[slice(*place)] == edit.name))  # a compound of the name
        add(text[position:], position)
        return pieces


def _cased(text: str, change: Callable[[str], str]) -> str:
    """Return a text of the same length in capitals, or in lower case."""
    return "".join(change(each) if len(change(each)) == 1 else each for each in text)


def _form(word: str) -> str:
    """Return a word without a capital at its start and without accents, which forms may have."""
    letters = [letter for letter in unicodedata.normalize("NFD", word) if not unicodedata.combining(letter)]
    return "".join([letters[0].lower(), *letters[1:]] if letters else ())


def _word(text: str, start: int, end: int, shift: int = 0) -> AlignedWord:
    return AlignedWord(start + shift, end + shift, not any(map(str.isalnum, text[start:end])))


class _Targets:
    """The words of a translation, of which each can be taken by one stand-in."""

    def __init__(self, translated: Translated, shares: Weights) -> None:
        self._text, self._words, self._shares = translated.text, translated.target_words, shares
        self._taken: list[Span] = []  # characters

    def certainty(self, edit: Edit) -> int:
        """Return a number to sort by: stand-ins that occur once come first."""
        return abs(len(self._literal(edit)) - 1)

    def _literal(self, edit: Edit) -> list[tuple[int, Span]]:
        """Return where the name is: the index of the word, and the characters."""
        found = [match.span() for match in re.finditer(rf"(?<!\w){edit.name}", self._text)]
        words = enumerate(self._words)
        return [(index, place) for index, word in words for place in found if word[0] <= place[0] < word[1]]

    def _is_free(self, start: int, end: int) -> bool:
        return not any(start < last and first < end for first, last in self._taken)

    def find(self, edit: Edit, columns: Sequence[int]) -> Span | None:
        """Return the characters that stand for a stand-in, and take their words."""
        share = share_of(self._shares, columns)
        literal = [found for found in self._literal(edit) if self._is_free(*found[1])]
        if literal:
            index, (start, end) = max(literal, key=lambda found: share[found[0]])
            ending = re.compile(r"[^\W\d_]*").match(self._text, end, max(end, self._words[index][1]))
            assert ending is not None, "it may be empty"
            return self._take(start, ending.end() if ending.end() - end <= _MAX_ENDING else end)
        values = self._values(share, 0.5)
        best = best_range(values, 0, len(values))
        if best is None and values and max(values) >= _LEAST_SHARE - 0.5:
            best = int(np.argmax(values)), int(np.argmax(values)) + 1
        return None if best is None else self._take(self._words[best[0]][0], self._words[best[1] - 1][1])

    def find_term(self, edit: Edit, columns: Sequence[int]) -> Span | None:
        """Return the characters that a term replaces, and take their words.

        None if a form of the term is there, or a word that also stands for others, such as a
        compound; this word stays.
        """
        share, size = share_of(self._shares, columns), len(edit.written or "")
        if any(
            value >= _LEAST_SHARE_OF_FORM and edit.is_in(self._text[start : max(end, start + size)])
            for value, (start, end) in zip(share, self._words, strict=True)
        ):
            return None
        values = self._values(share, _LEAST_SHARE_OF_TERM)
        if best := best_range(values, 0, len(values)):
            return self._take(self._words[best[0]][0], self._words[best[1] - 1][1])
        return None if values and max(share) >= _LEAST_SHARE else self.beside(columns)

    def _values(self, share: NDArray[np.float64], least: float) -> list[float]:
        """Return what each word adds to the value of a range of words, see `best_range`."""
        return [
            value - least if self._is_free(*word) and any(map(str.isalnum, self._text[slice(*word)])) else -np.inf
            for value, word in zip(share, self._words, strict=True)
        ]

    def _take(self, start: int, end: int) -> Span:
        self._taken.append((start, end))
        return start, end

    def beside(self, columns: Sequence[int]) -> Span:
        """Return the place after the translation of the word before a stand-in.

        Without one, it is before the mark at the end of the translation.
        """
        if columns and columns[0] > 0 and self._shares.size and self._shares[:, columns[0] - 1].any():
            end = self._words[int(self._shares[:, columns[0] - 1].argmax())][1]
            return end, end
        if columns and columns[0] == 0:
            return 0, 0
        end = len(self._text)
        while end and not self._text[end - 1].isalnum():
            end -= 1
        return end, end


def _are_together(edits: Sequence[Edit], places: Sequence[Span], groups: Sequence[Span], size: int) -> bool:
    """Return True if what is kept inside of each mark has nothing else that is kept within."""
    ordered = sorted(zip(places, edits, strict=True), key=lambda pair: (pair[0], pair[1].start))
    for start, end in groups:
        are_inside = [start < 0, *[start <= edit.start and edit.end <= end for _, edit in ordered], end > size]
        if [is_inside for is_inside, _ in groupby(are_inside)].count(True) > 1:
            return False
    return True


def _edits(
    text: str, kept: Sequence[Kept], terms: Sequence[Mark], unknown: Sequence[int], edges: Collection[int]
) -> list[Edit]:
    """Return the parts of a sentence that the model reads in another form, in order."""
    given = {(term.start, term.end): term.text for term in terms}
    words = word_spans(text) if unknown else []
    edges = {*edges, *chain(*given)}
    copies, plain = [(span.start, span.end) for span in kept], list[Edit]()
    for at in unknown:
        here = [span for span in (*copies, *given, *words) if span[0] <= at < span[1]]
        read = "" if unicodedata.category(text[at]) == "Cf" else _PLAIN.get(text[at])
        if read is not None and not any(span in given for span in here):
            plain.append(Edit(at, at + 1, read))
        else:
            copies.append(here[0] if here else (at, at + 1))
    joined = list[Span]()
    for start, end in sorted(copies):
        if joined and (start < joined[-1][1] or _are_joint(text, joined[-1][1], start, edges)):
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    names = [name for name in _NAMES if name not in text] or list(_NAMES)
    edits = [edit for edit in plain if not any(start < edit.end and edit.start < end for start, end in joined)]
    for number, (start, end) in enumerate(joined):
        touches = number > 0 and joined[number - 1][1] == start
        before = " " * (touches or text[start - 1 : start].isalnum())
        name = before + names[number % len(names)] + " " * text[end : end + 1].isalnum()
        edits.append(Edit(start, end, name, given.get((start, end), text[start:end])))
    edits += [
        Edit(*span, text[slice(*span)], written, is_term=True) for span, written in given.items() if span not in joined
    ]
    return sorted(edits, key=lambda edit: edit.start)


def _are_joint(text: str, start: int, end: int, edges: Collection[int]) -> bool:
    """Return True if two copies have nothing but a few marks between them, and no edge."""
    is_short = end - start <= _MAX_BETWEEN and not any(map(str.isalnum, text[start:end]))
    return is_short and not any(start <= edge <= end for edge in edges)
