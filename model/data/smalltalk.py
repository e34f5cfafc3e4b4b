"""Small talk: messages of a user, and the answer to each without any instruction."""

from dataclasses import dataclass
from random import Random

from sightline.model.data.sample_phrases import read_phrases

_PHRASES = read_phrases("smalltalk")


@dataclass(frozen=True)
class Intent:
    """Messages with the same meaning, and their answer. `{}` stands for one of `values`, `{of}` for
    its counterpart in `counterparts`.
    """

    messages: tuple[str, ...]
    answer: str
    values: tuple[str, ...]
    counterparts: tuple[str, ...]  # one for each value, or none


def _intent(messages: list[str], answer: str, values: str | None = None) -> Intent:
    pairs: dict[str, str] = _PHRASES["pairs"].get(values, {})
    singles = pairs or _PHRASES["values"].get(values, ("",))
    return Intent(tuple(messages), answer, tuple(singles), tuple(pairs.values()))


INTENTS = [_intent(**intent) for intent in _PHRASES["intents"]]


@dataclass(frozen=True)
class SmalltalkPair:
    message: str
    answer: str


def draw_exchange(rng: Random) -> SmalltalkPair:
    """Generate a random exchange."""
    intent = rng.choice(INTENTS)
    index = rng.randrange(len(intent.values))
    value = intent.values[index]
    of = intent.counterparts[index] if intent.counterparts else ""
    return SmalltalkPair(rng.choice(intent.messages).format(value), intent.answer.format(value, of=of))
