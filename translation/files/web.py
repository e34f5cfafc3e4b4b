"""HTML files, and books of them (EPUB)."""

import codecs
import re
from collections.abc import Sequence
from functools import partial

from sightline.translation.files.archive import Archive
from sightline.translation.files.document import DocumentError, decode, parse_xml, xml_bytes
from sightline.translation.files.strings import Strings
from sightline.translation.marks import TranslatedText
from sightline.translation.markup import HTML, XHTML, Markup, MarkupError, add_markup

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
            self._markup = Markup(text.strip(), HTML)
        except MarkupError as error:
            raise DocumentError(f"cannot be read. {error}") from None
        self._edges = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        self.texts = self._markup.texts

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        written = self._markup.write(translations, language).strip()
        return f"{self._edges[0]}{written}{self._edges[1]}".encode(self._encoding, "xmlcharrefreplace")


class Epub(Strings):
    """A book: its pages, its table of contents, and its title."""

    def __init__(self, archive: Archive) -> None:
        super().__init__()
        self._archive = archive
        if self._archive.names(r"META-INF/(encryption|rights)\.xml"):
            raise DocumentError("is encrypted; use a copy without protection")
        pages, others = self._archive.names(r"(?i).*\.(xhtml|html?)"), self._archive.names(r".*\.(opf|ncx)")
        self._roots = {name: parse_xml(self._archive.read(name)) for name in [*pages, *others]}
        for name in pages:
            add_markup(self, self._roots[name], HTML)
        for name in others:
            for element in self._roots[name].iter(f"{_NCX}text", f"{_DC}title", f"{_DC}description"):
                self.add_string(element.text or "", partial(setattr, element, "text"))

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        for root in self._roots.values():
            for name in ("lang", "{http://www.w3.org/XML/1998/namespace}lang"):
                if root.tag == f"{XHTML}html" and root.get(name) is not None:
                    root.set(name, language)
            for element in root.iter(f"{_DC}language"):
                element.text = language
        return self._archive.write({name: xml_bytes(root) for name, root in self._roots.items()})
