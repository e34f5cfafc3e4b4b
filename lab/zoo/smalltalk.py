"""Small talk: messages of a user, and the answer to each without any instruction."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

_PHRASES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_VALUES = _PHRASES["pairs"] | {name: dict.fromkeys(values, "") for name, values in _PHRASES["values"].items()}


@dataclass(frozen=True)
class Intent:
    """Messages with the same meaning, and their answer. `{}` stands for one of `values`, `{of}` for
    its counterpart.
    """

    messages: Sequence[str]
    answer: str
    values: Mapping[str, str]


INTENTS = [
    Intent(intent["messages"], intent["answer"], _VALUES[intent["values"]] if "values" in intent else {"": ""})
    for intent in _PHRASES["intents"]
]


@dataclass(frozen=True)
class SmalltalkPair:
    message: str
    answer: str


def draw_exchange(rng: Random) -> SmalltalkPair:
    """Generate a random exchange."""
    intent = rng.choice(INTENTS)
    value, of = rng.choice(list(intent.values.items()))
    return SmalltalkPair(rng.choice(intent.messages).format(value), intent.answer.format(value, of=of))
