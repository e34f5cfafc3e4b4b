"""Parts that the formats of files share: texts while they are read, their limits and errors."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sightline.translation.marks import Mark, MarkedText, PlacedMark, TranslatedText

MAX_BYTES = 100 * 2**20  # of a file
MAX_UNPACKED_BYTES = 500 * 2**20  # of all files in an archive
MAX_PARTS = 10_000  # files in an archive

Writer = Callable[[TranslatedText], None]
Node = str | tuple[int, list[Any]]  # a text, or the index of a mark with the nodes inside of it


class DocumentError(ValueError):
    """A file that cannot be read; the message completes its name."""


class Document(Protocol):
    """A file that was read."""

    texts: list[MarkedText]

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        """Return the file with the translations of its texts; called once."""
        ...


class Texts:
    """The texts of a document, each with a function that writes its translation."""

    def __init__(self) -> None:
        self.texts: list[MarkedText] = []
        self._writers: list[Writer] = []

    def add(self, text: MarkedText, writer: Writer) -> None:
        self.texts.append(text)
        self._writers.append(writer)

    def apply(self, translations: Sequence[TranslatedText]) -> None:
        for writer, translation in zip(self._writers, translations, strict=True):
            writer(translation)


class TextBuilder:
    """Builds a text with marks, and keeps what each mark stands for."""

    def __init__(self) -> None:
        self._text = ""
        self._marks: list[Mark] = []
        self._open: list[int] = []
        self.things: list[Any] = []

    def add(self, text: str) -> None:
        self._text += text

    def open(self, thing: Any) -> None:
        """Begin a mark around what is added until `close`."""
        self._mark(thing, "")
        self._open.append(len(self._marks) - 1)

    def close(self) -> None:
        index = self._open.pop()
        mark = self._marks[index]
        self._marks[index] = Mark(mark.start, len(self._text), parent=mark.parent)

    def point(self, thing: Any, text: str = "") -> None:
        """Add a mark whose text, if any, is copied."""
        self._mark(thing, text)

    def _mark(self, thing: Any, text: str) -> None:
        start = len(self._text)
        self._text += text
        parent = self._open[-1] if self._open else None
        self._marks.append(Mark(start, len(self._text), "keep" if text else "around", parent=parent))
        self.things.append(thing)

    def finish(self) -> MarkedText:
        return MarkedText(self._text, self._marks)


def unchanged(text: MarkedText) -> TranslatedText:
    """Return a text as its own translation."""
    placed = [PlacedMark(index, mark.start, mark.end) for index, mark in enumerate(text.marks)]
    return TranslatedText(text.text, placed)


def nodes_of(source: MarkedText, translation: TranslatedText) -> list[Node]:
    """Return a translation as texts and marks inside of each other."""
    root: list[Node] = []
    levels: list[tuple[int | None, int, list[Node]]] = [(None, len(translation.text), root)]
    position = 0

    def write(end: int) -> None:
        nonlocal position
        if end > position:
            levels[-1][2].append(translation.text[position:end])
            position = end

    for mark in translation.marks:
        while len(levels) > 1 and levels[-1][0] != source.marks[mark.index].parent:
            write(levels[-1][1])
            levels.pop()
        write(mark.start)
        inner: list[Node] = []
        own = source.marks[mark.index]
        # A point between two spaces keeps them, of which a model writes one at most.
        is_spaced = own.start == own.end and len(source.text[max(own.start - 1, 0) : own.end + 1].split(" ")) == 3
        if is_spaced and mark.start and not translation.text[mark.start - 1].isspace():
            levels[-1][2].append(" ")
        levels[-1][2].append((mark.index, inner))
        if is_spaced and translation.text[mark.start : mark.start + 1].isalnum():
            levels[-1][2].append(" ")
            continue
        levels.append((mark.index, mark.end, inner))
    for _, end, _ in reversed(list(levels)):
        write(end)
        levels.pop()
    return root


def decode(data: bytes) -> tuple[str, str]:
    """Return the text of a file and its encoding: UTF-8, or UTF-16 with a byte order mark."""
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if is_wide else "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
    try:
        return data.decode(encoding), encoding
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(f"is not UTF-8, at line {line}; convert it to UTF-8") from None


def parse_xml(data: bytes) -> Any:
    """Return the root of an XML file, in which no entity is read from elsewhere or expanded."""
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    try:
        root = etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        raise DocumentError(f"is not well-formed XML, at line {error.position[0]}; repair it") from None
    dtd = root.getroottree().docinfo.internalDTD
    if dtd is not None and next(iter(dtd.iterentities()), None) is not None:
        raise DocumentError("declares entities, which are not read; replace them by their texts")
    return root


def xml_bytes(root: Any) -> bytes:
    from lxml import etree

    info = root.getroottree().docinfo
    written: bytes = etree.tostring(
        root.getroottree(), encoding=info.encoding or "UTF-8", xml_declaration=True, standalone=info.standalone or None
    )
    return written
