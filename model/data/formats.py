"""Records of the tasks from the rows of files.

The fields of a record are `source` and `target` (translation, encoder), `text` and `label`
(classification; `labels`, a list, with several labels a text), and `text` or `messages` (language
model). Two files are pairs of texts: line N of one belongs to line N of the other.
`sightline.model.data.files` reads the rows of one file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, get_args

from sightline.model.data.files import CorpusError, at, kind_of, read_rows, read_texts
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
MAX_LABEL_CHARACTERS = 200
DEVELOPER = "developer"  # role that APIs also have for system messages
SEPARATOR = "|"  # of several labels in a cell of a table


@dataclass(frozen=True)
class Reading:
    """Task whose records the files of a corpus have, and what the user says about them."""

    task: TaskName
    source: str | None = None  # language of sources, which is the ending of their files if there are two
    target: str | None = None  # language of targets, likewise
    multi_label: bool = False  # a text has any number of labels


def read_records(
    files: tuple[Path, ...], reading: Reading, kinds: dict[str, str] | None = None
) -> Iterator[tuple[int, Record | None]]:
    """Yield the line number of each record, and the record, or None if one of its texts is blank.

    Args:
        files: one file, or the two sides of pairs.
        kinds: kinds of values that may not be mixed, with the location of the first of each; pass
            one mapping for several files to compare them.
    """
    if len(files) == 2:
        yield from _read_pairs(*files)
        return
    converter = _Converter(reading, {} if kinds is None else kinds)
    for number, fields in read_rows(files[0]):
        yield number, _unless_blank(converter.record(fields, at(files[0], number)))


def _read_pairs(first: Path, second: Path) -> Iterator[tuple[int, Record | None]]:
    counts = [0, 0]
    for pair in zip_longest(read_texts(first), read_texts(second)):
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


def _unless_blank(record: Record) -> Record | None:
    return record if all(text.strip() for text in texts_of(record)) else None


class _Converter:
    """Converts the fields of rows to records. `_where` is the line of the row, for messages."""

    def __init__(self, reading: Reading, kinds: dict[str, str]) -> None:
        self._task, self._multi_label, self._kinds = reading.task, reading.multi_label, kinds
        self._where = ""

    def record(self, fields: Mapping[str, Any], where: str) -> Record:
        """Return the record of a row. Raises `CorpusError` for fields that are none."""
        self._where = where
        return self._record(fields)

    def _fail(self, problem: str) -> NoReturn:
        raise CorpusError(f"{self._where}: {problem}")

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
            if isinstance(value, str):
                value = [label for label in value.split(SEPARATOR) if label.strip()]
            if not isinstance(value, list):
                self._fail(f"{name} must be a list of strings, got {kind_of(value)}")
            return tuple(dict.fromkeys(self._label(label, name) for label in value))
        if isinstance(value, list):
            self._fail(f"{name} is a list; add --multi-label to train with several labels a text")
        if not isinstance(value, str | int):
            self._fail(f"{name} must be a string, an integer or a boolean, got {kind_of(value)}")
        self._check_kind("label types", kind_of(value))
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
            self._fail(f"messages must be a list of objects with role and content, got {kind_of(value)}")
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
