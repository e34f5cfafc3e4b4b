"""Records of training data: one line of a file, or one line of each of two files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from sightline.model.config import TaskName as TaskName

TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
# Tasks of models that need not read all of a text.
TRUNCATED_TASKS: tuple[TaskName, ...] = ("classification", "encoder")

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class PairRecord:
    """Two texts: a source and its translation, or two texts that belong together, or that a score
    compares.
    """

    source: str
    target: str
    negatives: tuple[str, ...] = ()  # texts that are worse than the target
    score: float | None = None  # how well both texts belong together, in any unit


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    """A text and the names of its labels: one, or any number if a text may have several."""

    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entity:
    """A part of a text with a label. Indices count characters; `end` is that after the last."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class TaggedRecord:
    """A text and its entities in the order of the text, of which no two overlap."""

    text: str
    entities: tuple[Entity, ...]
    notes: tuple[str, ...] = ()  # one for each entity that overlaps another, or cuts a word

    @property
    def labels(self) -> tuple[str, ...]:
        """Label of each entity."""
        return tuple(entity.label for entity in self.entities)


@dataclass(frozen=True, slots=True)
class DialogueMessage:
    """One message of a dialogue."""

    role: Role
    content: str
    has_loss: bool = True  # if it is a reply
    name: str = ""  # of its author
    # Calls of tools in a reply, in the form of OpenAI with an id; their arguments are objects.
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str = ""  # of the call whose result it is

    @property
    def is_trained(self) -> bool:
        """True for a reply that is part of the loss."""
        return self.has_loss and self.role == "assistant"


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A plain text of a language model."""

    text: str


@dataclass(frozen=True, slots=True)
class DialogueRecord:
    """A dialogue: messages in any order, and definitions of tools in the form of OpenAI."""

    messages: tuple[DialogueMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    unread: frozenset[str] = field(default=frozenset(), compare=False)  # names of fields that are not read


Record: TypeAlias = PairRecord | LabelledRecord | TaggedRecord | TextRecord | DialogueRecord


def texts_of(record: Record) -> tuple[str, ...]:
    """Return the texts of a record; those of a dialogue are the contents of its messages, with
    calls. Results of tools may be empty, and are then left out.
    """
    if isinstance(record, PairRecord):
        return record.source, record.target, *record.negatives
    if isinstance(record, DialogueRecord):
        texts = (
            "\n".join([message.content, *(json.dumps(call["function"]) for call in message.tool_calls)])
            for message in record.messages
            if message.role != "tool" or message.content.strip()
        )
        return tuple(texts)
    return (record.text,)


def key_of(record: Record) -> tuple[str, ...]:
    """Return the texts by which records belong to the same part of a corpus that is divided: all,
    or the source of a record with a score or negatives, such as a query with several documents.
    """
    if isinstance(record, PairRecord) and (record.negatives or record.score is not None):
        return (record.source,)
    return texts_of(record)
