"""HTML files, and books of them (EPUB)."""

import codecs
import re
from collections.abc import Sequence
from typing import Any

from sightline.base.text.sentences import has_letter
from sightline.translation.files.archive import Archive
from sightline.translation.files.document import DocumentError, Texts, decode, parse_xml, xml_bytes
from sightline.translation.marks import MarkedText, TranslatedText
from sightline.translation.markup import Markup, MarkupError

_XHTML = "{http://www.w3.org/1999/xhtml}"
_NCX = "{http://www.daisy.org/z3986/2005/ncx/}"
_DC = "{http://purl.org/dc/elements/1.1/}"
_CHARSET = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)


class HtmlFile:
    """An HTML file."""

    def __init__(self, data: bytes) -> None:
        charset = _CHARSET.search(data[:4096])
        try:
            named = codecs.lookup(charset[1].decode()).name if charset else "utf-8"
            text, self._encoding = decode(data) if named == "utf-8" else (data.decode(named), named)
        except (LookupError, UnicodeDecodeError):
            text, self._encoding = decode(data)
        try:
            self._markup = Markup(text.strip(), "html")
        except MarkupError as error:
            raise DocumentError(f"cannot be read. {error}") from None
        self._edges = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        self.texts = self._markup.texts

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        written = self._markup.write(translations, language).strip()
        return f"{self._edges[0]}{written}{self._edges[1]}".encode(self._encoding, "xmlcharrefreplace")


class _Page(Markup):
    """A page of XHTML, as HTML whose elements have no namespace until it is written."""

    def __init__(self, root: Any) -> None:
        for element in list(root.iter(f"{_XHTML}*")):
            element.tag = element.tag.removeprefix(_XHTML)
        self._root, self._is_html, self._splits = root, True, False
        self._read()

    def _is_kept(self, element: Any) -> bool:
        is_foreign = isinstance(element.tag, str) and element.tag.startswith("{")  # pictures and formulas
        return is_foreign or super()._is_kept(element)

    def finish(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self._apply(translations)
        root = self._root
        for name in ("lang", "{http://www.w3.org/XML/1998/namespace}lang"):
            if root.get(name) is not None:
                root.set(name, language)
        for element in root.iter():
            if isinstance(element.tag, str) and not element.tag.startswith("{"):
                element.tag = f"{_XHTML}{element.tag}"
        return xml_bytes(root)


class Epub(Texts):
    """A book: its pages, its table of contents, and its title."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._archive = Archive(data)
        self._pages: dict[str, _Page] = {}
        self._roots: dict[str, Any] = {}
        if self._archive.names(r"META-INF/(encryption|rights)\.xml"):
            raise DocumentError("is encrypted; use a copy without protection")
        for name in self._archive.names(r"(?i).*\.(xhtml|html?)"):
            self._pages[name] = _Page(parse_xml(self._archive.read(name)))
            self.texts += self._pages[name].texts
        for name in self._archive.names(r".*\.(opf|ncx)"):
            self._roots[name] = root = parse_xml(self._archive.read(name))
            for element in root.iter(f"{_NCX}text", f"{_DC}title", f"{_DC}description"):
                if has_letter(element.text or ""):
                    self.add(MarkedText(element.text), lambda result, element=element: _set(element, result))  # type: ignore[misc]

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        changed, position = {}, 0
        for name, page in self._pages.items():
            end = position + len(page.texts)
            changed[name] = page.finish(translations[position:end], language)
            position = end
        self.apply(translations[position:])
        for name, root in self._roots.items():
            for element in root.iter(f"{_DC}language"):
                element.text = language
            changed[name] = xml_bytes(root)
        return self._archive.write(changed)


def _set(element: Any, result: TranslatedText) -> None:
    element.text = result.text
