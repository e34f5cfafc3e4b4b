"""Records of training data: one line of a file, or one line of each of two files."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

TaskName = Literal["translation", "classification", "language-model", "encoder"]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class PairRecord:
    """Two texts: a source and its translation, or two similar texts."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    """A text and the names of its labels: one, or any number if a text may have several."""

    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DialogueMessage:
    """One message of a dialogue."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A plain text of a language model."""

    text: str


@dataclass(frozen=True, slots=True)
class DialogueRecord:
    """A dialogue: an optional system message, then messages of user and assistant by turns."""

    messages: tuple[DialogueMessage, ...]


Record: TypeAlias = PairRecord | LabelledRecord | TextRecord | DialogueRecord


def texts_of(record: Record) -> tuple[str, ...]:
    """Return the texts of a record; those of a dialogue are the contents of its messages."""
    if isinstance(record, PairRecord):
        return record.source, record.target
    if isinstance(record, DialogueRecord):
        return tuple(message.content for message in record.messages)
    return (record.text,)
