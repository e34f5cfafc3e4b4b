"""Text with inline marks: the form that all formats of documents share.

A format turns each of its paragraphs into a `MarkedText`, and writes the `TranslatedText` back.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sightline.base.text.sentences import has_letter

SPACE = re.compile(r"[ \t\r\n\f]+")  # what browsers and office programs show as one space
Node = str | tuple[int, list[Any]]  # a text, or the index of a mark with the nodes inside of it


@dataclass(frozen=True)
class Mark:
    """A part of a text that something surrounds, such as a tag or a format.

    A mark without characters (`start == end`) is a point, such as a picture or a footnote.
    """

    start: int
    end: int
    # `around`: the text inside is translated, and the mark follows its words. `keep`: the text
    # inside is copied, and takes the place of its translation. `term`: another text does; such
    # marks come last, may overlap the others, and are not in the translation.
    kind: Literal["around", "keep", "term"] = "around"
    parent: int | None = None  # index of the mark that this one is inside of; an earlier one
    may_split: bool = False  # if its translation is scattered, the mark occurs several times
    text: str = ""  # the translation of a term


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
    """A translation with the marks of its source, each of which occurs once unless it may split.

    Marks are well-nested: each is inside of its parent, and those of one parent do not overlap.
    They are sorted, so that a mark precedes those after it and those inside of it.
    """

    text: str
    marks: Sequence[PlacedMark] = ()
    sentences: Sequence[tuple[int, int, int, int]] = ()  # start and end in the source, start and end here
    findings: Sequence[Any] = ()  # of the engine about sentences, those of a first model included


Writer = Callable[[TranslatedText], None]


class Texts:
    """The texts of a document, each with a function that writes its translation."""

    def __init__(self) -> None:
        self.texts: list[MarkedText] = []
        self.things: list[Sequence[Any]] = []  # what the marks of each text stand for
        self._writers: list[Writer] = []

    def add(self, text: MarkedText, writer: Writer, things: Sequence[Any] = ()) -> None:
        self.texts.append(text)
        self.things.append(things)
        self._writers.append(writer)

    def add_plain(self, text: str | None, write: Callable[[str], None]) -> None:
        """Add a text without marks, if it has words."""
        if text and has_letter(text):
            self.add(MarkedText(text), lambda result: write(result.text))

    def apply(self, translations: Sequence[TranslatedText]) -> None:
        """Write the translations; called once.

        The document, which its writers refer to, is freed with its last reference.
        """
        writers, self._writers = self._writers, []
        for writer, translation in zip(writers, translations, strict=True):
            writer(translation)


class TextBuilder:
    """Builds a text with marks, and keeps what each mark stands for."""

    def __init__(self, *, collapses: bool = False) -> None:
        """Begin a text, in which whitespace is one space if it `collapses`."""
        self.collapses = collapses
        self._text = ""
        self._marks: list[Mark] = []
        self._open: list[int] = []
        self.things: list[Any] = []

    def add(self, text: str) -> None:
        if self.collapses:
            text = SPACE.sub(" ", text)
            last = len(self._marks) - 1
            is_after_point = last >= 0 and last not in self._open and self._marks[last].start == len(self._text)
            if not self._text[-1:].strip() and not is_after_point:
                text = text.removeprefix(" ")
        self._text += text

    def open(self, thing: Any) -> None:
        """Begin a mark around what is added until `close`."""
        self._mark(thing, "")
        self._open.append(len(self._marks) - 1)

    def close(self) -> None:
        index = self._open.pop()
        self._marks[index] = replace(self._marks[index], end=len(self._text))

    def point(self, thing: Any, text: str = "") -> None:
        """Add a mark whose text, if any, is copied."""
        self._mark(thing, text)

    def _mark(self, thing: Any, text: str) -> None:
        start = len(self._text)
        self._text += text
        parent = self._open[-1] if self._open else None
        self._marks.append(Mark(start, len(self._text), "keep" if text else "around", parent))
        self.things.append(thing)

    def finish(self) -> MarkedText:
        """Return the text; one that collapses has no space at its end, unless before a point."""
        last = max((mark.start for mark in self._marks if mark.start == mark.end), default=0)
        text = self._text[:last] + self._text[last:].rstrip(" ") if self.collapses else self._text
        marks = [replace(mark, start=min(mark.start, len(text)), end=min(mark.end, len(text))) for mark in self._marks]
        return MarkedText(text, marks)


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
    return TranslatedText(second.text, marks, findings=[*first.findings, *second.findings])


_Children = Mapping[int | None, Sequence[PlacedMark]]  # by the index of their parent


def _by_parent(marks: Sequence[Mark], placed: Sequence[PlacedMark]) -> _Children:
    children: dict[int | None, list[PlacedMark]] = {}
    for mark in placed:
        children.setdefault(marks[mark.index].parent, []).append(mark)
    return children


def nodes_of(source: MarkedText, translation: TranslatedText) -> list[Node]:
    """Return a translation as texts and marks inside of each other."""
    text = translation.text
    return _nodes_inside(None, 0, len(text), _by_parent(source.marks, translation.marks), source, text)


def _nodes_inside(
    parent: int | None, position: int, end: int, children: _Children, source: MarkedText, text: str
) -> list[Node]:
    nodes: list[Node] = []
    for mark in children.get(parent, ()):
        own = source.marks[mark.index]
        nodes.append(text[position : mark.start])
        # A space that only separates a point from a word is not translated.
        before, after = source.text[max(own.start - 1, 0) : own.start], source.text[own.end : own.end + 1]
        is_spaced = own.start == own.end and before == " " and not after.isalnum()
        if is_spaced and mark.start and not text[mark.start - 1].isspace():
            nodes.append(" ")
        nodes.append((mark.index, _nodes_inside(mark.index, mark.start, mark.end, children, source, text)))
        if is_spaced and after == " " and text[mark.end : mark.end + 1].isalnum():
            nodes.append(" ")
        position = mark.end
    return [node for node in [*nodes, text[position:end]] if node]


def nested(marks: Sequence[Mark], placed: Sequence[PlacedMark], size: int) -> list[PlacedMark]:
    """Return placed marks in order, each inside of its parent and none over a part of another."""
    return list(_nested_inside(None, 0, size, _by_parent(marks, placed)))


def _nested_inside(parent: int | None, start: int, end: int, children: _Children) -> Iterator[PlacedMark]:
    for child in sorted(children.get(parent, ()), key=lambda mark: (mark.start, mark.end, mark.index)):
        first = min(max(child.start, start), end)
        start = min(max(child.end, first), end)
        yield replace(child, start=first, end=start)
        yield from _nested_inside(child.index, first, start, children)
