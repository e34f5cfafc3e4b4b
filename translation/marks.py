"""Text with inline marks: the form that all formats of documents share.

A format turns each of its paragraphs into a `MarkedText`, and writes the `TranslatedText` back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Mark:
    """A part of a text that something surrounds, such as a tag or a format.

    A mark without characters (`start == end`) is a point, such as a picture or a footnote.
    """

    start: int
    end: int
    # `around`: the text inside is translated, and the mark follows its words. `keep`: the text
    # inside is copied, and takes the place of its translation.
    kind: Literal["around", "keep"] = "around"
    may_split: bool = False  # True if a scattered translation may have the mark several times
    parent: int | None = None  # index of the mark that this one is inside of; an earlier one


@dataclass(frozen=True)
class MarkedText:
    """A text that is translated as a whole, with its marks in the order in which they open."""

    text: str
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class PlacedMark:
    """A mark in a translation."""

    index: int  # of the mark in the source
    start: int
    end: int
    # Smallest share on the right side of its edges, over the words of its sentences: 1 for marks
    # that need no alignment, 0 if the words inside have no translation.
    confidence: float = 1.0


@dataclass(frozen=True)
class TranslatedText:
    """A translation with the marks of its source.

    Each mark of the source occurs once, or several times if it may be split. Marks are well-nested:
    each is inside of its parent, and those of one parent do not overlap. They are sorted, so that a
    mark precedes those after it and those inside of it.
    """

    text: str
    marks: Sequence[PlacedMark] = ()


def unchanged(text: MarkedText) -> TranslatedText:
    """Return a text as its own translation."""
    placed = [PlacedMark(index, mark.start, mark.end) for index, mark in enumerate(text.marks)]
    return TranslatedText(text.text, placed)


def as_source(source: MarkedText, translation: TranslatedText) -> MarkedText:
    """Return a translation as the source of another one."""
    positions: dict[int | None, int] = {mark.index: position for position, mark in enumerate(translation.marks)}
    marks = [
        replace(source.marks[mark.index], start=mark.start, end=mark.end, parent=positions.get(parent))
        for mark in translation.marks
        for parent in [source.marks[mark.index].parent]
    ]
    return MarkedText(translation.text, marks)


def chained(first: TranslatedText, second: TranslatedText) -> TranslatedText:
    """Return the translation of a translation, with the marks of the first source."""
    marks = [
        replace(mark, index=before.index, confidence=min(mark.confidence, before.confidence))
        for mark in second.marks
        for before in [first.marks[mark.index]]
    ]
    return TranslatedText(second.text, marks)
