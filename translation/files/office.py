"""Formats of office programs (DOCX, PPTX, ODT) and XLIFF: paragraphs of XML, whose formatting is
marks.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sightline.base.text.sentences import has_letter
from sightline.translation.files.archive import Archive
from sightline.translation.files.document import Node, TextBuilder, Texts, nodes_of, parse_xml, unchanged, xml_bytes
from sightline.translation.marks import MarkedText, TranslatedText

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # characters that no XML has


@dataclass(frozen=True)
class _Words:
    """Text in a format."""

    text: str
    format: Any = None
    is_marked: bool = False  # it has another format than most text of the paragraph


class _Points(NamedTuple):
    """Elements that stay as they are, and have no text to translate."""

    elements: list[Any]


class _Around(NamedTuple):
    """Elements around text: what is before it, what is inside, and what is after it."""

    before: list[Any]
    items: list[Any]
    after: list[Any]
    inner: Any  # the element that the items are children of; None if they have no own element


class ParagraphsOfRuns:
    """Paragraphs of DOCX and PPTX: a run is text in one format."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.paragraph = f"{prefix}p"
        self._run, self._format, self._text = f"{prefix}r", f"{prefix}rPr", f"{prefix}t"
        self._dropped = {f"{prefix}{name}" for name in ("proofErr", "lastRenderedPageBreak", "softHyphen")}
        self._kept = {f"{prefix}{name}" for name in ("pPr", "endParaRPr")}
        self._deleted = {f"{prefix}{name}" for name in ("del", "moveFrom")}
        self._characters = {f"{prefix}tab": "\t", f"{prefix}cr": "\n", f"{prefix}noBreakHyphen": "\u2011"}

    def read(self, element: Any) -> tuple[list[Any], Any]:
        """Return the items of a paragraph, and the format of most of its text."""
        items = self._items(element)
        sizes: dict[str, int] = {}
        formats: dict[str, Any] = {}
        for words in _all_words(items):
            key = _key(words.format)
            sizes[key] = sizes.get(key, 0) + len(words.text)
            formats.setdefault(key, words.format)
        most = max(sizes, key=lambda key: sizes[key], default="")
        return _with_marks(items, most), formats.get(most)

    def _items(self, element: Any) -> list[Any]:
        items: list[Any] = []
        for child in element:
            if child.tag in self._kept or child.tag in self._dropped or self._is_property(child):
                continue
            if child.tag == self._run:
                items += self._of_run(child)
            elif child.tag == f"{self._prefix}br" and self._prefix == _A:
                items.append(_Words("\n", child.find(self._format)))
            else:
                inner = None if child.tag in self._deleted else self._inner(child)
                if inner is None:
                    items.append(_Points([child]))
                else:
                    items.append(_Around([child], self._items(inner), [], inner))
        return _fields(items) if self._prefix == _W else items

    def _is_property(self, element: Any) -> bool:
        return isinstance(element.tag, str) and element.tag.startswith(self._prefix) and element.tag.endswith("Pr")

    def _inner(self, element: Any) -> Any:
        """Return the element in which the runs of a part of a paragraph are, such as a link."""
        if not isinstance(element.tag, str) or not element.tag.startswith(self._prefix):
            return None
        if element.tag == f"{self._prefix}fld":
            return None  # the number of a page, or a date
        run = next(element.iter(self._run), None)
        return None if run is None or next(element.iter(self.paragraph), None) is not None else run.getparent()

    def _of_run(self, run: Any) -> Iterator[Any]:
        own = run.find(self._format)
        for child in list(run):
            if child.tag == self._format or child.tag in self._dropped:
                continue
            is_break = child.tag == f"{_W}br" and child.get(f"{_W}type") in (None, "textWrapping")
            if child.tag == self._text:
                yield _Words(child.text or "", own)
            elif child.tag in self._characters or is_break:
                yield _Words(self._characters.get(child.tag, "\n"), own)
            else:
                part = run.makeelement(run.tag, run.attrib, run.nsmap)
                if own is not None:
                    part.append(copy.deepcopy(own))
                part.append(child)
                yield _Points([part])

    def clear(self, element: Any) -> Any:
        """Remove the text of a paragraph; return the element that stays at its end, if any."""
        for child in list(element):
            if child.tag not in self._kept and not self._is_property(child):
                element.remove(child)
        return element.find(f"{self._prefix}endParaRPr")

    def elements(self, text: str, own: Any, parent: Any) -> Iterator[Any]:
        """Yield the runs of a text."""
        is_slide = self._prefix == _A
        for part in filter(None, re.split(r"(\n)" if is_slide else r"([\n\t])", text)):
            is_break = is_slide and part == "\n"
            run = parent.makeelement(f"{_A}br" if is_break else self._run)
            if own is not None:
                run.append(copy.deepcopy(own))
            if not is_break:
                tag = {"\n": f"{self._prefix}br", "\t": f"{self._prefix}tab"}.get(part, self._text)
                child = run.makeelement(self._text if is_slide else tag)
                run.append(child)
                if child.tag == self._text:
                    child.text = part
                    if not is_slide and part != part.strip():
                        child.set(_SPACE, "preserve")
            yield run


class MixedParagraphs:
    """Paragraphs of ODT and XLIFF: text and elements inside of each other."""

    def __init__(self, around: Sequence[str], *, is_odt: bool) -> None:
        self._around, self._is_odt = set(around), is_odt

    def read(self, element: Any) -> tuple[list[Any], Any]:
        return self._items(element), None

    def _items(self, element: Any) -> list[Any]:
        items = self._words(element.text)
        for child in element:
            if child.tag == f"{_TEXT}s":
                items.append(_Words(" " * min(int(child.get(f"{_TEXT}c", "1")), 1000)))
            elif child.tag == f"{_TEXT}tab":
                items.append(_Words("\t"))
            elif child.tag == f"{_TEXT}line-break":
                items.append(_Words("\n"))
            elif child.tag in self._around and child.get("translate") != "no" and child.get("mtype") != "protected":
                items.append(_Around([child], self._items(child), [], child))
            elif child.tag != f"{_TEXT}soft-page-break":
                items.append(_Points([child]))
            items += self._words(child.tail)
        return items

    def _words(self, text: str | None) -> list[Any]:
        text = re.sub(r"[ \t\r\n]+", " ", text or "") if self._is_odt else text
        return [_Words(text)] if text else []

    def clear(self, element: Any) -> None:
        element.text = None
        for child in list(element):
            element.remove(child)

    def elements(self, text: str, own: Any, parent: Any) -> Iterator[Any]:
        """Yield texts and elements that stand for a character."""
        for part in filter(None, re.split(r"(\n|\t|(?<= ) +)", text)) if self._is_odt else [text]:
            name = {"\n": "line-break", "\t": "tab"}.get(part, "s" if not part.strip() and self._is_odt else "")
            if not name or (part == " " and not text.startswith("  ")):
                yield part
                continue
            child = parent.makeelement(f"{_TEXT}{name}")
            if name == "s":
                child.set(f"{_TEXT}c", str(len(part)))
            yield child


Form = ParagraphsOfRuns | MixedParagraphs


def add_paragraph(texts: Texts, form: Form, source: Any, target: Any = None) -> None:
    """Add the text of a paragraph, whose translation is written there or into another element."""
    items, base = form.read(source)
    builder = TextBuilder()
    _add_items(builder, items)
    text = builder.finish()
    element = source if target is None else target
    if has_letter(text.text):
        texts.add(text, lambda result: _write(form, element, base, builder, text, result))
    elif builder.things:  # their elements were taken out of their runs
        _write(form, element, base, builder, text, unchanged(text))


def _add_items(builder: TextBuilder, items: Sequence[Any]) -> None:
    for item in items:
        if isinstance(item, _Points):
            builder.point(item)
        elif isinstance(item, _Around):
            builder.open(item)
            _add_items(builder, item.items)
            builder.close()
        elif not item.is_marked:
            builder.add(item.text)
        else:
            builder.open(item)
            builder.add(item.text)
            builder.close()


def _write(form: Form, element: Any, base: Any, builder: TextBuilder, text: MarkedText, result: TranslatedText) -> None:
    base = copy.deepcopy(base)

    def fill(parent: Any, nodes: list[Node], own: Any) -> None:
        last = form.clear(parent)
        for child in content(nodes, own, parent):
            if isinstance(child, str):
                if len(parent):
                    parent[-1].tail = (parent[-1].tail or "") + child
                else:
                    parent.text = (parent.text or "") + child
            elif last is None:
                parent.append(child)
            else:
                last.addprevious(child)

    def content(nodes: list[Node], own: Any, parent: Any) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, str):
                yield from form.elements(_INVALID.sub("", node), own, parent)
                continue
            thing = builder.things[node[0]]
            if isinstance(thing, _Words):
                yield from content(node[1], thing.format, parent)
            elif isinstance(thing, _Points):
                yield from map(_alone, thing.elements)
            else:
                if thing.inner is not None:
                    fill(thing.inner, node[1], own)
                yield from map(_alone, thing.before)
                if thing.inner is None:
                    yield from content(node[1], own, parent)
                yield from map(_alone, thing.after)

    fill(element, nodes_of(text, result), base)


def _alone(element: Any) -> Any:
    element.tail = None
    return element


def _all_words(items: Sequence[Any]) -> Iterator[_Words]:
    for item in items:
        if isinstance(item, _Words):
            yield item
        elif isinstance(item, _Around):
            yield from _all_words(item.items)


def _key(own: Any) -> str:
    """Return a text that is the same for formats that look the same."""
    if own is None:
        return ""
    from lxml import etree

    parts = [
        etree.tostring(child, method="c14n", with_tail=False).decode()
        for child in own
        if etree.QName(child).localname not in ("lang", "noProof")
    ]
    ignored = ("lang", "altLang", "dirty", "err", "noProof")
    return "".join([*parts, *[f"{name}={value}" for name, value in sorted(own.attrib.items()) if name not in ignored]])


def _with_marks(items: Sequence[Any], most: str) -> list[Any]:
    """Return items of which neighbours in the same format are joined, marked if it is not that of
    most text.
    """
    joined: list[Any] = []
    for item in items:
        if isinstance(item, _Around):
            item = item._replace(items=_with_marks(item.items, most))
        elif isinstance(item, _Words):
            item = _Words(item.text, item.format, _key(item.format) != most)
            before = joined[-1] if joined else None
            if isinstance(before, _Words) and _key(before.format) == _key(item.format):
                joined[-1] = _Words(before.text + item.text, before.format, before.is_marked)
                continue
        joined.append(item)
    return joined


def _fields(items: list[Any]) -> list[Any]:
    """Join the parts of each field: links around their text, and others as they are."""
    result: list[Any] = []
    open_fields: list[tuple[int, Any]] = []
    for item in items:
        result.append(item)
        kind = _field_part(item)
        if kind == "begin":
            open_fields.append((len(result) - 1, None))
        elif kind == "separate" and open_fields:
            open_fields[-1] = open_fields[-1][0], len(result) - 1
        elif kind == "end" and open_fields:
            first, middle = open_fields.pop()
            parts = result[first:]
            code = " ".join(
                each.text or ""
                for part in parts[: (middle or len(result)) - first]
                if isinstance(part, _Points)
                for element in part.elements
                for each in element.iter(f"{_W}instrText")
            )
            if middle is not None and "HYPERLINK" in code:
                before = [element for part in result[first : middle + 1] for element in _elements(part)]
                result[first:] = [_Around(before, result[middle + 1 : -1], _elements(parts[-1]), None)]
            else:
                result[first:] = [_Points([element for part in parts for element in _elements(part)])]
    return result


def _field_part(item: Any) -> str:
    if isinstance(item, _Points) and len(item.elements) == 1:
        mark = item.elements[0].find(f"{_W}fldChar")
        return "" if mark is None else str(mark.get(f"{_W}fldCharType"))
    return ""


def _elements(item: Any) -> list[Any]:
    """Return the elements of an item of a field that is not translated."""
    if isinstance(item, _Points):
        return item.elements
    if isinstance(item, _Around):
        inner = [element for each in item.items for element in _elements(each)]
        if item.inner is None:
            return [*item.before, *inner, *item.after]
        for element in inner:
            item.inner.append(element)
        return item.before
    form = ParagraphsOfRuns(_W)
    from lxml import etree

    return list(form.elements(item.text, item.format, etree.Element(f"{_W}p", nsmap={"w": _W.strip("{}")})))


PARTS: Mapping[str, tuple[str, Form, Sequence[str]]] = {
    "docx": (
        r"word/(document|header|footer|footnotes|endnotes|comments)\d*\.xml",
        ParagraphsOfRuns(_W),
        [f"{_W}p"],
    ),
    "pptx": (
        r"ppt/(slides/slide|notesSlides/notesSlide|diagrams/data|diagrams/drawing|charts/chart)\d*\.xml",
        ParagraphsOfRuns(_A),
        [f"{_A}p"],
    ),
    "odt": (
        r"(content|styles)\.xml",
        MixedParagraphs([f"{_TEXT}span", f"{_TEXT}a"], is_odt=True),
        [f"{_TEXT}p", f"{_TEXT}h"],
    ),
}


class OfficeFile(Texts):
    """A DOCX, PPTX or ODT file."""

    def __init__(self, data: bytes, extension: str) -> None:
        super().__init__()
        self._archive = Archive(data)
        names, form, paragraphs = PARTS[extension]
        self._roots = {name: parse_xml(self._archive.read(name)) for name in self._archive.names(names)}
        for root in self._roots.values():
            for paragraph in list(root.iter(*paragraphs)):
                add_paragraph(self, form, paragraph)

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        return self._archive.write({name: xml_bytes(root) for name, root in self._roots.items()})


class Xliff(Texts):
    """An XLIFF file, 1.2 or 2.0: the targets of the segments that have none."""

    def __init__(self, data: bytes) -> None:
        from lxml import etree

        super().__init__()
        self._root = parse_xml(data)
        space = f"{{{etree.QName(self._root).namespace}}}" if etree.QName(self._root).namespace else ""
        self._is_old = self._root.get("version", "").startswith("1")
        form = MixedParagraphs([f"{space}{name}" for name in ("g", "pc", "mrk")], is_odt=False)
        for source in list(self._root.iter(f"{space}source")):
            unit = source.getparent()
            if etree.QName(unit).localname not in ("trans-unit", "segment") or self._is_fixed(source):
                continue
            target = unit.find(f"{space}target")
            if target is not None and ("".join(target.itertext()).strip() or len(target)):
                continue
            attributes = {} if target is None else dict(target.attrib)
            written = copy.deepcopy(source)
            written.tag, written.tail = f"{space}target", source.tail
            for name in attributes:
                written.set(name, attributes[name])
            written.attrib.pop(f"{_SPACE}", None)
            if target is not None:
                unit.remove(target)
            after = unit.find(f"{space}seg-source")
            (source if after is None else after).addnext(written)
            if self._is_old:
                written.set("state", "translated")
            elif unit.get("state") in (None, "initial"):
                unit.set("state", "translated")
            add_paragraph(self, form, written)

    @staticmethod
    def _is_fixed(source: Any) -> bool:
        return any(element.get("translate") == "no" for element in [source, *source.iterancestors()])

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        if self._is_old:
            for file in self._root.iter("{*}file"):
                file.set("target-language", language)
        else:
            self._root.set("trgLang", language)
        return xml_bytes(self._root)
