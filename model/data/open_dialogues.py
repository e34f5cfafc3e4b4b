"""Dialogues with instructions whose values come from an open set, so that copying must be learnt.

`model.data.dialogues` draws values from lists of ten to twenty words, which a model memorizes: it
repeats no other value. Here, a value is one or two of 20,000 generated words of several tokens.
User messages and answers hold such words, too, so that neither the last nor the only unusual word
is the value. Kinds of instructions are those of Touvron et al. 2023 ("Llama 2", section 3.3):
hobbies, languages and public figures; and an ending and a greeting of every answer.

Some words, phrasings and messages are held out for the evaluation.
"""

import functools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from model.data.dialogues import CHAT, PLAIN_SHARE, TURNS, with_instruction
from model.data.smalltalk import Exchange, draw_exchange

OpenKind = Literal["ending", "greeting", "figure", "hobby", "language"]
OPEN_KINDS: tuple[OpenKind, ...] = get_args(OpenKind)
Part = Literal["trained", "held-out"]

NUM_WORDS = 20_000  # trained words; each value has one or two
_HELD_OUT_SHARE = 0.1  # of all words
_ONSETS = ("b", "br", "ch", "d", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "sh", "st", "t")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou", "y")
_CODAS = ("", "", "", "l", "m", "n", "ng", "r", "s", "t", "x", "ck", "z", "v", "w")

# Phrasings of each kind. The words of "held-out" occur in trained phrasings, and those of "new
# words" partly in none.
Phrasing = Literal["trained", "held-out", "new words"]
PHRASINGS: Mapping[OpenKind, Mapping[Phrasing, tuple[str, ...]]] = {
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


QUESTIONS: Mapping[OpenKind, Question] = {
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
ASKED_SHARE = 0.4  # share of messages that ask for the value of an instruction; otherwise a tenth

# Messages with open words, and their answers.
OPEN_MESSAGES = (
    ("I saw {0} near {1} today.", "Then {0} must be close to {1}."),
    ("My friend {0} moved to {1}.", "Say hello to {0} for me."),
    ("Have you heard of {0}?", "Yes, {0} is well known."),
    ("We had {0} with {1} for dinner.", "I would rather have {1}."),
    ("Is {0} better than {1}?", "I prefer {0}."),
    ("The shop sells {0} and {1} now.", "Good, buy me some {1}."),
    ("I forgot my {0} at work.", "You can fetch the {0} later."),
    ("Do you know where {0} is?", "Look for {0} behind the house."),
    ("My teacher talked about {0} all morning.", "There is a lot to say about {0}."),
    ("Can I trust {0}?", "Ask {0} for a reason first."),
    ("{0} called and asked for {1}.", "Give {1} a message."),
    ("I dreamt of {0} last night.", "What did {0} want?"),
)
# Messages that no training dialogue has.
HELD_OUT_MESSAGES = (
    "Could you recommend a film for tonight?",
    "The train was crowded this morning.",
    "How do I remove a stain from a shirt?",
    "My sister starts university next week.",
    "What would you cook for six guests?",
    "Explain how a bicycle stays upright.",
    "It has been snowing since Tuesday.",
    "I finally finished that long report!",
    "Why is the sky dark at night?",
    "Give me one reason to learn the piano.",
    "There are too many emails in my inbox.",
    "Should children have their own phones?",
    "Our garden needs some care this spring.",
    "I think the printer is broken once more.",
    "Which season suits a long walk best?",
    "Let us plan a birthday party.",
)


@dataclass(frozen=True)
class OpenInstruction:
    """Instruction in the words of a user."""

    kind: OpenKind
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
        """Check that an answer to `message`, which asks for the value if necessary, has it.

        An ending and a greeting must be at their place.
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
    rng, found = Random(part), dict[str, None]()  # noqa: S311 - no secret
    while len(found) < (NUM_WORDS if part == "trained" else NUM_WORDS // 10):
        word = generate_word(rng)
        if is_held_out(word) == (part == "held-out"):
            found[word] = None
    return tuple(found)


def draw_instruction(
    rng: Random, kind: OpenKind, words: Sequence[str], phrasings: Phrasing = "trained"
) -> OpenInstruction:
    """Generate a random instruction of a kind with a value of one or, for a figure, two words."""
    value = rng.choice(words)
    if kind in ("figure", "language", "greeting"):
        value = value.capitalize()
    if kind == "figure" and rng.random() < 0.5:
        value = f"{value} {rng.choice(words).capitalize()}"
    text = rng.choice(PHRASINGS[kind][phrasings]).format(value)
    return OpenInstruction(kind, value, " ".join(filter(None, (rng.choice(BEFORE), text, rng.choice(AFTER)))))


def draw_message(rng: Random, words: Sequence[str]) -> Exchange:
    """Generate a message and its answer: a half of them have open words."""
    if rng.random() < 0.5:
        return draw_exchange(rng)
    message, answer = rng.choice(OPEN_MESSAGES)
    used = [word.capitalize() if rng.random() < 0.5 else word for word in rng.sample(words, 2)]
    return Exchange(message.format(*used), answer.format(*used))


def ask(rng: Random, kind: OpenKind) -> Exchange:
    question = QUESTIONS[kind]
    return Exchange(rng.choice(question.messages), question.default)


@dataclass(frozen=True)
class OpenDialogue:
    """Training dialogue with the instruction, if any, only in the first message."""

    turns: tuple[Exchange, ...]

    def text(self, *, all_answers: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the spans, in characters, of the answers that the loss includes.

        Args:
            all_answers: include the answers of earlier turns, not only the last.
        """
        text, spans = "", list[tuple[int, int]]()
        for number, one in enumerate(self.turns):
            text += CHAT.user.format(one.message) + CHAT.reply
            if all_answers or number == len(self.turns) - 1:
                spans.append((len(text), len(text) + 1 + len(one.answer)))
            text += f" {one.answer}"
            if number < len(self.turns) - 1:
                text += "\n"
        return text, spans


def draw_dialogue(rng: Random, words: Sequence[str], has_ghost_attention: bool) -> OpenDialogue:
    """Generate a random dialogue, see `model.data.dialogues.draw_dialogue`."""
    first, last, _ = rng.choices(TURNS, [share for *_, share in TURNS])[0]
    instruction = None if rng.random() < PLAIN_SHARE else draw_instruction(rng, rng.choice(OPEN_KINDS), words)
    said = list[Exchange]()
    for _ in range(rng.randint(first, last)):
        kind = rng.choice(tuple(QUESTIONS))
        share = ASKED_SHARE / 10
        if instruction is not None and instruction.kind in QUESTIONS:
            kind, share = instruction.kind, ASKED_SHARE
        said.append(ask(rng, kind) if rng.random() < share else draw_message(rng, words))
    if instruction is None or (len(said) > 1 and not has_ghost_attention):
        return OpenDialogue(tuple(said))
    followed = [Exchange(one.message, instruction.apply(one.message, one.answer)) for one in said]
    start = Exchange(with_instruction(instruction, followed[0].message), followed[0].answer)
    return OpenDialogue((start, *followed[1:]))


def draw_dialogues(seed: int, count: int, has_ghost_attention: bool) -> list[OpenDialogue]:
    """Generate `count` dialogues of trained words."""
    rng, words = Random(seed), words_of("trained")  # noqa: S311 - dialogues, not secrets
    return [draw_dialogue(rng, words, has_ghost_attention) for _ in range(count)]


@dataclass(frozen=True)
class Condition:
    """Parts from which the scripts of an evaluation are drawn."""

    words: Part = "trained"
    phrasings: Phrasing = "trained"
    messages: Part = "trained"


CONDITIONS: Mapping[str, Condition] = {
    "trained": Condition(),
    "unseen values": Condition(words="held-out"),
    "paraphrases": Condition(words="held-out", phrasings="held-out"),
    "paraphrases in new words": Condition(words="held-out", phrasings="new words"),
    "unseen messages": Condition(words="held-out", messages="held-out"),
}


def draw_parts(
    rng: Random, kind: OpenKind, num_turns: int, condition: Condition
) -> tuple[OpenInstruction, list[Exchange]]:
    """Generate an instruction and the messages of a dialogue; the last asks for the value.

    With an ending or a greeting, the last message is any.
    """
    words = words_of(condition.words)
    instruction = draw_instruction(rng, kind, words, condition.phrasings)
    if condition.messages == "held-out":
        said = [Exchange(rng.choice(HELD_OUT_MESSAGES), "I see.") for _ in range(num_turns)]
    else:
        said = [draw_message(rng, words) for _ in range(num_turns)]
    if kind in QUESTIONS:
        said[-1] = ask(rng, kind)
    return instruction, said
