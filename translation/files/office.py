"""Formats of office programs: DOCX, PPTX and ODT."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sightline.translation.elements import PAIR, add_content
from sightline.translation.files.archive import Archive
from sightline.translation.files.document import parse_xml, xml_bytes
from sightline.translation.marks import Texts, TranslatedText
from sightline.translation.markup import add_attribute

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_PARTS = (
    r"word/(document|header|footer|footnotes|endnotes|comments)\d*\.xml"
    r"|(word|ppt)/(slides/slide|notesSlides/notesSlide|diagrams/data|diagrams/drawing|charts/chart)\d*\.xml"
    r"|(content|styles|meta|docProps/core)\.xml"
)
_MARKED = "sightline-marked"  # element of text that has another format than most, during a translation


class OfficeFile(Texts):
    """A DOCX, PPTX or ODT file."""

    def __init__(self, archive: Archive) -> None:
        super().__init__()
        self._archive = archive
        self._roots = {name: parse_xml(self._archive.read(name)) for name in self._archive.names(_PARTS)}
        self._paragraphs: list[_Runs] = []
        for root in self._roots.values():
            for paragraph in list(root.iter(f"{_W}p", f"{_A}p", f"{_TEXT}p", f"{_TEXT}h")):
                if paragraph.tag.startswith(_TEXT):
                    add_content(self, paragraph, None, list(paragraph), _stands_for_in_odt, collapses=True)
                    continue
                prefix = paragraph.tag[:-1]
                runs = _Runs(paragraph, prefix)
                self._paragraphs.append(runs)
                content = [child for child in paragraph if child.tag not in (f"{prefix}pPr", f"{prefix}endParaRPr")]
                add_content(self, paragraph, paragraph.find(f"{prefix}pPr"), content, runs.stands_for, collapses=False)
            for element in [*root.iter("{*}title", "{*}desc"), *root.iterfind(".//{*}strCache//{*}v")]:
                self.add_plain(element.text, partial(setattr, element, "text"))
            for element in root.iter("{*}docPr", "{*}cNvPr"):  # pictures and shapes
                add_attribute(self, element, "title")
                add_attribute(self, element, "descr")

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        for paragraph in self._paragraphs:
            paragraph.restore()
        return self._archive.write({name: xml_bytes(root) for name, root in self._roots.items()})


def _stands_for_in_odt(element: Any) -> str | None:
    if element.tag in (f"{_TEXT}span", f"{_TEXT}a", PAIR):
        return None
    is_field = len(element) == 0 and str(element.tag).startswith(_TEXT)  # such as the number of a page
    return {f"{_TEXT}tab": "\t", f"{_TEXT}line-break": "\n"}.get(element.tag, (element.text or "") if is_field else "")


class _Runs:
    """A paragraph of DOCX or PPTX, whose runs become text until it is restored.

    A run is text in one format. Text in the format that most of the paragraph, or of a link in it,
    has is between the elements there, and other text in an element around it.
    """

    def __init__(self, paragraph: Any, prefix: str) -> None:
        self._paragraph, self._prefix = paragraph, prefix
        self._run, self._format, self._text = f"{prefix}r", f"{prefix}rPr", f"{prefix}t"
        self._dropped = {f"{prefix}{name}" for name in ("rPr", "proofErr", "lastRenderedPageBreak", "softHyphen")}
        self._formats: dict[Any, Any] = {}  # of marked text
        self._with_runs: list[Any] = []  # elements inside of the paragraph that have runs
        self._open(paragraph)
        keys = {marked: _key(own) for marked, own in self._formats.items()}
        sizes: dict[Any, Counter[str]] = {element: Counter() for element in [paragraph, *self._with_runs]}
        for marked, key in keys.items():
            sizes[marked.getparent()][key] += len(marked.text)
        self._bases = dict.fromkeys(sizes)  # the format of most of the text, by element
        for marked, key in keys.items():
            before, parent = marked.getprevious(), marked.getparent()
            is_base = key == sizes[parent].most_common(1)[0][0]
            if is_base:
                self._bases[parent] = self._formats[marked]
            if is_base and before is None:
                parent.text = (parent.text or "") + marked.text
            elif is_base:
                before.tail = (before.tail or "") + marked.text
            elif before is not None and not before.tail and keys.get(before) == key:
                before.text += marked.text
            else:
                continue
            parent.remove(marked)
            del self._formats[marked]

    def _open(self, element: Any) -> None:
        """Replace each run by its parts: marked text, and runs of one thing that is no text."""
        for child in list(element):
            child.tail = None
            if child.tag in self._dropped:
                element.remove(child)
                continue
            if child.tag == self._run:
                for part in self._parts(child):
                    child.addprevious(part)
                element.remove(child)
            elif self._has_runs(child):
                self._with_runs.append(child)
                self._open(child)

    def _has_runs(self, element: Any) -> bool:
        is_own = isinstance(element.tag, str) and element.tag.startswith(self._prefix)
        is_deleted = element.tag in (f"{_W}del", f"{_W}moveFrom")
        tags = {inner.tag for inner in element.iter(self._run, f"{self._prefix}p")}
        return is_own and not is_deleted and tags == {self._run}

    def _parts(self, run: Any) -> Iterator[Any]:
        own = run.find(self._format)
        for child in list(run):
            text = "\u2011" if child.tag == f"{_W}noBreakHyphen" else child.text or ""
            if child.tag in (self._text, f"{_W}noBreakHyphen"):
                marked = run.makeelement(_MARKED)
                marked.text = text
                self._formats[marked] = own
                yield marked
            elif child.tag not in self._dropped:
                part = run.makeelement(run.tag, run.attrib)
                part[:] = [child] if own is None else [copy.deepcopy(own), child]
                yield part

    def stands_for(self, element: Any) -> str | None:
        if element.tag == _MARKED or element in self._with_runs:
            return None
        if element.tag == PAIR:  # a field whose text is no link is copied
            code = "".join(code.text or "" for code in element.iter(f"{_W}instrText"))
            is_text = "HYPERLINK" in code or element[0].find(f"{_W}fldChar") is None
            return None if is_text else "".join(element.itertext()).removeprefix(code)
        thing = element[-1] if element.tag == self._run else element
        return {f"{_W}tab": "\t", f"{_W}cr": "\n", f"{_W}br": "\n", f"{_A}br": "\n"}.get(thing.tag, "")

    def restore(self) -> None:
        """Make runs of the text again."""
        for element in [self._paragraph, *self._with_runs]:
            content = list(self._restored(element, self._bases[element]))
            element.text, element[:] = None, content

    def _restored(self, element: Any, own: Any) -> Iterator[Any]:
        yield from self._run_of(element.text, own)
        for child in list(element):
            tail, child.tail = child.tail, None
            if child.tag == _MARKED:
                yield from self._restored(child, self._formats[child])
            else:
                yield child
            yield from self._run_of(tail, own)

    def _run_of(self, text: str | None, own: Any) -> Iterator[Any]:
        if text:
            run = self._paragraph.makeelement(self._run)
            run[:] = [] if own is None else [copy.deepcopy(own)]
            child = run.makeelement(self._text)
            child.text = text
            if self._prefix == _W and text != text.strip():
                child.set(_SPACE, "preserve")
            run.append(child)
            yield run


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
