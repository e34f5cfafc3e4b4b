"""Formats of the files of a corpus, and their conversion to records.

Files are UTF-8:

    .jsonl        one JSON object per line
    .tsv, .csv    columns that the first line names; TSV has no quotes, CSV has those of RFC 4180
    .txt          one text per line, for language models
    two files     pairs of texts: line N of one belongs to line N of the other

A line ends with a line feed, optionally preceded by a carriage return. The fields of a record are
`source` and `target` (translation, encoder), `text` and `label` (classification; `labels`, a list,
with several labels a text), and `text` or `messages` (language model). Files are read as streams:
one line at a time is in memory.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, get_args

from sightline.base.errors import UsageError
from sightline.model.data.records import (
    DialogueMessage,
    DialogueRecord,
    LabelledRecord,
    PairRecord,
    Record,
    Role,
    TaskName,
    TextRecord,
    texts_of,
)

PAIR_TASKS: tuple[TaskName, ...] = ("translation", "encoder")
MAX_LINE_BYTES = 2**22  # its encoding takes up to 180 times the memory
MAX_LABEL_CHARACTERS = 200
DEVELOPER = "developer"  # role that APIs also have for system messages
SEPARATOR = "|"  # of several labels in a cell of a table
TABLES = (".jsonl", ".tsv", ".csv")
TEXT = ".txt"

_BOM = b"\xef\xbb\xbf"
_EXAMPLES: Mapping[TaskName, str] = {
    "translation": '{"source": "Guten Tag!", "target": "Hello!"}',
    "encoder": '{"source": "a question", "target": "its answer"}',
    "classification": '{"text": "a text", "label": "its label"}',
    "language-model": '{"text": "a text"}',
}


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


def read_records(
    files: tuple[Path, ...], task: TaskName, *, multi_label: bool = False, kinds: dict[str, str] | None = None
) -> Iterator[tuple[int, Record | None]]:
    """Yield the line number of each record, and the record, or None if one of its texts is blank.

    Args:
        files: one file, or the two sides of pairs.
        multi_label: a text has any number of labels.
        kinds: kinds of values that may not be mixed, with the location of the first of each; pass
            one mapping for several files to compare them.
    """
    if len(files) == 2:
        return _read_pairs(*files)
    return _Reader(files[0], task, multi_label, {} if kinds is None else kinds).records()


def _read_pairs(first: Path, second: Path) -> Iterator[tuple[int, Record | None]]:
    counts = [0, 0]
    for pair in zip_longest(_read_texts(first), _read_texts(second)):
        for side, line in enumerate(pair):
            counts[side] += line is not None
        if counts[0] == counts[1]:
            (number, source), (_, target) = pair
            yield number, _unless_blank(PairRecord(source, target))
    if counts[0] != counts[1]:
        raise CorpusError(
            f"{first} has {counts[0]} lines, but {second} has {counts[1]}: line N of one must belong to line N of the "
            "other"
        )


def _read_texts(path: Path) -> Iterator[tuple[int, str]]:
    return ((number, line.removesuffix("\n").removesuffix("\r")) for number, line in read_lines(path))


def _unless_blank(record: Record) -> Record | None:
    return record if all(text.strip() for text in texts_of(record)) else None


class _Reader:
    """Reads one file. `_where` is the file and the line that are being read, for messages."""

    def __init__(self, path: Path, task: TaskName, multi_label: bool, kinds: dict[str, str]) -> None:
        self._path, self._task, self._multi_label, self._kinds = path, task, multi_label, kinds
        self._where = str(path)

    def records(self) -> Iterator[tuple[int, Record | None]]:
        for number, fields in self._fields():
            yield number, _unless_blank(self._record(fields))

    def _fields(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the line number and the fields of each record."""
        if self._path.suffix == ".jsonl":
            yield from self._read_objects()
        elif self._path.suffix == ".tsv":
            yield from self._read_table((number, line.split("\t")) for number, line in _read_texts(self._path) if line)
        elif self._path.suffix == ".csv":
            yield from self._read_table(self._read_csv())
        else:
            for number, line in _read_texts(self._path):
                self._at(number)
                yield number, {"text": line}

    def _at(self, number: int) -> None:
        self._where = f"{self._path}, line {number}"

    def _fail(self, problem: str) -> NoReturn:
        raise CorpusError(f"{self._where}: {problem}")

    def _read_objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in _read_texts(self._path):
            self._at(number)
            if line.strip():
                yield number, self._parse(line)

    def _parse(self, line: str) -> dict[str, Any]:
        expected = f"each line must be one JSON object, such as {_EXAMPLES[self._task]}"
        try:
            value = _DECODER.decode(line)
        except json.JSONDecodeError as error:
            raise CorpusError(f"{self._where}, column {error.colno}: JSON error: {error.msg}; {expected}") from None
        except RecursionError:
            self._fail(f"JSON error: nested too deeply; {expected}")
        except ValueError as error:  # of the hooks of the decoder, or of an integer with thousands of digits
            self._fail(f"JSON error: {error}; {expected}")
        if not isinstance(value, dict):
            self._fail(f"expected a JSON object, got {_kind_of(value)}; {expected}")
        return value

    def _read_csv(self) -> Iterator[tuple[int, list[str]]]:
        csv.field_size_limit(MAX_LINE_BYTES)  # of all readers of this process; by default 131,072
        rows = csv.reader((line for _, line in read_lines(self._path)), strict=True)
        while True:
            number = rows.line_num + 1  # a row may have several lines
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                self._at(number)
                self._fail(f"CSV error: {error}; texts with commas, quotes or line breaks must be in double quotes")
            if row:
                yield number, row

    def _read_table(self, rows: Iterable[tuple[int, list[str]]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the fields of each row by the names in the first row."""
        columns: list[str] = []
        for number, cells in rows:
            self._at(number)
            if not columns:
                columns = [name.strip() for name in cells]
                self._check_columns(columns)
                continue
            if len(cells) != len(columns):
                self._fail(f"expected {len(columns)} columns as in the first line, got {len(cells)}")
            fields: dict[str, Any] = dict(zip(columns, cells, strict=True))
            for name in ("label", "labels") if self._multi_label else ():
                if name in fields:
                    fields[name] = [label for label in fields[name].split(SEPARATOR) if label.strip()]
            yield number, fields

    def _check_columns(self, columns: list[str]) -> None:
        choices = [names for names in self._choices() if names != ("messages",)]
        if any(sorted(columns) == sorted(names) for names in choices):
            return
        known = {name for names in choices for name in names}
        unknown = [repr(name[:40]) for name in columns if name not in known][:10]
        shown = ", ".join(repr(name[:40]) for name in columns[:10])
        problem = f"unknown column {', '.join(unknown)}" if unknown else "missing or repeated column"
        expected = " or ".join(" and ".join(names) for names in choices)
        raise CorpusError(
            f"{self._path}: {problem}; the first line names the columns {shown}, but must name {expected}, and no other"
            f"{self._several_labels(columns)}"
        )

    def _several_labels(self, names: Iterable[str]) -> str:
        """Return what to do if the names are those of texts with several labels."""
        is_single = self._task == "classification" and not self._multi_label
        return "; add --multi-label to train with several" if is_single and set(names) == {"text", "labels"} else ""

    def _choices(self) -> tuple[tuple[str, ...], ...]:
        """Return the sets of fields that a record may have."""
        if self._task in PAIR_TASKS:
            return (("source", "target"),)
        if self._task == "language-model":
            return (("text",), ("messages",))
        return (("text", "labels"), ("text", "label")) if self._multi_label else (("text", "label"),)

    def _check_names(self, fields: Mapping[str, Any]) -> None:
        choices = self._choices()
        if any(fields.keys() == set(names) for names in choices):
            return
        expected = " or ".join(" and ".join(names) for names in choices)
        for name in fields:
            if not any(name in names for names in choices):
                self._fail(f"unknown field {name[:40]!r}; the fields are {expected}{self._several_labels(fields)}")
        for name in choices[-1]:
            if name not in fields and not any(set(names) <= fields.keys() for names in choices):
                self._fail(f"missing field {name!r}; the fields are {expected}")
        self._fail(f"too many fields; the fields are {expected}")

    def _record(self, fields: Mapping[str, Any]) -> Record:
        self._check_names(fields)
        if self._task in PAIR_TASKS:
            return PairRecord(self._text(fields["source"], "source"), self._text(fields["target"], "target"))
        if self._task == "classification":
            return LabelledRecord(self._text(fields["text"], "text"), self._labels(fields))
        self._check_kind("fields", "text" if "text" in fields else "messages")
        if "text" in fields:
            return TextRecord(self._text(fields["text"], "text"))
        return DialogueRecord(self._messages(fields["messages"]))

    def _text(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            self._fail(f"{name} must be a string, got {_kind_of(value)}")
        if "\0" in value:
            self._fail(f"{name} has a NUL character; remove it")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self._fail(f"{name} has the unpaired surrogate \\u{ord(value[error.start]):04x}; replace or remove it")
        return value

    def _labels(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        name = "labels" if "labels" in fields else "label"
        value = fields[name]
        if self._multi_label:
            if not isinstance(value, list):
                self._fail(f"{name} must be a list of strings, got {_kind_of(value)}")
            return tuple(dict.fromkeys(self._label(label, name) for label in value))
        if isinstance(value, list):
            self._fail(f"{name} is a list; add --multi-label to train with several labels a text")
        if not isinstance(value, str | int):
            self._fail(f"{name} must be a string, an integer or a boolean, got {_kind_of(value)}")
        self._check_kind("label types", _kind_of(value))
        if isinstance(value, bool):
            return (str(value).lower(),)
        return (self._label(str(value), name),)

    def _label(self, value: Any, name: str) -> str:
        label = self._text(value, name).strip()
        if not label:
            self._fail(f"{name} is blank; add a name")
        if len(label) > MAX_LABEL_CHARACTERS:
            self._fail(
                f"{name} must have at most {MAX_LABEL_CHARACTERS} characters, got {len(label)}; check that text and "
                "label are not swapped"
            )
        return label

    def _messages(self, value: Any) -> tuple[DialogueMessage, ...]:
        if not isinstance(value, list):
            self._fail(f"messages must be a list of objects with role and content, got {_kind_of(value)}")
        messages = []
        turn = 0
        for index, message in enumerate(value):
            name = f"messages[{index}]"
            if not isinstance(message, dict) or message.keys() != {"role", "content"}:
                self._fail(f"{name} must be an object with the fields role and content, and no other")
            role: Role = "system" if message["role"] == DEVELOPER else message["role"]
            if role not in get_args(Role):
                self._fail(f"{name}.role must be one of {', '.join([*get_args(Role), DEVELOPER])}")
            if role != "system" or index > 0:
                expected = ("user", "assistant")[turn % 2]
                if role != expected:
                    self._fail(
                        f"{name}.role must be {expected}, got {role}; after an optional system message, user and "
                        "assistant take turns"
                    )
                turn += 1
            messages.append(DialogueMessage(role, self._content(message["content"], f"{name}.content")))
        if turn == 0 or turn % 2:
            self._fail("messages must end with a message of the assistant")
        return tuple(messages)

    def _content(self, value: Any, name: str) -> str:
        """Return the content of a message, which may be a list of parts with texts."""
        if not isinstance(value, list):
            return self._text(value, name)
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
                self._fail(f'{name}[{index}] must be {{"type": "text", "text": "a text"}}; other parts cannot be read')
        return "".join(self._text(part["text"], f"{name}[{index}].text") for index, part in enumerate(value))

    def _check_kind(self, name: str, kind: str) -> None:
        """Check that all records have values of one kind."""
        if kind in self._kinds:
            return
        self._kinds[kind] = self._where
        if len(self._kinds) > 1:
            (old, old_where), (new, new_where) = self._kinds.items()
            raise CorpusError(f"{name} differ: {old_where} has {old}, but {new_where} has {new}; use only one of them")


def _kind_of(value: Any) -> str:
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
