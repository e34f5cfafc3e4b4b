"""Files of a corpus as rows of fields.

    .jsonl, .ndjson   one JSON object per line
    .json             a list of objects, or an object with one such list
    .tsv              columns separated by tabs, without quotes
    .csv              columns with the quotes of RFC 4180; the separator is found in the first rows
    .xlsx, .xls, .ods first sheet of a workbook that has two rows
    .txt              one text per line for language models, as .csv for labels, as .tsv for pairs

The first row of a table names its columns, if its names are known. Texts are UTF-8, UTF-16 with a
byte order mark, or in an encoding that the user names. A line ends with a line feed, optionally
preceded by a carriage return. Files are read as streams, except `.json` and workbooks.
"""

import codecs
import csv
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import chain, dropwhile, islice, takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from sightline.base.errors import UsageError

MAX_LINE_BYTES = 2**22  # its encoding takes up to 180 times the memory
MAX_JSON_BYTES = 2**28  # of a file that is read whole
MAX_LABEL_CHARACTERS = 200
TEXT, CSV, TSV, JSON, GZIP = ".txt", ".csv", ".tsv", ".json", ".gz"
FASTTEXT, LABEL_MARK = "fastText", "__label__"  # a format of .txt, and the beginning of each of its labels
WORKBOOKS = (".xlsx", ".xls", ".ods")
PAIR = ["source", "target"]
SEPARATORS = ",;\t|"  # of the columns of CSV
NUM_FIRST_ROWS = 1_000  # rows of a table that determine separator and names of columns

_BOMS_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SEPARATOR_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # first line that Excel reads
_ONE_OBJECT = "each line must be one JSON object"
_NOT_UTF_8 = (
    "save the file as UTF-8 (Excel: CSV UTF-8); for training, --encoding can name another, such as cp1252 (Western "
    "European texts of Windows) or utf-16"
)

# Number of the line where a record begins, and its fields. Cells of tables are strings.
Row: TypeAlias = tuple[int, dict[str, Any]]
Cells: TypeAlias = tuple[int, list[str]]
# Returns the names of columns for the first rows of a table, None if the first row has them. Tables
# of a `PAIR` have tabs, and rows may have more columns.
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
        # Line feeds of these encodings have several bytes.
        is_wide = codecs.lookup(encoding or "utf-8").name.startswith(("utf-16", "utf-32"))
        lines, number = io.TextIOWrapper(file, encoding, newline="\n") if is_wide else file, 0
        try:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    limit = f"longer than {MAX_LINE_BYTES >> 20} MiB"
                    raise CorpusError(f"{at(path, number)}: {limit}; divide the text into several lines")
                if number == 1 and line[:4] == b"PK\3\4":
                    raise CorpusError(f"{path} is a workbook or a ZIP file; name it .xlsx, or unpack it")
                text = line if isinstance(line, str) else line.decode(encoding or "utf-8")
                if "\0" in text:
                    where = f"{at(path, number)}, column {text.index(chr(0)) + 1}"
                    raise CorpusError(f"{where}: NUL byte; the file is binary or not UTF-8; {_NOT_UTF_8}")
                yield number, text.removeprefix("\ufeff") if number == 1 else text
        except UnicodeError as error:
            problem = f"{path}: not {encoding} after line {number}"
            if isinstance(error, UnicodeDecodeError) and not is_wide:
                column = f"column {error.start + 1} (in bytes): byte 0x{error.object[error.start]:02x}"
                problem = f"{at(path, number)}, {column} is not {encoding or 'UTF-8'}"
            raise CorpusError(f"{problem}; {_NOT_UTF_8}") from None


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
            yield number, _object(_parse(line, at(path, number), expected), at(path, number), expected)


def _parse(text: str, where: str, expected: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        line, problem = f", line {error.lineno}" if error.lineno > 1 else "", error.msg
        where = f"{where}{line}, column {error.colno}"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:  # of the hooks of the decoder, or of an integer with thousands of digits
        problem = str(error)
    raise CorpusError(f"{where}: JSON error: {problem}; {expected}")


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
    expected = "the file must be a list of objects, or an object with one such list (pandas: orient='records')"
    value = _parse("".join(line for _, line in read_lines(path, encoding)), str(path), expected)
    lists = [one for one in value.values() if isinstance(one, list)] if isinstance(value, dict) else [value]
    if len(lists) > 1:  # such as names of labels beside the texts
        lists = [one for one in lists if not one or not all(isinstance(item, str) for item in one)]
    if len(lists) != 1 or not isinstance(lists[0], list):
        found = f"an object with {len(lists)} lists" if isinstance(value, dict) else kind_of(value)
        raise CorpusError(f"{path}: {expected}, got {found}")
    for number, fields in enumerate(lists[0], start=1):
        yield number, _object(fields, at(path, number), expected)


def _object(value: Any, where: str, expected: str) -> dict[str, Any]:
    if isinstance(value, list) and list(map(type, value)) == [str, dict]:
        value = {"text": value[0], **value[1]}  # as in training data of spaCy
    if not isinstance(value, dict):
        raise CorpusError(f"{where}: expected a JSON object, got {kind_of(value)}; {expected}")
    return value


def _split_lines(path: Path, encoding: str | None) -> Iterator[Cells]:
    return ((number, line.split("\t")) for number, line in read_texts(path, encoding))


def _read_csv(path: Path, encoding: str | None, separator: str = "") -> Iterator[Cells]:
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of this process; by default 131,072
    lines = (line for _, line in read_lines(path, encoding))
    named = _SEPARATOR_LINE.fullmatch(first := next(lines, ""))
    start, separator = [] if named else [first], separator or (named[1] if named else _find_separator(path, encoding))
    rows = csv.reader(chain(start, lines), strict=True, delimiter=separator)
    number = 2 - len(start)
    try:
        for row in rows:
            yield number, row
            number = rows.line_num + 2 - len(start)  # a row may have several lines
    except csv.Error as error:
        raise CorpusError(
            f"{at(path, number)}: CSV error: {error}; texts with the separator {separator!r}, quotes or line breaks "
            "must be in double quotes"
        ) from None


def _find_separator(path: Path, encoding: str | None) -> str:
    """Return the separator that gives all of the first rows the same number of columns, or else the
    first row most of them.
    """
    best, found = (False, 1), SEPARATORS[0]
    for separator in SEPARATORS:
        try:
            rows = list(islice(_read_csv(path, encoding, separator), NUM_FIRST_ROWS))
            widths = [len(row) for _, row in _without_titles([row for row in rows if row[1]])]
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
        rows = next((rows for rows in sheets if len(rows) > 1), [])  # the names of columns are no data
    except CalamineError as error:
        raise CorpusError(f"{path} is no workbook ({error}); save it again as .xlsx or as CSV UTF-8") from None
    yield from ((number, [cell_text(value) for value in cells]) for number, cells in enumerate(rows, start=1))


def cell_text(value: object) -> str:
    """Return the text of a cell, or of a label in JSON."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # workbooks have no integers
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_titles(rows: list[Cells]) -> list[Cells]:
    """Leave out the first rows if they have only one cell with several words, and others follow."""
    filled = ((row, [cell for cell in row[1] if cell.strip()]) for row in rows)
    others = list(dropwhile(lambda row: len(row[1]) == 1 and " " in row[1][0].strip(), filled))
    return [row for row, _ in others] if others and len(others[0][1]) > 1 else rows


def _name_cells(path: Path, rows: Iterator[Cells], name_columns: NameColumns) -> Iterator[Row]:
    """Yield the fields of each row that is not blank by the names of columns."""
    rows = ((number, cells) for number, cells in rows if any(map(str.strip, cells)))
    first = list(islice(rows, NUM_FIRST_ROWS))
    if not first:
        return
    untitled = _without_titles(first)
    names = name_columns([cells for _, cells in untitled]) and name_columns([cells for _, cells in first])
    first = first if names else untitled
    columns = names or [name.strip() for name in first.pop(0)[1]]
    while not columns[-1]:  # of empty columns at the end
        columns.pop()
    columns = [name or f"column {index}" for index, name in enumerate(columns, start=1)]
    if len(columns) > len(set(columns)):
        raise CorpusError(f"{path}: the first line names the column {_repeated(columns)!r} twice; rename one")
    for number, cells in chain(first, rows):
        if len(cells) < len(columns) or (names != PAIR and any(map(str.strip, cells[len(columns) :]))):
            title = "remove titles above the names of columns; " * (len(columns) == 1)
            problem = (
                f"expected source, tab and target, got {len(cells)} columns; the sides of two files are found by names "
                "such as corpus.de.txt and corpus.en.txt in the same folder"
                if names == PAIR
                else f"expected {len(columns)} columns as in the first line, got {len(cells)}; {title}texts with the "
                f"separator or line breaks must be in double quotes{', in a file .csv' * (ending_of(path) == TSV)}"
            )
            raise CorpusError(f"{at(path, number)}: {problem}")
        yield number, dict(zip(columns, cells, strict=False))


def _read_plain(path: Path, encoding: str | None = None) -> Iterator[Row]:
    return ((number, {"text": line}) for number, line in read_texts(path, encoding))


def _read_fasttext(path: Path, encoding: str | None = None) -> Iterator[Row]:
    for number, line in read_texts(path, encoding):
        words = line.split()
        labels = list(takewhile(lambda word: word.startswith(LABEL_MARK), words))
        names = [label.removeprefix(LABEL_MARK) for label in labels]
        yield number, {"text": " ".join(words[len(labels) :]), "label": names[0] if len(names) == 1 else names}


Reader: TypeAlias = Callable[[Path, str | None], Iterator[Row]]
# Readers by the endings of files.
OBJECTS: Mapping[str, Reader] = {
    ".jsonl": _read_objects,
    ".ndjson": _read_objects,
    JSON: _read_json,
    TEXT: _read_plain,
    FASTTEXT: _read_fasttext,
}
TABLES: Mapping[str, Callable[[Path, str | None], Iterator[Cells]]] = {
    TSV: _split_lines,
    CSV: _read_csv,
    **dict.fromkeys(WORKBOOKS, _read_workbook),
}
READERS = tuple(ending for ending in (*OBJECTS, *TABLES) if ending not in (TEXT, FASTTEXT))


_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}


def kind_of(value: Any) -> str:
    """Return the JSON type of a value with its article."""
    return _KINDS.get(type(value), "null")


def check_text(value: Any, name: str) -> str:
    """Return the value of a field that must be a text. Raises `ValueError` for others."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {kind_of(value)}")
    if "\0" in value:
        raise ValueError(f"{name} has a NUL character; remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(value[error.start]):04x}"
        raise ValueError(f"{name} has the unpaired surrogate {surrogate}; replace or remove it") from None
    return value


def check_label(value: Any, name: str) -> str:
    """Return the name of a label without spaces around it. Raises `ValueError` for others."""
    label = check_text(value, name).strip()
    if not label:
        raise ValueError(f"{name} is blank; add a name in each row (merged cells have it only in their first row)")
    if len(label) > MAX_LABEL_CHARACTERS:
        raise ValueError(
            f"{name} must have at most {MAX_LABEL_CHARACTERS} characters, got {len(label)}; check that text and label "
            "are not swapped"
        )
    return label


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"the field {_repeated(name for name, _ in pairs)!r} occurs twice")
    return fields


def _repeated(names: Iterable[str]) -> str:
    return next(name[:40] for name, count in Counter(names).items() if count > 1)


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_unique)
