"""Files of a corpus as rows of fields.

    .jsonl, .ndjson   one JSON object per line
    .json             a list of objects, or an object with one such list
    .tsv              columns separated by tabs, without quotes
    .csv              columns with the quotes of RFC 4180; the separator is found in the first rows
    .xlsx, .xls, .ods first sheet with cells of a workbook
    .txt              one text per line for language models, otherwise as .csv

The first row of a table names its columns. Texts are UTF-8, UTF-16 with a byte order mark, or in an
encoding that the user names. A line ends with a line feed, optionally preceded by a carriage
return. Files are read as streams, one line at a time in memory, except `.json` and workbooks.
"""

import codecs
import csv
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from sightline.base.errors import UsageError

MAX_LINE_BYTES = 2**22  # its encoding takes up to 180 times the memory
MAX_JSON_BYTES = 2**28  # of a file that is read whole
TEXT, CSV, JSON, GZIP = ".txt", ".csv", ".json", ".gz"
WORKBOOKS = (".xlsx", ".xls", ".ods")
SEPARATORS = ",;\t|"  # of the columns of CSV
NUM_FIRST_ROWS = 1_000  # rows of a table that determine separator and names of columns

_BOM = b"\xef\xbb\xbf"
_BOMS_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SEPARATOR_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # first line that Excel reads
_ONE_OBJECT = "each line must be one JSON object"
_NOT_UTF_8 = (
    "save the file as UTF-8 (Excel: CSV UTF-8), or name its encoding with --encoding, such as cp1252 (Western European "
    "texts of Windows) or utf-16"
)

# Number of the line where a record begins, and its fields. Cells of tables are strings.
Row: TypeAlias = tuple[int, dict[str, Any]]
Cells: TypeAlias = tuple[int, list[str]]
# Returns the names of columns for the first rows of a table, None if the first row has them.
NameColumns: TypeAlias = Callable[[Sequence[Sequence[str]]], list[str] | None]


class CorpusError(UsageError):
    """Data that cannot be used. The message names the file and the line, and states what to do."""


def known_encoding(name: str) -> str:
    """Return the usual name of an encoding; an empty one stays. Raises `ValueError`."""
    try:
        "a".encode(name or "utf-8")
        return name and codecs.lookup(name).name
    except LookupError:
        raise ValueError(
            f"must be an encoding of Python, such as cp1252, cp1251, utf-16, shift_jis or gb18030, got {name!r}"
        ) from None


def ending_of(path: Path) -> str:
    """Return the ending of a name that shows the format, in lower case and without ".gz"."""
    return Path(path.name.lower().removesuffix(GZIP)).suffix


def open_file(path: Path) -> BufferedReader:
    """Open a file, whose content is decompressed if its name ends with ".gz"."""
    try:
        return BufferedReader(gzip.open(path)) if path.suffix.lower() == GZIP else path.open("rb")
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}; check the file and its permissions") from None


def read_lines(path: Path, encoding: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, with its line ending, without a byte order mark."""
    with open_file(path) as file:
        if encoding is None and file.peek(2)[:2] in _BOMS_16:
            encoding = "utf-16"
        name = codecs.lookup(encoding or "utf-8").name
        # Line feeds of these encodings have several bytes.
        is_wide = name.startswith(("utf-16", "utf-32"))
        lines = io.TextIOWrapper(file, encoding, newline="\n") if is_wide else file
        for number, line in enumerate(_lines(path, lines), start=1):
            try:
                text = line if isinstance(line, str) else line.decode(encoding or "utf-8")
            except UnicodeDecodeError as error:
                raise CorpusError(
                    f"{at(path, number)}, column {error.start + 1} (in bytes): byte 0x{error.object[error.start]:02x} "
                    f"is not {encoding or 'UTF-8'}; {_NOT_UTF_8}"
                ) from None
            if "\0" in text:
                raise CorpusError(
                    f"{at(path, number)}, column {text.index(chr(0)) + 1}: NUL byte; the file is binary or not UTF-8; "
                    f"{_NOT_UTF_8}"
                )
            yield number, text.removeprefix("\ufeff") if number == 1 else text


def _lines(path: Path, file: io.TextIOWrapper | BufferedReader) -> Iterator[str | bytes]:
    number = 0
    try:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise CorpusError(
                    f"{at(path, number)}: longer than {MAX_LINE_BYTES >> 20} MiB; divide the text into several lines"
                )
            yield line
    except UnicodeDecodeError as error:  # of wide encodings
        raise CorpusError(f"{path}: not {error.encoding} after line {number} ({error.reason}); {_NOT_UTF_8}") from None


def read_texts(path: Path, encoding: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, without its line ending."""
    return ((number, line.removesuffix("\n").removesuffix("\r")) for number, line in read_lines(path, encoding))


def at(path: Path | str, number: int) -> str:
    """Return the name of a line, or of a record of a list in JSON, for messages."""
    return f"{path}, {'record' if str(path).lower().endswith(JSON) else 'line'} {number}"


def read_rows(
    path: Path, ending: str, encoding: str | None = None, name_columns: NameColumns = lambda rows: None
) -> Iterator[Row]:
    """Yield the rows of a file in the format `ending` of `READERS` or `TEXT`."""
    if ending in TABLES:
        return _name_cells(path, TABLES[ending](path, encoding), name_columns)
    return OBJECTS[ending](path, encoding)


def _read_objects(path: Path, encoding: str | None = None) -> Iterator[Row]:
    for number, line in read_texts(path, encoding):
        if line.strip():
            is_list = line.lstrip().startswith("[")
            expected = f"{_ONE_OBJECT}{'; rename a file with one list of objects to .json' if is_list else ''}"
            yield number, _fields(_parse(line, at(path, number), expected), at(path, number), expected)


def _fields(value: Any, where: str, expected: str) -> dict[str, Any]:
    if isinstance(value, list) and list(map(type, value)) == [str, dict]:
        value = {"text": value[0], **value[1]}  # as in training data of spaCy
    if not isinstance(value, dict):
        raise CorpusError(f"{where}: expected a JSON object, got {kind_of(value)}; {expected}")
    return value


def _parse(text: str, where: str, expected: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        raise CorpusError(f"{where}{line}, column {error.colno}: JSON error: {error.msg}; {expected}") from None
    except RecursionError:
        raise CorpusError(f"{where}: JSON error: nested too deeply; {expected}") from None
    except ValueError as error:  # of the hooks of the decoder, or of an integer with thousands of digits
        raise CorpusError(f"{where}: JSON error: {error}; {expected}") from None


def _read_json(path: Path, encoding: str | None = None) -> Iterator[Row]:
    """Yield the objects of a list, which may be the only list of an object. Lines of objects are
    often named `.json`, too.
    """
    lines = (line for _, line in read_lines(path, encoding) if line.strip())
    first = next(lines, "").strip()
    if first.startswith("{") and first.endswith("}") and next(lines, "").lstrip().startswith("{"):
        yield from _read_objects(path, encoding)
        return
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CorpusError(
            f"{path} has more than {MAX_JSON_BYTES >> 20} MiB, which would fill the memory; write one object per line "
            f"to a file .jsonl instead, such as jq -c '.[]' {path.name} > {path.stem}.jsonl"
        )
    expected = "the file must be a list of objects, or an object with one such list"
    value = _parse("".join(line for _, line in read_lines(path, encoding)), str(path), expected)
    lists = [one for one in value.values() if isinstance(one, list)] if isinstance(value, dict) else [value]
    if len(lists) > 1:  # such as names of labels beside the texts
        lists = [one for one in lists if not one or not all(isinstance(item, str) for item in one)]
    if len(lists) != 1 or not isinstance(lists[0], list):
        found = f"an object with {len(lists)} lists" if isinstance(value, dict) else kind_of(value)
        raise CorpusError(f"{path}: {expected}, got {found}")
    for number, fields in enumerate(lists[0], start=1):
        yield number, _fields(fields, at(path, number), expected)


def _split_lines(path: Path, encoding: str | None) -> Iterator[Cells]:
    return ((number, line.split("\t")) for number, line in read_texts(path, encoding))


def _read_csv(path: Path, encoding: str | None, separator: str = "") -> Iterator[Cells]:
    separator = separator or _find_separator(path, encoding)
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of this process; by default 131,072
    lines = (line for _, line in read_lines(path, encoding))
    start = [] if _SEPARATOR_LINE.fullmatch(first := next(lines, "")) else [first]
    rows = csv.reader(chain(start, lines), strict=True, delimiter=separator)
    while True:
        number = rows.line_num + 2 - len(start)  # a row may have several lines
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise CorpusError(
                f"{at(path, number)}: CSV error: {error}; texts with the separator {separator!r}, quotes or line "
                "breaks must be in double quotes"
            ) from None
        yield number, row


def _find_separator(path: Path, encoding: str | None) -> str:
    """Return the separator of a file: that of a line such as sep=; or the one that gives all of the
    first rows the same number of columns, or else the first row most of them.
    """
    if match := _SEPARATOR_LINE.fullmatch(next((line for _, line in read_lines(path, encoding)), "")):
        return match[1]
    best, found = (False, 1), SEPARATORS[0]
    for separator in SEPARATORS:
        try:
            rows = islice(_read_csv(path, encoding, separator), NUM_FIRST_ROWS)
            widths = [len(row) for _, row in rows if row]
        except CorpusError:  # the quotes are those of another separator, or the file cannot be read
            continue
        if widths and widths[0] > 1 and (len(set(widths)) == 1, widths[0]) > best:
            best, found = (len(set(widths)) == 1, widths[0]), separator
    return found


def _read_workbook(path: Path, encoding: str | None = None) -> Iterator[Cells]:
    try:
        from python_calamine import CalamineError, load_workbook
    except ImportError:
        raise CorpusError(
            f"{path}: workbooks need the package python-calamine; install it with pip install "
            "'sightline-serving[train]', or save the sheet as CSV UTF-8"
        ) from None
    try:
        open_file(path).close()
        book = load_workbook(path)
        sheets = (book.get_sheet_by_name(name).to_python(skip_empty_area=False) for name in book.sheet_names)
        rows = next(filter(None, sheets), [])
    except CalamineError as error:
        raise CorpusError(f"{path} is no workbook ({error}); save it again as .xlsx or as CSV UTF-8") from None
    yield from ((number, [_cell(value) for value in cells]) for number, cells in enumerate(rows, start=1))


def _cell(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # workbooks have no integers
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name_cells(path: Path, rows: Iterator[Cells], name_columns: NameColumns) -> Iterator[Row]:
    """Yield the fields of each row that is not blank by the names of columns."""
    rows = ((number, cells) for number, cells in rows if any(map(str.strip, cells)))
    first = list(islice(rows, NUM_FIRST_ROWS))
    if not first:
        return
    columns = name_columns([cells for _, cells in first])
    if columns is None:
        columns = [name.strip() for name in first.pop(0)[1]]
    while not columns[-1]:  # of empty columns at the end
        columns.pop()
    columns = [name or f"column {index}" for index, name in enumerate(columns, start=1)]
    if len(columns) > len(set(columns)):
        repeated = next(name for name, count in Counter(columns).items() if count > 1)
        raise CorpusError(f"{path}: the first line names the column {repeated[:40]!r} twice; rename one")
    for number, cells in chain(first, rows):
        if len(cells) < len(columns) or any(map(str.strip, cells[len(columns) :])):
            is_tsv = path.suffix.lower() == ".tsv"
            raise CorpusError(
                f"{at(path, number)}: expected {len(columns)} columns as in the first line, got {len(cells)}; texts "
                f"with the separator or line breaks must be in double quotes{', in a file .csv' if is_tsv else ''}"
            )
        yield number, dict(zip(columns, cells, strict=False))


def _read_plain(path: Path, encoding: str | None = None) -> Iterator[Row]:
    return ((number, {"text": line}) for number, line in read_texts(path, encoding))


Reader: TypeAlias = Callable[[Path, str | None], Iterator[Row]]
# Readers by the endings of files.
OBJECTS: Mapping[str, Reader] = {".jsonl": _read_objects, ".ndjson": _read_objects, JSON: _read_json, TEXT: _read_plain}
TABLES: Mapping[str, Callable[[Path, str | None], Iterator[Cells]]] = {
    ".tsv": _split_lines,
    CSV: _read_csv,
    **dict.fromkeys(WORKBOOKS, _read_workbook),
}
READERS = tuple(ending for ending in (*OBJECTS, *TABLES) if ending != TEXT)


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
