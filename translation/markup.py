"""HTML and XML as texts with marks: one for each block, title or attribute that people read."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sightline.base.text.sentences import has_letter
from sightline.translation.elements import INVALID, PAIR, add_content
from sightline.translation.marks import Texts, TranslatedText

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
    "pre rp rt script source style svg template textarea track video wbr"
)
CODE = _names("code kbd samp tt var")
_FORMATS = _names("b big del em font i ins mark s small span strike strong u")
_ATTRIBUTES = _names("alt aria-description aria-label aria-placeholder label placeholder summary title")
_META = _names(
    "description keywords og:title og:description og:image:alt twitter:title twitter:description twitter:image:alt"
)
_RIGHT_TO_LEFT = _names("ar arc ckb dv fa he ps sd ug ur yi")
_END = re.compile(r"</(html|body)\b", re.IGNORECASE)
_VOID = ("source", "track", "wbr")
_HIDDEN, _PART = "sightline-end-", "sightline-part"
_DECLARATION = re.compile(r"<\?xml\b[^>]*\?>\s*")
XHTML = "{http://www.w3.org/1999/xhtml}"


@dataclass(frozen=True)
class Tags:
    """Roles of the elements of HTML or XML, beside those that HTML defines."""

    kind: MarkupKind
    kept: frozenset[str] = frozenset()  # copied with their content
    blocks: frozenset[str] = frozenset()  # they end a sentence
    inline: frozenset[str] = frozenset()  # they are a part of one
    has_outline: bool = True  # elements of XML without text beside them end a sentence
    keeps_spaces: bool = False  # line breaks of HTML end a sentence
    splits_formats: bool = False  # elements that only format may occur several times in a translation


HTML = Tags("html")


class MarkupError(ValueError):
    """Markup that cannot be read; the message completes "It"."""


class Markup(Texts):
    """A document or a part of one, with the texts in it."""

    def __init__(self, source: str, tags: Tags) -> None:
        """Read HTML, also if it is damaged, or XML.

        Raises `MarkupError`, or `ModuleNotFoundError` without lxml.
        """
        super().__init__()
        self._is_html = tags.kind == "html"
        source = INVALID.sub("", source)
        declaration = None if self._is_html else _DECLARATION.match(source)
        self._declaration = declaration[0] if declaration else ""
        source = source.removeprefix(self._declaration)
        self._root, self._is_part = _read_html(source) if self._is_html else _read_xml(source)
        if any(depth > MAX_DEPTH for depth in _depths(self._root)):
            raise MarkupError(f"It must have at most {MAX_DEPTH} elements inside of each other.")
        add_markup(self, self._root, tags)
        for text, mark, name in self.tags if tags.splits_formats else ():
            marks = [*self.texts[text].marks]
            marks[mark] = replace(marks[mark], may_split=name in _FORMATS)
            self.texts[text] = replace(self.texts[text], marks=marks)

    @property
    def tags(self) -> Iterator[tuple[int, int, str]]:
        """Yield the text, the mark and the name of each element inside of a text."""
        for text, elements in enumerate(self.things):
            for mark, element in enumerate(elements):
                if isinstance(element.tag, str) and element.tag != PAIR:
                    yield text, mark, element.tag

    def write(self, translations: Sequence[TranslatedText], language: str) -> str:
        """Return the markup with the translations of its texts."""
        from lxml import etree

        self.apply(translations)
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


def add_markup(texts: Texts, root: Any, tags: Tags) -> None:
    """Add the texts of an element: its blocks, and the attributes that people read."""
    _add_block(texts, root, tags)
    if tags.kind == "html":
        _add_attributes(texts, root, tags)


def _add_block(texts: Texts, element: Any, tags: Tags) -> None:
    """Add the texts of an element that contains whole sentences."""
    is_html = tags.kind == "html"
    if _is_kept(element, tags) or (is_html and _name(element) in _POINTS):
        return

    def stands_for(inner: Any) -> str | None:
        if not isinstance(inner.tag, str):
            return ""
        if is_html and _name(inner) in _POINTS:
            return "\n" if _name(inner) == "br" else ""
        text = "".join(inner.itertext())
        is_note = _name(inner) == "sup" or "noteref" in "".join(inner.attrib.values())
        is_number = is_note and not has_letter(text)
        if is_html and text.strip() and (is_number or not any(map(str.isalnum, text))):
            return ""
        return text if _is_kept(inner, tags) else None

    def finish() -> None:
        add_content(texts, element, after, inline, stands_for, collapses=is_html and not tags.keeps_spaces)

    has_text = any((text or "").strip() for text in [element.text, *[child.tail for child in element]])
    after, inline = None, list[Any]()
    for child in list(element):
        if _is_inline(child, tags, has_text):
            inline.append(child)
        else:
            finish()
            _add_block(texts, child, tags)
            after, inline = child, []
    finish()


def _name(element: Any) -> str:
    """Return the name of an element of HTML or XHTML; it is empty for a comment or an entity."""
    return element.tag.removeprefix(XHTML) if isinstance(element.tag, str) else ""


def _is_inline(element: Any, tags: Tags, has_text: bool) -> bool:
    is_html = tags.kind == "html"
    blocks = tags.blocks | (_BLOCKS - tags.inline if is_html else frozenset())
    if any(_name(inner) in blocks for inner in element.iter()):
        return False
    return is_html or has_text or not tags.has_outline or _name(element) in ("", *tags.inline)


def _is_kept(element: Any, tags: Tags) -> bool:
    """Return True for an element whose text must not be translated."""
    name = _name(element)
    if not name or element.get("translate") == "no" or name in tags.kept:
        return True
    # Pictures and formulas in XHTML have another namespace.
    return tags.kind == "html" and (name in CODE or name[0] == "{" or "notranslate" in element.get("class", "").split())


def _add_attributes(texts: Texts, element: Any, tags: Tags) -> None:
    """Add the attributes of an element of HTML, and of those inside of it."""
    if _is_kept(element, tags):
        return
    names = [name for name in element.attrib if name in _ATTRIBUTES]
    if _name(element) == "meta" and (element.get("name") or element.get("property") or "").lower() in _META:
        names.append("content")
    if _name(element) == "input" and element.get("type", "").lower() in ("submit", "button", "reset"):
        names.append("value")
    for name in names:
        add_attribute(texts, element, name)
    for child in element:
        _add_attributes(texts, child, tags)


def add_attribute(texts: Texts, element: Any, name: str) -> None:
    texts.add_plain(element.get(name), lambda text: element.set(name, INVALID.sub("", text)))


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
    """Return the root element, and True if it is around the source; prefixes need no namespace."""
    from lxml import etree

    is_part = "<!DOCTYPE" not in source
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, encoding="utf-8", recover=True)
    root = etree.fromstring((f"<root>{source}</root>" if is_part else source).encode(), parser)
    for error in parser.error_log:
        if error.type_name != "NS_ERR_UNDEFINED_NAMESPACE":
            raise MarkupError(f"It is not well-formed XML, at line {error.line}: {error.message}.")
    return root, is_part


def _depths(root: Any) -> Iterator[int]:
    depth = 0
    from lxml import etree

    for event, _ in etree.iterwalk(root, events=("start", "end")):
        depth += 1 if event == "start" else -1
        yield depth
