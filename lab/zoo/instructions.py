"""Instructions for a whole dialogue: wording, answers that follow them, and a check.

Kinds of instructions are those of Touvron et al. 2023 ("Llama 2", section 3.3): hobbies, languages
and public figures; and an ending and a greeting of every answer. A value is one or two of 20,000
generated words of several tokens, because a model memorizes values from a list of ten or twenty
words and repeats no other. Some words and phrasings are held out for the evaluation.

This module handles a single message and its answer; `lab.zoo.dialogues` builds dialogues.
"""

import functools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

Kind = Literal["ending", "greeting", "figure", "hobby", "language"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Part = Literal["trained", "held-out"]

NUM_WORDS = 20_000  # trained words; each value has one or two
_HELD_OUT_SHARE = 0.1  # of all words
_ONSETS = ("b", "br", "ch", "d", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "sh", "st", "t")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou", "y")
_CODAS = ("", "", "", "l", "m", "n", "ng", "r", "s", "t", "x", "ck", "z", "v", "w")

Phrasing = Literal["trained", "held-out", "new words"]
_TEXTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# Phrasings of each kind. The words of "held-out" occur in trained phrasings, and those of "new
# words" partly in none.
PHRASINGS: Mapping[Kind, Mapping[Phrasing, Sequence[str]]] = _TEXTS["phrasings"]
# Sentences before and after a phrasing; most instructions have none.
BEFORE = ("", "", "", "One rule:", "Remember:", "For this chat:", "Listen.", "Please note:")
AFTER = ("", "", "", "Thanks.", "Do not forget it.", "This is important.")


@dataclass(frozen=True)
class Question:
    """Messages that ask for the value of an instruction, and the answer with and without one."""

    messages: Sequence[str]
    answer: str
    default: str


QUESTIONS: Mapping[Kind, Question] = {kind: Question(**texts) for kind, texts in _TEXTS["questions"].items()}


@dataclass(frozen=True)
class Instruction:
    """Instruction in the words of a user."""

    kind: Kind
    value: str  # one or two words
    text: str

    def apply(self, message: str, answer: str) -> str:
        """Change an answer to `message` so that it follows the instruction."""
        match self.kind:
            case "ending":
                return f"{answer.rstrip('.?')}, {self.value}."
            case "greeting":
                return f"{self.value}! {answer}"
        question = QUESTIONS[self.kind]
        return question.answer.format(self.value) if message in question.messages else answer

    def is_kept(self, message: str, answer: str) -> bool:
        """Check that an answer to `message`, which asks for the value if necessary, has it, or that
        an ending or a greeting is at its place.
        """
        words, value = re.findall(r"\w+", answer), self.value.split()
        match self.kind:
            case "ending":
                return words[-len(value) :] == value
            case "greeting":
                return words[: len(value)] == value
        return any(words[start : start + len(value)] == value for start in range(len(words)))


def is_held_out(word: str) -> bool:
    """Return True if no training dialogue has the lower-case word."""
    return zlib.crc32(word.encode()) < _HELD_OUT_SHARE * 2**32


def generate_word(rng: Random) -> str:
    """Return a word of two or three syllables."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((2, 2, 3))))


@functools.cache
def words_of(part: Part) -> tuple[str, ...]:
    """Generate the words of a part, which are always the same; a tenth as many are held out."""
    rng, words = Random(part), dict[str, None]()
    while len(words) < (NUM_WORDS if part == "trained" else NUM_WORDS // 10):
        word = generate_word(rng)
        if is_held_out(word) == (part == "held-out"):
            words[word] = None
    return tuple(words)


def draw_instruction(rng: Random, kind: Kind, words: Sequence[str], phrasings: Phrasing = "trained") -> Instruction:
    """Generate a random instruction of a kind with a value of one or, for a figure, two words."""
    value = rng.choice(words)
    if kind in ("figure", "language", "greeting"):
        value = value.capitalize()
    if kind == "figure" and rng.random() < 0.5:
        value = f"{value} {rng.choice(words).capitalize()}"
    text = rng.choice(PHRASINGS[kind][phrasings]).format(value)
    return Instruction(kind, value, " ".join(filter(None, (rng.choice(BEFORE), text, rng.choice(AFTER)))))
