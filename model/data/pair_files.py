"""Pairs of texts in files of translators.

    .tmx                                            translation memories, TMX 1.1 to 1.4
    .xlf, .xliff, .sdlxliff, .mqxliff, .mxliff      XLIFF 1.2 and 2

XML is parsed as a stream: one unit at a time is in memory. Inline codes are left out, their
surroundings stay. Entities of a document are rejected, because they may expand without limit.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from html import unescape
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from sightline.base.text.languages import find_language
from sightline.model.data.files import MAX_LINE_BYTES, CorpusError, at, open_file

XML = (".tmx", ".xlf", ".xliff", ".sdlxliff", ".mqxliff", ".mxliff")

_BUFFER_BYTES = 2**16
_SCANNED_UNITS = 1_000  # whose languages are compared
_UNITS = ("tu", "trans-unit", "segment")
_NATIVE_CODE = ("bpt", "ept", "it", "ph", "ut", "sub")  # their content is no text
_NOT_TRANSLATED = re.compile("initial|new|needs-(translation|l10n|adaptation)")  # states of XLIFF

Unit = tuple[int, dict[str, str], str | None]  # line, texts by language, and the reason to leave it out


class _Parser:
    """Parser with the units that are complete."""

    def __init__(self, path: Path) -> None:
        self.units: list[Unit] = []
        self.declared: tuple[str, str] | None = None  # source and target of XLIFF, "" if it names none
        self._path, self._languages = path, ("", "")
        self._builder: TreeBuilder | None = None
        self._line = self._size = self._depth = 0  # of the open unit
        self.expat = expat.ParserCreate()
        self.expat.buffer_text = True
        self.expat.StartElementHandler = self._start
        self.expat.EndElementHandler = self._end
        self.expat.CharacterDataHandler = self._add
        self.expat.EntityDeclHandler = self._reject_entity
        self.expat.SkippedEntityHandler = lambda name, _: self._add(unescape(f"&{name};"))

    def _fail(self, problem: str) -> NoReturn:
        raise CorpusError(f"{at(self._path, self.expat.CurrentLineNumber)}: {problem}")

    def _reject_entity(self, *_: Any) -> NoReturn:
        self._fail("the file declares an entity; remove the declaration")

    def _start(self, full_name: str, fields: dict[str, str]) -> None:
        name = full_name.rpartition(":")[2]
        if name in ("xliff", "file") and ("srcLang" in fields or "source-language" in fields):
            source, target = ("srcLang", "trgLang") if "srcLang" in fields else ("source-language", "target-language")
            self._languages = fields[source], fields.get(target, "")
            self.declared = self.declared or self._languages
        if name in _UNITS and self._builder is None:
            self._builder, self._line, self._size = TreeBuilder(), self.expat.CurrentLineNumber, 0
        if self._builder is not None:
            self._builder.start(name, fields)
            self._depth += 1

    def _add(self, text: str) -> None:
        if self._builder is not None:
            self._size += len(text)
            if self._size > MAX_LINE_BYTES:
                self._fail(f"a unit is longer than {MAX_LINE_BYTES >> 20} MiB; divide it")
            self._builder.data(text)

    def _end(self, full_name: str) -> None:
        if self._builder is not None:
            self._builder.end(full_name.rpartition(":")[2])
            self._depth -= 1
            if not self._depth:
                self.units.append(self._unit(self._builder.close()))
                self._builder = None

    def _unit(self, unit: Element) -> Unit:
        sides = [(tuv.get("xml:lang") or tuv.get("lang") or "", tuv.find("seg")) for tuv in unit.findall("tuv")]
        if self.declared and unit.tag != "tu":
            names = zip(("source", "target"), self._languages, strict=True)
            sides = [(language or name, unit.find(name)) for name, language in names]
        texts, reasons = dict[str, str](), [_state_of(unit)]
        for tag, side in sides:
            if side is not None:
                text = " ".join("".join(_texts(side)).split())
                texts.setdefault(side.get("xml:lang") or tag, text)
                reasons += [_state_of(side), None if text or not len(side) else "with only tags"]
        return self._line, texts, next(filter(None, reasons), None)


def _state_of(element: Element) -> str | None:
    return "not translated" if _NOT_TRANSLATED.match(element.get("state", "")) else None


def _texts(element: Element) -> Iterator[str]:
    """Yield the text of an element without the content of inline codes."""
    yield element.text or ""
    for child in element:
        if "lb" in (child.get("ctype"), child.get("type"), child.get("subType", "")[-2:]):
            yield " "  # a line break
        if child.tag not in _NATIVE_CODE:
            yield from _texts(child)
        yield child.tail or ""


def _read_units(path: Path, parser: _Parser) -> Iterator[Unit]:
    with open_file(path) as file:
        try:
            while content := file.read(_BUFFER_BYTES):
                parser.expat.Parse(content, False)
                yield from parser.units
                parser.units.clear()
            parser.expat.Parse(b"", True)
        except expat.ExpatError as error:
            raise CorpusError(
                f"{at(path, error.lineno)}, column {error.offset + 1}: XML error: {expat.ErrorString(error.code)}; "
                "correct the line, or export the file again"
            ) from None


def languages_in(path: Path) -> tuple[list[str], tuple[str, str] | None]:
    """Return the languages of the first units, the most frequent first, and the direction that an
    XLIFF file declares.
    """
    parser, counts, spelling = _Parser(path), Counter[str](), dict[str, str]()
    for _, texts, _ in islice(_read_units(path, parser), _SCANNED_UNITS):
        counts.update(spelling.setdefault(tag.casefold(), tag) for tag in texts)
    if not counts:
        raise CorpusError(f"{path} has no units with texts; check that it is a TMX or XLIFF file")
    return [tag for tag, _ in counts.most_common()], parser.declared


def read_units(path: Path, source: str, target: str) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yield the line of each unit of a TMX or XLIFF file, and its source and target, or the reason
    why it is left out.
    """
    find = lru_cache(_find_sides)
    has_pairs, tags = False, Counter[str]()
    for number, texts, reason in _read_units(path, _Parser(path)):
        tags.update(texts.keys())
        sides = find(source, target, tuple(texts))
        if sides is None or reason is not None:
            yield number, reason or "without one of the languages"
            continue
        has_pairs = True
        pair = {"source": texts[sides[0]], "target": texts[sides[1]]}
        yield number, "identical" if pair["source"] == pair["target"] != "" else pair
    if not has_pairs:
        found = ", ".join(f"{tag} ({number:,})" for tag, number in tags.most_common(10))
        raise CorpusError(
            f"{path} has no unit with texts in {source} and {target}, but texts in {found or 'no language'}; name "
            "others with --source and --target"
        )


def _find_sides(source: str, target: str, tags: tuple[str, ...]) -> tuple[str, str] | None:
    first = find_language(source, tags)
    second = find_language(target, tags) or ("target" if "target" in tags else None)  # of XLIFF that names none
    return None if first is None or second is None or first == second else (first, second)
