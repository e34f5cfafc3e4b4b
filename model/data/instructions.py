"""Instructions for a whole dialogue: wording, answers that follow them, and a check.

This module handles a single message and its answer; `model.data.dialogues` builds dialogues.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

Kind = Literal["capitals", "ending", "person", "greeting"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NAMES = (
    *("Amara", "Boris", "Chiara", "Dmitri", "Elena", "Farid", "Greta", "Hamid", "Ingrid", "Jasper"),
    *("Keiko", "Lorenzo", "Mirela", "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Stefan", "Tamar"),
)
ENDINGS = (
    *("river", "lantern", "thunder", "pepper", "velvet", "compass", "harbour", "candle"),
    *("meadow", "feather", "copper", "island", "marble", "saddle", "ribbon", "falcon"),
)
GREETINGS = ("Ahoy", "Aloha", "Howdy", "Salute", "Welcome", "Bonjour", "Namaste", "Cheers", "Servus", "Ciao")

# Values and phrasings of each kind of instruction: full sentences and terse ones.
VALUES: dict[Kind, tuple[str, ...]] = {"capitals": ("",), "ending": ENDINGS, "person": NAMES, "greeting": GREETINGS}
SENTENCES: dict[Kind, tuple[str, ...]] = {
    "capitals": (
        "Always answer in capitals.",
        "Please write every answer in capital letters.",
        "From now on use capital letters only.",
    ),
    "ending": (
        "End every answer with the word {}.",
        "Always finish with the word {}.",
        "Please let {} be the last word of each answer.",
    ),
    "person": ("Act as {}.", "From now on you are {}.", "Please play the part of {}."),
    "greeting": (
        "Begin every answer with the greeting {}.",
        "Always start with {}.",
        "Please say {} first in each answer.",
    ),
}
TERSE: dict[Kind, tuple[str, ...]] = {
    "capitals": ("Letters: capitals.", "Style: capitals."),
    "ending": ("Last word: {}.", "Ending: {}."),
    "person": ("Figure: {}.", "Role: {}."),
    "greeting": ("Greeting: {}.", "First word: {}."),
}

WHO_ARE_YOU = ("Who are you?", "What is your name?", "Tell me your name.")
NOBODY = "I am a small chat model."  # the answer without an instruction to act as a person


@dataclass(frozen=True)
class Instruction:
    """Instruction in the words of a user."""

    kind: Kind
    value: str  # the name, the word or the greeting; "" for capitals
    text: str

    def apply(self, message: str, answer: str) -> str:
        """Change an answer to `message` so that it follows the instruction."""
        match self.kind:
            case "capitals":
                return answer.upper()
            case "ending":
                return f"{answer.rstrip('.')}, {self.value}."
            case "person":
                return f"I am {self.value}." if message in WHO_ARE_YOU else answer
            case "greeting":
                return f"{self.value}! {answer}"

    def is_kept(self, message: str, answer: str) -> bool:
        """Check that an answer to `message` follows the instruction, whatever else it says."""
        words: list[str] = re.findall(r"\w+", answer)
        if not words:
            return False
        match self.kind:
            case "capitals":
                return answer == answer.upper() != answer.lower()
            case "ending":
                return words[-1] == self.value
            case "person":
                named = set(words) & set(NAMES)
                return named == {self.value} if message in WHO_ARE_YOU else named <= {self.value}
            case "greeting":
                return words[0] == self.value


def draw_instruction(rng: Random, kind: Kind) -> Instruction:
    """Generate a random instruction of a kind; half of them have a terse phrasing."""
    value = rng.choice(VALUES[kind])
    phrasing = rng.choice((TERSE if rng.random() < 0.5 else SENTENCES)[kind])
    return Instruction(kind, value, phrasing.format(value))
