"""Pairs of texts in files of translators.

    .tmx                                            translation memories, TMX 1.1 to 1.4
    .xlf, .xliff, .sdlxliff, .mqxliff, .mxliff      XLIFF 1.2 and 2
    .txt, .tsv without names of columns             columns source and target, and others, by tabs

XML is parsed as a stream: one unit at a time is in memory. Inline codes are left out, their
surroundings stay. Entities of a document are rejected, because they may expand without limit.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import unescape
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from xml.parsers import expat

from sightline.base.text.languages import find_language, language_name
from sightline.model.data.files import MAX_LINE_BYTES, CorpusError, Row, at, open_file, read_texts

XML = (".tmx", ".xlf", ".xliff", ".sdlxliff", ".mqxliff", ".mxliff")
TABS = (".txt", ".tsv")

_BUFFER_BYTES = 2**16
_SCANNED_UNITS = 1_000  # whose languages are compared
_NATIVE_CODE = frozenset(("bpt", "ept", "it", "ph", "ut", "sub"))  # their content is no text
_NOT_TRANSLATED = re.compile("initial|new|needs-(translation|l10n|adaptation)")  # states of XLIFF
_NAMES_OF_COLUMNS = frozenset(("source", "target", "src", "tgt"))


class _Units:
    """Handlers of a parser. `units` has the units that are complete: the line of each, its texts by
    language, and the reason to leave it out, if there is one.
    """

    def __init__(self, path: Path) -> None:
        self.units: list[tuple[int, dict[str, str], str | None]] = []
        self.declared: tuple[str, str] | None = None  # source and target of XLIFF, "" if it names none
        self._path = path
        self._open: list[str] = []  # names of open elements
        self._texts: dict[str, str] = {}
        self._reason: str | None = None
        self._line = self._size = self._codes = 0
        self._tag = ""
        self._text: list[str] | None = None  # of the open segment
        self._end = 0  # number of open elements around it
        self._has_code = False
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._close
        self.parser.CharacterDataHandler = self._add
        self.parser.EntityDeclHandler = self._reject_entity
        self.parser.SkippedEntityHandler = lambda name, _: self._add(unescape(f"&{name};"))

    def _reject_entity(self, *_: Any) -> NoReturn:
        raise CorpusError(f"{self._where()}: the file declares an entity; remove the declaration")

    def _where(self) -> str:
        return at(self._path, self.parser.CurrentLineNumber)

    def _start(self, full_name: str, fields: dict[str, str]) -> None:
        name, parent = full_name.rpartition(":")[2], self._open[-1] if self._open else ""
        self._open.append(name)
        if self._text is not None:
            self._has_code = True
            self._codes += name in _NATIVE_CODE
            if "lb" in (fields.get("ctype"), fields.get("type"), fields.get("subType", "")[-2:]):
                self._text.append(" ")  # a line break
        elif name in ("xliff", "file") and ("srcLang" in fields or "source-language" in fields):
            source, target = ("srcLang", "trgLang") if "srcLang" in fields else ("source-language", "target-language")
            self._languages = fields[source], fields.get(target, "")
            self.declared = self.declared or self._languages
        elif name in ("tu", "trans-unit", "segment"):
            self._line, self._texts, self._size = self.parser.CurrentLineNumber, {}, 0
            self._reason = self._state_of(fields)
        elif name == "tuv":
            self._tag = fields.get("xml:lang") or fields.get("lang") or ""
        elif (name == "seg" and parent == "tuv") or (
            name in ("source", "target") and parent in ("trans-unit", "segment") and self.declared
        ):
            if name != "seg":
                self._tag = fields.get("xml:lang") or self._languages[name == "target"] or name
            self._reason = self._reason or self._state_of(fields)
            self._text, self._end, self._codes, self._has_code = [], len(self._open), 0, False

    @staticmethod
    def _state_of(fields: dict[str, str]) -> str | None:
        return "not translated" if _NOT_TRANSLATED.match(fields.get("state", "")) else None

    def _add(self, text: str) -> None:
        if self._text is not None and not self._codes:
            self._size += len(text)
            if self._size > MAX_LINE_BYTES:
                raise CorpusError(f"{self._where()}: a unit is longer than {MAX_LINE_BYTES >> 20} MiB; divide it")
            self._text.append(text)

    def _close(self, full_name: str) -> None:
        name = full_name.rpartition(":")[2]
        if self._text is not None and len(self._open) == self._end:
            text = " ".join("".join(self._text).split())
            if not text and self._has_code:
                self._reason = self._reason or "with only tags"
            self._texts.setdefault(self._tag, text)
            self._text = None
        elif self._text is not None:
            self._codes -= name in _NATIVE_CODE
        elif name in ("tu", "trans-unit", "segment"):
            self.units.append((self._line, self._texts, self._reason))
        self._open.pop()


def _read_units(path: Path, state: _Units) -> Iterator[tuple[int, dict[str, str], str | None]]:
    with open_file(path) as file:
        try:
            while content := file.read(_BUFFER_BYTES):
                state.parser.Parse(content, False)
                yield from state.units
                state.units.clear()
            state.parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise CorpusError(
                f"{at(path, error.lineno)}, column {error.offset + 1}: XML error: {expat.ErrorString(error.code)}; "
                "correct the line, or export the file again"
            ) from None


def languages_in(path: Path) -> tuple[list[str], tuple[str, str] | None]:
    """Return the languages of the first units, the most frequent first, and the direction that an
    XLIFF file declares.
    """
    state, counts = _Units(path), Counter[str]()
    for _, texts, _ in islice(_read_units(path, state), _SCANNED_UNITS):
        counts.update(texts.keys())
    if not counts:
        raise CorpusError(f"{path} has no units with texts; check that it is a TMX or XLIFF file")
    return [tag for tag, _ in counts.most_common()], state.declared


def read_units(path: Path, source: str, target: str) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yield the line of each unit of a TMX or XLIFF file, and its source and target, or the reason
    why it is left out.
    """
    find = lru_cache(_find_sides)
    has_pairs, tags = False, Counter[str]()
    for number, texts, reason in _read_units(path, _Units(path)):
        tags.update(texts.keys())
        sides = find(source, target, tuple(texts))
        if reason is None and sides is None:
            reason = "without one of the languages"
        if reason is not None or sides is None:
            yield number, reason or ""
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


def has_no_names(path: Path, names: Sequence[str | None], encoding: str | None) -> bool:
    """Return whether the first line of a file with tabs has no names of columns: none is usual, a
    language, or one of `names`. Numbers of columns name them, too.
    """
    if any(name is not None and name.isdecimal() for name in names):
        return False
    _, line = next(read_texts(path, encoding), (1, ""))
    cells = [cell.strip().casefold() for cell in line.split("\t")]
    usual = _NAMES_OF_COLUMNS | {name.casefold() for name in names if name}
    return len(cells) > 1 and not any(cell in usual or language_name(cell) != cell for cell in cells)


def read_tabs(path: Path, encoding: str | None) -> Iterator[Row]:
    """Yield the first two columns of each line of a file without names of columns."""
    for number, line in read_texts(path, encoding):
        cells = line.split("\t")
        if len(cells) > 1:
            yield number, {"source": cells[0], "target": cells[1]}
        elif line.strip():
            raise CorpusError(
                f"{at(path, number)}: no tab; each line must be source, tab and target. The sides of two files "
                "are found by names such as corpus.de.txt and corpus.en.txt in the same folder"
            )
