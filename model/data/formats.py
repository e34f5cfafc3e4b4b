"""Records of the tasks from the rows of files.

`sightline.model.data.columns` finds the fields of records in rows. `sightline.model.data.dialogues`
reads dialogues, `sightline.model.data.similar_texts` records of embeddings and rerankers, and
`sightline.model.data.tagged_files` texts with entities. Two files are pairs of texts: line N of one
belongs to line N of the other. `sightline.model.data.files` and `sightline.model.data.pair_files`
read the rows of one file.
"""

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from sightline.model.data.columns import Columns
from sightline.model.data.dialogues import form_of, read_dialogue
from sightline.model.data.files import (
    CSV,
    FASTTEXT,
    LABEL_MARK,
    NUM_FIRST_ROWS,
    PAIR,
    TEXT,
    TSV,
    CorpusError,
    at,
    cell_text,
    check_label,
    check_text,
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
from sightline.model.data.similar_texts import read_similar
from sightline.model.data.tagged_files import COLUMNS, read_columns, read_tagged

SIMILARITY_TASKS: tuple[TaskName, ...] = ("encoder", "reranking")
PAIR_TASKS: tuple[TaskName, ...] = ("translation", *SIMILARITY_TASKS)
# Options of commands that are fields of `Reading`.
READING_OPTIONS = ("source", "target", "text", "label", "encoding")

_NUMPY_SPACE = re.compile(r"(?<=['\"])\s+(?=['\"])")  # between the texts of an array
BAR, SEPARATORS = "|", ";,"  # between labels in a cell of a table


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


class Findings:
    """Facts about files that are read one after another."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}  # how the columns of each file are read, in order
        self._kinds: dict[str, str] = {}  # of values that may not be mixed, with the place of the first of each

    def add_kind(self, kind: str, place: str) -> None:
        """Check that all records have values of one kind."""
        if self._kinds.setdefault(kind, place) == place and len(self._kinds) > 1:
            (old, old_place), (new, new_place) = self._kinds.items()
            raise CorpusError(f"records differ: {old_place} has {old}, but {new_place} has {new}; use only one of them")


def read_records(
    files: tuple[Path, ...], reading: Reading, findings: Findings | None = None
) -> Iterator[tuple[int, Record | str]]:
    """Yield the line number of each record, and the record, or the reason why it is left out, such
    as "empty" if one of its texts is blank.

    Args:
        files: one file, or the two sides of pairs.
        findings: facts about these and other files, to which new ones are added.
    """
    if len(files) == 2:
        yield from _read_pairs(*files, reading.encoding)
        return
    (path,), findings, ending = files, findings or Findings(), _ending(files[0], reading)
    columns = Columns(reading, ending)
    rows, separator = _read_rows(path, ending, reading, columns), BAR
    if reading.multi_label:
        start = list(islice(rows, NUM_FIRST_ROWS))
        rows, separator = chain(start, rows), _separator_of_labels([row for _, row in start], columns)
    is_first = True
    for number, fields in rows:
        if isinstance(fields, str):
            yield number, fields
            continue
        place = at(path, number)
        try:
            kind, records = _records_of(fields, reading, columns, separator)
        except ValueError as error:
            raise CorpusError(f"{place}: {error}") from None
        findings.add_kind(kind, place)
        if is_first:
            findings.notes |= dict.fromkeys(columns.notes(path.name))
            is_first = False
        for record in records:
            yield number, _unless_blank(record)


def _ending(path: Path, reading: Reading) -> str:
    """Return the ending of the format of a file; tables often have the ending .txt."""
    ending = ending_of(path)
    if ending != TEXT or reading.task == "language-model":
        return ending
    if reading.task == "classification":
        _, first = next(read_texts(path, reading.encoding), (0, ""))
        return FASTTEXT if first.startswith(LABEL_MARK) else CSV
    return TSV


def _read_rows(
    path: Path, ending: str, reading: Reading, columns: Columns
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the fields of each row, or the reason why it is left out."""
    if ending in XML:
        return read_units(path, reading.source or "", reading.target or "")
    if reading.task == "tagging" and ending in COLUMNS:
        return iter(read_columns(path, ending, reading.encoding))
    rows = read_rows(path, ending, reading.encoding, columns.name)
    return ((number, _unless_rejected(by_language(fields))) for number, fields in rows)


def by_language(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the texts of a row of a data set of Hugging Face by their languages, or other rows."""
    pair = fields.get("translation")
    return pair if isinstance(pair, dict) else fields


def _unless_rejected(fields: dict[str, Any]) -> dict[str, Any] | str:
    """Return a row, or the reason to leave it out: it was not accepted in Prodigy."""
    return "rejected" if "_input_hash" in fields and fields.get("answer", "accept") != "accept" else fields


def _read_pairs(first: Path, second: Path, encoding: str | None) -> Iterator[tuple[int, Record | str]]:
    counts = [0, 0]
    for pair in zip_longest(read_texts(first, encoding), read_texts(second, encoding)):
        counts = [line[0] if line else count for line, count in zip(pair, counts, strict=True)]
        if None not in pair:
            yield counts[0], _unless_blank(PairRecord(pair[0][1], pair[1][1]))
    if counts[0] != counts[1]:
        lines = f"{first} has {counts[0]} lines, but {second} has {counts[1]}"
        raise CorpusError(f"{lines}: line N of one must belong to line N of the other")


def _unless_blank(record: Record) -> Record | str:
    if isinstance(record, DialogueRecord) and not any(message.is_trained for message in record.messages):
        return "without a reply to learn"
    return record if all(text.strip() for text in texts_of(record)) else "empty"


def _records_of(
    fields: Mapping[str, Any], reading: Reading, columns: Columns, separator: str
) -> tuple[str, Sequence[Record]]:
    """Return the kind of a row, which may not be mixed with others, and its records. Raises
    `ValueError` for fields that are none.
    """
    task = reading.task
    if task == "language-model" and (form := form_of(fields)):
        return " and ".join(form), [read_dialogue(fields, form)]
    names = columns.find(fields)
    if task == "tagging":
        return "entities", [read_tagged(fields, names)]
    if task in SIMILARITY_TASKS:
        similar = read_similar(fields, names)
        return "no score" if similar[0].score is None else "a score", similar
    if task == "translation":
        source, target = (check_text(fields[names[side]], names[side]) for side in PAIR)
        return "a pair", [PairRecord(source, target)]
    text = check_text(fields[names["text"]], names["text"])
    if task == "language-model":
        return "text", [TextRecord(text)]
    value, name = fields[names["label"]], names["label"]
    if reading.multi_label:
        return "labels", [LabelledRecord(text, _labels(value, name, separator))]
    if isinstance(value, list):
        raise ValueError(f"{name} is a list; add --multi-label to train with several labels a text")
    if not isinstance(value, str | int) and not (isinstance(value, float) and value.is_integer()):
        raise ValueError(
            f"{name} must be a string, an integer or a boolean, got {kind_of(value)}; correct or remove it"
        )
    return f"{kind_of(value)} as label", [LabelledRecord(text, (check_label(cell_text(value), name),))]


def _labels(value: Any, name: str, separator: str) -> tuple[str, ...]:
    """Return labels from a list or its text, in the form of JSON, Python or NumPy, or from a text
    with separators.
    """
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = literal_eval(_NUMPY_SPACE.sub(", ", value.strip()))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(
                f"{name} must be a list such as ['one', 'two'] if it begins with [; or separate labels by {BAR}"
            ) from None
    elif isinstance(value, str):
        value = [label for label in value.split(separator) if label.strip()]
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of strings, got {kind_of(value)}")
    return tuple(dict.fromkeys(check_label(label, name) for label in value))


def _separator_of_labels(rows: Sequence[Mapping[str, Any] | str], columns: Columns) -> str:
    """Return the character between the labels of cells: a bar, or a semicolon or comma if no cell
    has bars or a list, and at least half of the names between them are in different cells. So a
    file in which names of labels have commas is not divided there.
    """
    try:
        cells = {str(row[columns.find(row)["label"]]) for row in rows if isinstance(row, dict)}
    except ValueError:  # an error of a record
        return BAR
    if any(character in cell for cell in cells for character in (BAR, "[")):
        return BAR
    for separator in SEPARATORS:
        parts = Counter(part.strip() for cell in cells for part in {*cell.split(separator)})
        divided = {part.strip() for cell in cells if separator in cell for part in cell.split(separator)}
        if divided and 2 * sum(parts[part] > 1 for part in divided) >= len(divided):
            return separator
    return BAR
