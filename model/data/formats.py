"""Records of the tasks from the rows of files.

The fields of a record are `source` and `target` (translation), those of
`sightline.model.data.similar_texts` (encoder, reranking), `text` and `label`
(classification; `labels`, a list, with several labels a text), and `text` (language model).
`sightline.model.data.dialogues` reads those of dialogues, and `sightline.model.data.tagged_files`
those of texts with entities. Two files are pairs of texts: line N of one belongs to line N of the
other. `sightline.model.data.files` and `sightline.model.data.pair_files` read the rows of one file.
"""

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NoReturn

from sightline.model.data.columns import FIELDS, Columns
from sightline.model.data.dialogues import DialogueReader
from sightline.model.data.files import (
    CSV,
    READERS,
    TEXT,
    TSV,
    CorpusError,
    at,
    ending_of,
    kind_of,
    read_rows,
    read_texts,
)
from sightline.model.data.pair_files import XML, read_units
from sightline.model.data.records import (
    DialogueRecord,
    LabelledRecord,
    PairRecord,
    Record,
    TaskName,
    TextRecord,
    texts_of,
)
from sightline.model.data.similar_texts import find_names, negatives_of, one_target_each, read_score
from sightline.model.data.tagged_files import COLUMNS, TaggedReader, read_columns

SIMILARITY_TASKS: tuple[TaskName, ...] = ("encoder", "reranking")
PAIR_TASKS: tuple[TaskName, ...] = ("translation", *SIMILARITY_TASKS)
MAX_LABEL_CHARACTERS = 200
# Options of commands that are fields of `Reading`.
READING_OPTIONS = ("source", "target", "text", "label", "encoding")
SEPARATOR = "|"  # of several labels in a cell of a table
_NUMPY_SPACE = re.compile(r"(?<=['\"])\s+(?=['\"])")  # between the texts of an array


@dataclass(frozen=True)
class Reading:
    """Task whose records the files of a corpus have, and what the user says about them."""

    task: TaskName
    # Language of sources, which names their units, or their file if there are two, or their column.
    source: str | None = None
    target: str | None = None  # language of targets, likewise
    multi_label: bool = False  # a text has any number of labels
    text: str | None = None  # column of texts
    label: str | None = None  # column of labels
    encoding: str | None = None  # of files without a byte order mark; None: UTF-8


def read_records(
    files: tuple[Path, ...], reading: Reading, kinds: dict[str, str] | None = None
) -> Iterator[tuple[int, Record | str]]:
    """Yield the line number of each record, and the record, or the reason why it is left out, such
    as "empty" if one of its texts is blank.

    Args:
        files: one file, or the two sides of pairs.
        kinds: kinds of values that may not be mixed, with the location of the first of each; pass
            one mapping for several files to compare them.
    """
    if len(files) == 2:
        yield from _read_pairs(*files, reading.encoding)
        return
    (path,), ending = files, _ending(files[0], reading)
    columns = Columns(reading, ending)
    converter = _Converter(reading, {} if kinds is None else kinds, columns)
    rows: Iterator[tuple[int, dict[str, Any] | str]]
    if ending in XML:
        rows = read_units(path, reading.source or "", reading.target or "")
    elif reading.task == "tagging" and ending in COLUMNS:
        rows = iter(read_columns(path, ending, reading.encoding))
    else:
        rows = iter(read_rows(path, ending, reading.encoding, columns.name))
    for number, fields in one_target_each(rows, reading.task in SIMILARITY_TASKS):
        if isinstance(fields, str):
            yield number, fields
        else:
            yield number, _unless_blank(converter.record(fields, at(path, number)))


def describe_columns(files: tuple[Path, ...], reading: Reading) -> list[str]:
    """Return sentences about the columns that are read, for the user."""
    if len(files) == 2 or reading.task == "tagging" or (ending := _ending(files[0], reading)) not in READERS:
        return []
    columns, used = Columns(reading, ending), [name for names in _choices(reading) for name in names]
    for _, fields in islice(read_rows(files[0], ending, reading.encoding, columns.name), 1):
        renamed = columns.rename(fields)
        if reading.task in SIMILARITY_TASKS:
            names = find_names(tuple(renamed))
            used = [names.source, names.target, *names.negatives, *filter(None, [names.score])]
    return columns.notes(files[0], used)


def _ending(path: Path, reading: Reading) -> str:
    """Return the ending of the format of a file; tables often have the ending .txt."""
    ending = ending_of(path)
    if ending == TEXT and reading.task != "language-model":
        return CSV if reading.task == "classification" else TSV
    return ending


def _read_pairs(first: Path, second: Path, encoding: str | None) -> Iterator[tuple[int, Record | str]]:
    counts = [0, 0]
    for pair in zip_longest(read_texts(first, encoding), read_texts(second, encoding)):
        counts = [line[0] if line else count for line, count in zip(pair, counts, strict=True)]
        if None not in pair:
            yield counts[0], _unless_blank(PairRecord(pair[0][1], pair[1][1]))
    if counts[0] != counts[1]:
        lines = f"{first} has {counts[0]} lines, but {second} has {counts[1]}"
        raise CorpusError(f"{lines}: line N of one must belong to line N of the other")


def _choices(reading: Reading) -> tuple[tuple[str, ...], ...]:
    """Return the sets of fields that a record may have."""
    return (("text", "labels"),) * reading.multi_label + (FIELDS[reading.task],)


def _unless_blank(record: Record) -> Record | str:
    if isinstance(record, DialogueRecord) and not any(message.is_trained for message in record.messages):
        return "without a reply to learn"
    return record if all(text.strip() for text in texts_of(record)) else "empty"


class _Converter:
    """Converts the fields of rows to records. `_where` is the line of the row, for messages."""

    def __init__(self, reading: Reading, kinds: dict[str, str], columns: Columns) -> None:
        self._reading, self._task, self._multi_label, self._kinds = reading, reading.task, reading.multi_label, kinds
        self._columns = columns
        self._names: tuple[str, ...] | None = None  # fields that the last rows had, which are checked
        self._where = ""
        self._dialogues = DialogueReader(self._fail, self._text)
        self._tagged = TaggedReader(self._fail, self._text, self._label)

    def record(self, fields: Mapping[str, Any], where: str) -> Record:
        """Return the record of a row. Raises `CorpusError` for fields that are none."""
        self._where = where
        try:
            fields = self._columns.rename(fields)
        except ValueError as error:
            self._fail(str(error))
        if self._task in SIMILARITY_TASKS:
            return self._similar_texts(fields)
        if self._task == "tagging":
            return self._tagged.record(fields)
        if self._task == "language-model":
            form = self._dialogues.form_of(fields)
            self._check_kind("fields", form or "text")
            if form is not None:
                return self._dialogues.record(form, fields)
        self._check_names(fields)
        if self._task in PAIR_TASKS:
            return PairRecord(self._text(fields["source"], "source"), self._text(fields["target"], "target"))
        text = self._text(fields["text"], "text")
        return LabelledRecord(text, self._labels(fields)) if self._task == "classification" else TextRecord(text)

    def _fail(self, problem: str) -> NoReturn:
        raise CorpusError(f"{self._where}: {problem}")

    def _check_names(self, fields: Mapping[str, Any]) -> None:
        """Check that the fields have those of one choice; others are ignored."""
        if tuple(fields) == self._names:
            return
        choices = _choices(self._reading)
        fitting = [names for names in choices if fields.keys() >= {*names}]
        if len(fitting) == 1:
            self._names = tuple(fields)
            return
        expected = " or ".join(" and ".join(names) for names in choices)
        if fitting:
            self._fail(f"too many fields; the fields are {expected}")
        if self._task == "classification" and {"text", "labels"} <= fields.keys():
            self._fail(f"the fields are {expected}, but there is 'labels'; add --multi-label to train with several")
        name = next(name for name in choices[-1] if name not in fields)
        self._fail(f"missing field {name!r}; the fields are {expected}, but {self._columns.missing()}")

    def _similar_texts(self, fields: Mapping[str, Any]) -> PairRecord:
        try:
            names = find_names(tuple(fields))
            score = read_score(fields[names.score], names.score) if names.score else None
        except ValueError as error:
            self._fail(str(error))
        self._check_kind("fields", "no score" if score is None else "a score")
        source, target = (self._text(fields[name], name) for name in (names.source, names.target))
        negatives = (self._text(text, name) for text, name in negatives_of(fields, names))
        return PairRecord(source, target, tuple(text for text in negatives if text.strip()), score)

    def _text(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            self._fail(f"{name} must be a string, got {kind_of(value)}")
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
            if isinstance(value, str) and value.strip().startswith("["):
                value = self._listed(value.strip(), name)
            elif isinstance(value, str):
                value = [label for label in value.split(SEPARATOR) if label.strip()]
            if not isinstance(value, list):
                self._fail(f"{name} must be a list of strings, got {kind_of(value)}")
            return tuple(dict.fromkeys(self._label(label, name) for label in value))
        if isinstance(value, list):
            self._fail(f"{name} is a list; add --multi-label to train with several labels a text")
        if not isinstance(value, str | int):
            self._fail(f"{name} must be a string, an integer or a boolean, got {kind_of(value)}")
        self._check_kind("label types", kind_of(value))
        return (self._label(str(value).lower() if isinstance(value, bool) else str(value), name),)

    def _listed(self, value: str, name: str) -> Any:
        """Return a list in the form of JSON, Python or NumPy, as pandas writes it to cells."""
        try:
            return literal_eval(_NUMPY_SPACE.sub(", ", value))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            self._fail(f"{name} must be a list such as ['one', 'two'] if it begins with [; or separate labels by |")

    def _label(self, value: Any, name: str) -> str:
        label = self._text(value, name).strip()
        if not label:
            self._fail(f"{name} is blank; add a name in each row (merged cells have it only in their first row)")
        if len(label) > MAX_LABEL_CHARACTERS:
            self._fail(
                f"{name} must have at most {MAX_LABEL_CHARACTERS} characters, got {len(label)}; check that text and "
                "label are not swapped"
            )
        return label

    def _check_kind(self, name: str, kind: str) -> None:
        """Check that all records have values of one kind."""
        if kind in self._kinds:
            return
        self._kinds[kind] = self._where
        if len(self._kinds) > 1:
            (old, old_where), (new, new_where) = self._kinds.items()
            raise CorpusError(f"{name} differ: {old_where} has {old}, but {new_where} has {new}; use only one of them")
