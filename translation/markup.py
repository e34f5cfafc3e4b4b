"""HTML and XML as texts with marks: one for each block, title or attribute that people read."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sightline.base.text.sentences import has_letter
from sightline.translation.marks import Mark, MarkedText, PlacedMark, TranslatedText

MarkupKind = Literal["html", "xml"]
MAX_DEPTH = 200  # of elements inside of each other


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Elements that end a sentence. All others are a part of it, also unknown ones.
_BLOCKS = _names(
    "address article aside blockquote body caption center col colgroup dd details dialog dir div dl dt fieldset "
    "figcaption figure footer form frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li main menu nav ol "
    "optgroup option p pre search section select summary table tbody td tfoot th thead title tr ul"
)
# Elements that stay as they are: without text, or with text that is no language.
_POINTS = _names(
    "area audio base br canvas embed iframe img input link map math meta object param picture progress meter noframes "
    "pre script source style svg template textarea track video wbr"
)
_CODE = _names("code kbd samp tt var")
_SPLIT = _names("b big em font i mark s small span strike strong sub sup u")
_ATTRIBUTES = _names("alt aria-description aria-label aria-placeholder label placeholder summary title")
_META = _names(
    "description keywords og:title og:description og:image:alt twitter:title twitter:description twitter:image:alt"
)
_RIGHT_TO_LEFT = _names("ar arc ckb dv fa he ps sd ug ur yi")
_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # characters that no XML has
_END = re.compile(r"</(html|body)\b", re.IGNORECASE)
_VOID = ("source", "track", "wbr")
_HIDDEN, _PART = "sightline-end-", "sightline-part"
_DECLARATION = re.compile(r"<\?xml\b[^>]*\?>\s*")
_SPACE = re.compile(r"[ \t\r\n\f]+")


class MarkupError(ValueError):
    """Markup that cannot be read; the message completes "It"."""


@dataclass
class _Run:
    """Text and inline elements in a row, which are translated as one text."""

    parent: Any
    after: Any  # the element before it in the parent; None for the start
    nodes: list[Any] = field(default_factory=list)
    # Of each mark: its element, True if that is copied as a whole, True if space is around it.
    elements: list[tuple[Any, bool, bool]] = field(default_factory=list)
    edges: tuple[str, str] = ("", "")  # whitespace around it


class Markup:
    """A document or a part of one, with the texts in it."""

    def __init__(self, source: str, kind: MarkupKind, *, splits_tags: bool = False) -> None:
        """Read HTML, also if it is damaged, or XML.

        With `splits_tags`, a format such as `<b>` may surround several parts of a translation.
        Raises `MarkupError`, or `ModuleNotFoundError` without lxml.
        """
        self._is_html, self._splits = kind == "html", splits_tags
        source = _INVALID.sub("", source)
        declaration = None if self._is_html else _DECLARATION.match(source)
        self._declaration = declaration[0] if declaration else ""
        self._root, self._is_part = _read_html(source) if self._is_html else _read_xml(source)
        if any(depth > MAX_DEPTH for depth in _depths(self._root)):
            raise MarkupError(f"It must have at most {MAX_DEPTH} elements inside of each other.")
        self._read()

    def _read(self) -> None:
        self.texts: list[MarkedText] = []
        self._writers: list[Callable[[TranslatedText], None]] = []
        self.tags: list[list[str]] = []  # names of the elements of each mark, by text; empty for comments
        self._read_block(self._root)

    def _apply(self, translations: Sequence[TranslatedText]) -> None:
        for writer, translation in zip(self._writers, translations, strict=True):
            writer(translation)

    def write(self, translations: Sequence[TranslatedText], language: str) -> str:
        """Return the markup with the translations of its texts."""
        from lxml import etree

        self._apply(translations)
        root = self._root
        if self._is_html and root.tag == "html":
            base = language.partition("-")[0]
            if root.get("lang") is not None:
                root.set("lang", language)
            if base in _RIGHT_TO_LEFT or root.get("dir") is not None:
                root.set("dir", "rtl" if base in _RIGHT_TO_LEFT else "ltr")
        method = "html" if self._is_html else "xml"
        document = root if self._is_part else root.getroottree()
        written: str = etree.tostring(document, encoding="unicode", method=method, with_tail=False)
        written = written.replace(f"</{_HIDDEN}", "</")  # in scripts and comments
        for name in _VOID if self._is_html else ():
            written = written.replace(f"</{name}>", "")
        if self._is_part:
            written = "" if written.endswith("/>") else written[written.index(">") + 1 : written.rindex("<")]
        return self._declaration + written

    def _read_block(self, element: Any) -> None:
        """Collect the texts of an element that contains whole sentences."""
        if self._is_kept(element) or (self._is_html and element.tag in _POINTS):
            return
        self._read_attributes(element)
        run = _Run(element, None)
        has_text = any((text or "").strip() for text in [element.text, *[child.tail for child in element]])
        for child in element:
            if self._is_inline(child, has_text):
                run.nodes.append(child)
            else:
                self._finish(run)
                if isinstance(child.tag, str):
                    self._read_block(child)
                run = _Run(element, child)
        self._finish(run)

    def _is_inline(self, element: Any, has_text: bool) -> bool:
        if not isinstance(element.tag, str):  # a comment, an instruction or an entity
            return True
        if not self._is_html:
            return has_text
        return element.tag not in _BLOCKS and not any(
            isinstance(inner.tag, str) and inner.tag in _BLOCKS for inner in element.iterdescendants()
        )

    def _is_kept(self, element: Any) -> bool:
        """Return True for an element whose text must not be translated."""
        if not isinstance(element.tag, str):
            return True
        is_html = self._is_html and (element.tag in _CODE or "notranslate" in element.get("class", "").split())
        return is_html or element.get("translate") == "no"

    def _read_attributes(self, element: Any) -> None:
        if not self._is_html or self._is_kept(element):
            return
        names = [name for name in element.attrib if name in _ATTRIBUTES]
        if element.tag == "meta" and (element.get("name") or element.get("property") or "").lower() in _META:
            names.append("content")
        if element.tag == "input" and element.get("type", "").lower() in ("submit", "button", "reset"):
            names.append("value")
        for name in names:
            if has_letter(element.get(name, "")):
                self._add(MarkedText(element.get(name)), _attribute_writer(element, name), [])

    def _finish(self, run: _Run) -> None:
        """Add the text of a run, if it has one."""
        builder = _TextBuilder(self._is_html)
        builder.add((run.parent.text if run.after is None else run.after.tail) or "")
        for node in run.nodes:
            self._flatten(node, builder, run, None)
            builder.add(node.tail or "")
        text = builder.finish()
        if has_letter(text.text):
            run.edges = builder.edges
            self._add(
                text,
                lambda translation: _write_run(run, text, translation),
                [_name(element) for element, *_ in run.elements],
            )

    def _add(self, text: MarkedText, writer: Callable[[TranslatedText], None], tags: list[str]) -> None:
        self.texts.append(text)
        self._writers.append(writer)
        self.tags.append(tags)

    def _flatten(self, element: Any, builder: "_TextBuilder", run: _Run, parent: int | None) -> None:
        """Add the text and the marks of an inline element."""
        index = len(builder.marks)
        is_kept = self._is_kept(element)
        is_point = not isinstance(element.tag, str) or (self._is_html and element.tag in _POINTS)
        if isinstance(element.tag, str):
            for inner in [element] if not is_point else element.iter("*"):
                self._read_attributes(inner)
        start = builder.size
        is_spaced = is_point and builder.ends_with_space and (element.tail or "x")[0].isspace()
        run.elements.append((element, is_kept or is_point, is_spaced))
        builder.marks.append(Mark(start, start))
        if is_point:
            if element.tag == "br" and self._is_html:
                builder.parts.append("\n")
                builder.size += 1
        elif is_kept:
            builder.add(_SPACE.sub(" ", "".join(element.itertext())), is_exact=True)
        else:
            builder.add(element.text or "")
            for child in element:
                self._flatten(child, builder, run, index)
                builder.add(child.tail or "")
        may_split = self._splits and self._is_html and element.tag in _SPLIT
        kind: Literal["around", "keep"] = "keep" if is_kept or is_point else "around"
        builder.marks[index] = Mark(min(start, builder.size), builder.size, kind, may_split, parent)


class _TextBuilder:
    """Text of a run; in HTML, whitespace is one space, as browsers show it."""

    def __init__(self, collapses: bool) -> None:
        self._collapses = collapses
        self.parts: list[str] = []
        self.size = 0
        self.marks: list[Mark] = []
        self.edges = "", ""

    @property
    def ends_with_space(self) -> bool:
        return bool(self.parts) and self.parts[-1][-1].isspace()

    def add(self, text: str, *, is_exact: bool = False) -> None:
        if self._collapses and not is_exact:
            leading = _SPACE.match(text)
            if leading and (not self.size or self.ends_with_space):
                if not self.size:
                    self.edges = self.edges[0] + leading[0], ""
                text = text[leading.end() :]
            trailing = _SPACE.search(text, len(text.rstrip(" \t\r\n\f")))
            if trailing or text:
                self.edges = self.edges[0], trailing[0] if trailing else ""
            text = _SPACE.sub(" ", text)
        if text:
            self.parts.append(text)
            self.size += len(text)

    def finish(self) -> MarkedText:
        text = "".join(self.parts)
        if (
            self._collapses
            and text.endswith(" ")
            and not any(mark.end == len(text) and mark.kind == "keep" for mark in self.marks)
        ):
            text = text[:-1]
            size = len(text)
            self.marks = [
                Mark(min(mark.start, size), min(mark.end, size), mark.kind, mark.may_split, mark.parent)
                for mark in self.marks
            ]
        elif self._collapses:
            self.edges = self.edges[0], ""
        return MarkedText(text, self.marks)


def _name(element: Any) -> str:
    return element.tag if isinstance(element.tag, str) else ""


def _attribute_writer(element: Any, name: str) -> Callable[[TranslatedText], None]:
    return lambda translation: element.set(name, _INVALID.sub("", translation.text))


def _write_run(run: _Run, source: MarkedText, translation: TranslatedText) -> None:
    """Replace a run by its translation."""
    for node in run.nodes:
        run.parent.remove(node)
    for element, is_whole, _ in run.elements:
        element.tail = None
        if not is_whole:
            element.text = None
            for child in list(element):
                element.remove(child)
    if run.after is None:
        run.parent.text = run.edges[0]
    else:
        run.after.tail = run.edges[0]
    offset = 0 if run.after is None else run.parent.index(run.after) + 1
    used: set[int] = set()
    # Each level: its element, the last child in it, and where its text continues and ends.
    levels: list[list[Any]] = [[run.parent, run.after, None]]
    position = 0

    def write(end: int) -> None:
        nonlocal position
        add(translation.text[position:end])
        position = max(position, end)

    def add(text: str) -> None:
        container, last, _ = levels[-1]
        text = _INVALID.sub("", text)
        if last is None:
            container.text = (container.text or "") + text or None
        else:
            last.tail = (last.tail or "") + text or None

    def close_until(mark: PlacedMark | None) -> None:
        parent = None if mark is None else source.marks[mark.index].parent
        while len(levels) > 1 and (parent is None or levels[-1][2].index != parent):
            write(levels[-1][2].end)
            levels.pop()

    for mark in translation.marks:
        close_until(mark)
        write(mark.start)
        element, is_whole, is_spaced = run.elements[mark.index]
        if is_spaced and position and not translation.text[position - 1].isspace():
            add(" ")
        if mark.index in used:
            element = copy.copy(element)
            element.text = element.tail = None
            element.attrib.pop("id", None)
            for child in list(element):
                element.remove(child)
        used.add(mark.index)
        container = levels[-1][0]
        if len(levels) == 1:
            container.insert(offset, element)
            offset += 1
        else:
            container.append(element)
        levels[-1][1] = element
        if is_whole:
            position = mark.end
            if is_spaced and translation.text[position : position + 1].isalnum():
                add(" ")
        else:
            levels.append([element, None, mark])
    close_until(None)
    write(len(translation.text))
    add(run.edges[1])


def _read_html(source: str) -> tuple[Any, bool]:
    """Return the root element, and True if the source is a part of a document.

    The library ignores all that follows the end tag of `html`, and moves what follows that of
    `body`. Both are optional, so they get an unknown name, which is ignored.
    """
    from lxml import html

    is_part = not re.match(r"\s*(?:<!--.*?-->\s*)*<(?:!doctype|html|head|body)\b", source, re.IGNORECASE | re.DOTALL)
    source = _END.sub(rf"</{_HIDDEN}\1", source)
    if is_part:
        source = f"<html><body><{_PART}>{source}</{_PART}>"
    root = html.document_fromstring(source.encode(), html.HTMLParser(huge_tree=True, encoding="utf-8"))
    for element in list(root.iter(*_VOID)):
        for child in reversed(element):  # the library does not know that they have no content
            element.addnext(child)
        element.tail, element.text = (element.text or "") + (element.tail or ""), None
    return (root.find(f"body/{_PART}"), True) if is_part else (root, False)


def _read_xml(source: str) -> tuple[Any, bool]:
    from lxml import etree

    def parse(text: str) -> Any:
        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, encoding="utf-8")
        return etree.fromstring(text.encode(), parser)

    try:
        return parse(source), False
    except etree.XMLSyntaxError:
        prefixes = sorted(set(re.findall(r"</?([A-Za-z_][\w.-]*):[A-Za-z_]|\s([A-Za-z_][\w.-]*):[\w.-]+=", source)))
        names = sorted({name for pair in prefixes for name in pair if name and name not in ("xml", "xmlns")})
        declared = "".join(f' xmlns:{name}="urn:{name}"' for name in names)
        try:
            return parse(f"<root{declared}>{source}</root>"), True
        except etree.XMLSyntaxError as error:
            line, _ = error.position
            raise MarkupError(
                f"It is not well-formed XML, at line {line}: {error.msg.partition(', line')[0]}."
            ) from None


def _depths(root: Any) -> Iterator[int]:
    depth = 0
    from lxml import etree

    for event, _ in etree.iterwalk(root, events=("start", "end")):
        depth += 1 if event == "start" else -1
        yield depth
