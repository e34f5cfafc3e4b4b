"""Parts that the formats of files share: limits, errors, encodings and XML."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from html import unescape
from typing import Any, Protocol

from sightline.translation.marks import MarkedText, TranslatedText

MAX_BYTES = 100 * 2**20  # of a file
MAX_UNPACKED_BYTES = 500 * 2**20  # of all files in an archive
MAX_PARTS = 10_000  # files in an archive
_ENTITY = re.compile(rb"&(?!(?:amp|lt|gt|quot|apos);)[A-Za-z]\w*;")
MAX_CHARACTERS, MAX_TEXTS = 8_000, 256  # of texts that are translated at once


class DocumentError(ValueError):
    """A file that cannot be read; the message completes its name."""


class Document(Protocol):
    """A file that was read."""

    texts: list[MarkedText]

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        """Return the file with the translations of its texts; called once."""
        ...


def groups_of(texts: Iterable[MarkedText]) -> Iterator[list[MarkedText]]:
    """Yield the texts of a document in groups that are translated one after the other."""
    group: list[MarkedText] = []
    for text in texts:
        size = sum(len(each.text) for each in group)
        if group and (len(group) >= MAX_TEXTS or size + len(text.text) > MAX_CHARACTERS):
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def decode(data: bytes) -> tuple[str, str]:
    """Return the text of a file and its encoding: UTF-8, or UTF-16 with a byte order mark."""
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if is_wide else "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
    try:
        return data.decode(encoding), encoding
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(f"is not UTF-8, at line {line}; convert it to UTF-8") from None


def ends_of_tags(tags: Iterable[tuple[int, str, bool]]) -> dict[int, int]:
    """Return the place of the end tag of each start tag that has one, by its place.

    `tags` are places, names, and True for end tags. Elements do not cross those without a name.
    """
    ends: dict[int, int] = {}
    waiting: list[tuple[int, str]] = []
    for place, name, is_end in tags:
        if not is_end:
            waiting.append((place, name))
            continue
        for index in reversed(range(len(waiting))):
            if waiting[index][1] == name:
                ends[waiting[index][0]] = place
                del waiting[index:]
            elif waiting[index][1]:
                continue
            break
    return ends


def parse_xml(data: bytes) -> Any:
    """Return the root of an XML file, in which no entity is read from elsewhere or expanded."""
    from lxml import etree

    if b"<!DOCTYPE html" in data:  # the DTD of XHTML is not read
        data = _ENTITY.sub(lambda entity: unescape(entity[0].decode()).encode("ascii", "xmlcharrefreplace"), data)
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
