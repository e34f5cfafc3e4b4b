"""Formats of files by the end of their names."""

from collections.abc import Callable
from typing import Any

from sightline.translation.files.archive import Archive
from sightline.translation.files.document import MAX_BYTES, MAX_UNPACKED_BYTES, Document, DocumentError
from sightline.translation.files.markdown import Markdown
from sightline.translation.files.office import OfficeFile
from sightline.translation.files.plain import PlainText
from sightline.translation.files.strings import JsonStrings, PoStrings, YamlStrings
from sightline.translation.files.subtitles import Subtitles
from sightline.translation.files.web import Epub, HtmlFile
from sightline.translation.files.xliff import Xliff

ARCHIVES = ("docx", "odt", "pptx", "epub")  # read as an `Archive`, and others as bytes
_EXTENSIONS: dict[Callable[[Any], Document], str] = {
    PlainText: "txt",
    Markdown: "md markdown",
    HtmlFile: "html htm",
    Subtitles: "srt vtt",
    PoStrings: "po pot",
    JsonStrings: "json",
    YamlStrings: "yaml yml",
    Xliff: "xliff xlf",
    OfficeFile: "docx odt pptx",
    Epub: "epub",
}
KINDS = {extension: kind for kind, extensions in _EXTENSIONS.items() for extension in extensions.split()}


def read_document(name: str, data: bytes, max_unpacked_bytes: int = MAX_UNPACKED_BYTES) -> Document:
    """Read a file by the end of its name.

    Raises `DocumentError`, or `ModuleNotFoundError` if the library of the format is missing.
    """
    extension = name.rpartition(".")[2].lower()
    if extension not in KINDS:
        raise DocumentError(f"has no known format; the formats are {', '.join(f'.{each}' for each in KINDS)}")
    if len(data) > MAX_BYTES:
        raise DocumentError(f"has {len(data) / 2**20:.0f} MiB, more than {MAX_BYTES // 2**20}; divide it")
    return KINDS[extension](Archive(data, max_unpacked_bytes) if extension in ARCHIVES else data)
