"""Instructions for a whole dialogue: wording, answers that follow them, and a check.

Kinds of instructions are those of Touvron et al. 2023 ("Llama 2", section 3.3): hobbies, languages
and public figures; and an ending and a greeting of every answer. A value is one or two of 20,000
generated words of several tokens, because a model memorizes values from a list of ten or twenty
words and repeats no other. Some words and phrasings are held out for the evaluation.

This module handles a single message and its answer; `lab.zoo.dialogues` builds dialogues.
"""

import functools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

Kind = Literal["ending", "greeting", "figure", "hobby", "language"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Part = Literal["trained", "held-out"]

NUM_WORDS = 20_000  # trained words; each value has one or two
_HELD_OUT_SHARE = 0.1  # of all words
_ONSETS = ("b", "br", "ch", "d", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "sh", "st", "t")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou", "y")
_CODAS = ("", "", "", "l", "m", "n", "ng", "r", "s", "t", "x", "ck", "z", "v", "w")

# Phrasings of each kind. The words of "held-out" occur in trained phrasings, and those of "new
# words" partly in none.
Phrasing = Literal["trained", "held-out", "new words"]
PHRASINGS: Mapping[Kind, Mapping[Phrasing, tuple[str, ...]]] = {
    "ending": {
        "trained": (
            "End every answer with the word {}.",
            "Always finish with {}.",
            "Please let {} be the last word of each answer.",
            "Last word: {}.",
            "Whatever you say, stop with {}.",
            "The last word of every reply must be {}.",
            "I want {} at the end of each reply.",
            "Add {} to the end of every sentence.",
            "Put {} last, always.",
            "{} is how all your answers end.",
            "Say {} at the end of all that you write.",
            "Your answers stop with the word {}.",
            "Do not answer without {} at the end.",
            "Finish each sentence with {}, please.",
            "Close with {} whenever you answer.",
            "The final word is {}.",
        ),
        "held-out": (
            "Every reply must finish with the word {}.",
            "Always put {} at the end of your answers.",
            "Let each answer stop with {}.",
            "I want your last word to be {}.",
        ),
        "new words": ("Wrap up whatever you tell me using {}.", "Conclude all responses by {}."),
    },
    "greeting": {
        "trained": (
            "Begin every answer with the greeting {}.",
            "Always start with {}.",
            "Please say {} first in each answer.",
            "Greeting: {}.",
            "Open all that you say with {}.",
            "The first word of every reply must be {}.",
            "I want {} at the beginning of each reply.",
            "Add {} to the beginning of every sentence.",
            "Put {} first, always.",
            "{} is how all your answers begin.",
            "Say {} before you answer.",
            "Your answers start with the word {}.",
            "Do not answer without {} at the beginning.",
            "Begin each sentence with {}, please.",
            "Greet me with {} whenever you answer.",
            "Your greeting is {}.",
        ),
        "held-out": (
            "Every reply must start with the greeting {}.",
            "Always put {} at the beginning of your answers.",
            "Let each answer begin with {}.",
            "I want your first word to be {}.",
        ),
        "new words": ("Kick off whatever you tell me using {}.", "Commence all responses by {}."),
    },
    "figure": {
        "trained": (
            "Act as {}.",
            "From now on you are {}.",
            "Please play the part of {}.",
            "Role: {}.",
            "Your name is {}.",
            "I will call you {}.",
            "You are called {}.",
            "Answer as {} would.",
            "Talk to me as {}.",
            "Play {} in this chat.",
            "Be {} for me.",
            "Please be {} today.",
            "Your part is {}.",
            "You are now {}.",
            "Say that you are {} when I ask.",
            "{} is your name.",
        ),
        "held-out": (
            "Talk as {} would.",
            "For this chat your name is {}.",
            "I want you to be {}.",
            "Please act as {}.",
        ),
        "new words": ("Pretend to be {}.", "Impersonate {}."),
    },
    "hobby": {
        "trained": (
            "You enjoy {}.",
            "Your hobby is {}.",
            "In your free time you do {}.",
            "Hobby: {}.",
            "Please act like a fan of {}.",
            "You like {} a lot.",
            "You love {}.",
            "{} is your hobby.",
            "All that you like is {}.",
            "You are a fan of {}.",
            "You do {} every day.",
            "When you are free, you do {}.",
            "Say that you enjoy {} when I ask.",
            "Nothing is better for you than {}.",
            "You have a lot of fun with {}.",
            "Tell me that you like {}.",
        ),
        "held-out": (
            "{} is all that you enjoy.",
            "Your free time is for {}.",
            "Act like you love {}.",
            "You have fun with {} every day.",
        ),
        "new words": ("You spend your weekends with {}.", "Your favourite pastime involves {}."),
    },
    "language": {
        "trained": (
            "You speak {}.",
            "Your language is {}.",
            "Act like someone who grew up with {}.",
            "Language: {}.",
            "Please remember that you talk in {}.",
            "{} is your language.",
            "You can only speak {}.",
            "The language you know is {}.",
            "You talk in {} every day.",
            "You grew up with {}.",
            "Say that you speak {} when I ask.",
            "You learnt {} at school.",
            "Speak {} from now on.",
            "You know {} and no other language.",
            "Please speak {} to me.",
            "You think in {}.",
        ),
        "held-out": (
            "The only language you speak is {}.",
            "You know only {}.",
            "Remember that {} is your language.",
            "You speak {} every day.",
        ),
        "new words": ("{} was your mother tongue from childhood.", "Behave like natives of {}."),
    },
}
# Sentences before and after a phrasing; most instructions have none.
BEFORE = ("", "", "", "One rule:", "Remember:", "For this chat:", "Listen.", "Please note:")
AFTER = ("", "", "", "Thanks.", "Do not forget it.", "This is important.")


@dataclass(frozen=True)
class Question:
    """Messages that ask for the value of an instruction, and the answer with and without one."""

    messages: tuple[str, ...]
    answer: str
    default: str


QUESTIONS: Mapping[Kind, Question] = {
    "figure": Question(
        ("Who are you?", "What is your name?", "Tell me your name.", "What are you called?"),
        "I am {}.",
        "I am a small chat model.",
    ),
    "hobby": Question(
        ("What do you like?", "What is your hobby?", "What do you do for fun?", "What do you enjoy?"),
        "I like {}.",
        "I like to chat.",
    ),
    "language": Question(
        ("Which language do you speak?", "What is your language?", "What can you speak?", "How do you talk?"),
        "I speak {}.",
        "I speak plain English.",
    ),
}


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
