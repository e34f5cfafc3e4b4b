"""Files of a corpus as rows of fields.

Files are UTF-8:

    .jsonl        one JSON object per line
    .tsv, .csv    columns that the first line names; TSV has no quotes, CSV has those of RFC 4180
    .txt          one text per line, for language models

A line ends with a line feed, optionally preceded by a carriage return. Files are read as streams:
one line at a time is in memory.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from sightline.base.errors import UsageError

MAX_LINE_BYTES = 2**22  # its encoding takes up to 180 times the memory
TEXT = ".txt"

_BOM = b"\xef\xbb\xbf"

# Number of the line where a record begins, and its fields. Cells of tables are strings.
Row: TypeAlias = tuple[int, dict[str, Any]]


class CorpusError(UsageError):
    """Data that cannot be used. The message names the file and the line, and states what to do."""


def open_file(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}; check the file and its permissions") from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, with its line ending, without a byte order mark."""
    number = 0
    with open_file(path) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise CorpusError(
                    f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; divide the text into several lines"
                )
            if number == 1:
                line = line.removeprefix(_BOM)
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise CorpusError(
                    f"{path}, line {number}, column {error.start + 1} (in bytes): byte 0x{line[error.start]:02x} is "
                    "not UTF-8; convert the file to UTF-8"
                ) from None
            if "\0" in text:
                raise CorpusError(
                    f"{path}, line {number}, column {text.index(chr(0)) + 1}: NUL byte; the file is binary or not "
                    "UTF-8; convert it to UTF-8"
                )
            yield number, text


def read_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, without its line ending."""
    return ((number, line.removesuffix("\n").removesuffix("\r")) for number, line in read_lines(path))


def at(path: Path, number: int) -> str:
    """Return the name of a line, for messages."""
    return f"{path}, line {number}"


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file in one of the formats `READERS`."""
    return READERS[path.suffix](path)


def _read_objects(path: Path) -> Iterator[Row]:
    for number, line in read_texts(path):
        if line.strip():
            yield number, _parse(line, at(path, number))


def _parse(line: str, where: str) -> dict[str, Any]:
    expected = "each line must be one JSON object"
    try:
        value = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{where}, column {error.colno}: JSON error: {error.msg}; {expected}") from None
    except RecursionError:
        raise CorpusError(f"{where}: JSON error: nested too deeply; {expected}") from None
    except ValueError as error:  # of the hooks of the decoder, or of an integer with thousands of digits
        raise CorpusError(f"{where}: JSON error: {error}; {expected}") from None
    if not isinstance(value, dict):
        raise CorpusError(f"{where}: expected a JSON object, got {kind_of(value)}; {expected}")
    return value


def _read_tsv(path: Path) -> Iterator[Row]:
    return _read_table(path, ((number, line.split("\t")) for number, line in read_texts(path) if line))


def _read_csv(path: Path) -> Iterator[Row]:
    return _read_table(path, _csv_rows(path))


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of this process; by default 131,072
    rows = csv.reader((line for _, line in read_lines(path)), strict=True)
    while True:
        number = rows.line_num + 1  # a row may have several lines
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise CorpusError(
                f"{at(path, number)}: CSV error: {error}; texts with commas, quotes or line breaks must be in double "
                "quotes"
            ) from None
        if row:
            yield number, row


def _read_table(path: Path, rows: Iterable[tuple[int, list[str]]]) -> Iterator[Row]:
    """Yield the fields of each row by the names in the first row."""
    columns: list[str] = []
    for number, cells in rows:
        if not columns:
            columns = [name.strip() for name in cells]
            if len(columns) > len(set(columns)):
                repeated = next(name for name, count in Counter(columns).items() if count > 1)
                raise CorpusError(f"{path}: the first line names the column {repeated[:40]!r} twice; rename one")
            continue
        if len(cells) != len(columns):
            raise CorpusError(
                f"{at(path, number)}: expected {len(columns)} columns as in the first line, got {len(cells)}"
            )
        yield number, dict(zip(columns, cells, strict=True))


def _read_plain(path: Path) -> Iterator[Row]:
    return ((number, {"text": line}) for number, line in read_texts(path))


# Readers by the endings of files.
READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_objects,
    ".tsv": _read_tsv,
    ".csv": _read_csv,
    TEXT: _read_plain,
}
TABLES = tuple(ending for ending in READERS if ending != TEXT)


def kind_of(value: Any) -> str:
    """Return the JSON type of a value with its article."""
    kinds = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the field {repeated[:40]!r} occurs twice")
    return fields


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_unique)
