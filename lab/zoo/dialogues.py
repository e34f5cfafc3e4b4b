"""Synthetic dialogues for training chat models with and without Ghost Attention.

Ghost Attention (Touvron et al. 2023, "Llama 2", section 3.3) samples dialogues with the instruction
concatenated to every user message, so that every answer follows it. It then trains on the same
dialogues with the instruction only in the first message, and computes the loss only on the last
answer.

The paper samples the answers from a model; here a script generates them. The baseline without Ghost
Attention is trained on dialogues of one turn with an instruction and on longer dialogues without
one, but never on a longer dialogue with an instruction.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lab.zoo.instructions import KINDS, QUESTIONS, Instruction, Kind, Part, Phrasing, draw_instruction, words_of
from lab.zoo.smalltalk import SmalltalkPair, draw_exchange

PLAIN_SHARE = 0.15  # share of dialogues without an instruction
# Shares of dialogues by number of turns. The few long dialogues train positions that shorter ones
# do not reach.
TURNS = ((1, 1, 0.25), (2, 4, 0.4), (5, 8, 0.25), (9, 20, 0.1))  # from, to, share
ASKED_SHARE = 0.4  # share of messages that ask for the value of an instruction; otherwise a tenth

_TEXTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# Messages with generated words, and their answers. Neither the last nor the only unusual word of a
# dialogue is the value of the instruction.
WORD_MESSAGES: Sequence[tuple[str, str]] = _TEXTS["word_messages"]
HELD_OUT_MESSAGES: Sequence[str] = _TEXTS["held_out_messages"]  # no training dialogue has them


@dataclass(frozen=True)
class ChatTemplate:
    """Text format: the model reads up to and including `reply` and generates the answer."""

    user: str = "User: {}\n"
    bot: str = "Bot: {}\n"
    reply: str = "Bot:"

    def render(self, earlier: Sequence[SmalltalkPair], message: str) -> str:
        """Return the prompt for the answer to `message`; a space separates the two."""
        turns = [self.user.format(pair.message) + self.bot.format(pair.answer) for pair in earlier]
        return "".join(turns) + self.user.format(message) + self.reply


CHAT = ChatTemplate()


def draw_message(rng: Random, words: Sequence[str]) -> SmalltalkPair:
    """Generate a message and its answer; half of the messages have generated words."""
    if rng.random() < 0.5:
        return draw_exchange(rng)
    message, answer = rng.choice(WORD_MESSAGES)
    used = [word.capitalize() if rng.random() < 0.5 else word for word in rng.sample(words, 2)]
    return SmalltalkPair(message.format(*used), answer.format(*used))


def ask(rng: Random, kind: Kind) -> SmalltalkPair:
    question = QUESTIONS[kind]
    return SmalltalkPair(rng.choice(question.messages), question.default)


def with_instruction(instruction: Instruction, message: str) -> str:
    return f"{instruction.text} {message}"


@dataclass(frozen=True)
class Dialogue:
    """Training dialogue with the instruction, if any, only in the first message."""

    instruction: Instruction | None
    turns: tuple[SmalltalkPair, ...]

    @property
    def prompt(self) -> str:
        """Prompt for the last answer."""
        return CHAT.render(self.turns[:-1], self.turns[-1].message)

    def text_and_answers(self) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the spans of the answers in it, in characters."""
        text, spans = "", list[tuple[int, int]]()
        for turn in self.turns:
            text += CHAT.user.format(turn.message) + CHAT.reply
            spans.append((len(text), len(text) + 1 + len(turn.answer)))
            text += f" {turn.answer}\n"
        return text.removesuffix("\n"), spans


def draw_dialogue(rng: Random, words: Sequence[str], has_ghost_attention: bool) -> Dialogue:
    """Generate a random dialogue. The same state of `rng` gives the same messages with and without
    Ghost Attention, which allows an instruction in dialogues of several turns. Dialogues of one
    turn may always have one.
    """
    first, last, _ = rng.choices(TURNS, [share for *_, share in TURNS])[0]
    instruction = None if rng.random() < PLAIN_SHARE else draw_instruction(rng, rng.choice(KINDS), words)
    said = list[SmalltalkPair]()
    for _ in range(rng.randint(first, last)):
        kind = rng.choice(tuple(QUESTIONS))
        share = ASKED_SHARE / 10
        if instruction is not None and instruction.kind in QUESTIONS:
            kind, share = instruction.kind, ASKED_SHARE
        said.append(ask(rng, kind) if rng.random() < share else draw_message(rng, words))
    if instruction is None or (len(said) > 1 and not has_ghost_attention):
        return Dialogue(None, tuple(said))
    start, *later = (SmalltalkPair(pair.message, instruction.apply(pair.message, pair.answer)) for pair in said)
    return Dialogue(instruction, (SmalltalkPair(with_instruction(instruction, start.message), start.answer), *later))


def draw_dialogues(seed: int, count: int, has_ghost_attention: bool) -> list[Dialogue]:
    """Generate `count` dialogues of trained words."""
    rng, words = Random(seed), words_of("trained")
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
    rng: Random, kind: Kind, num_turns: int, condition: Condition
) -> tuple[Instruction, list[SmalltalkPair]]:
    """Generate an instruction and the messages of a dialogue; the last asks for the value, or is
    any for an ending or a greeting.
    """
    words = words_of(condition.words)
    instruction = draw_instruction(rng, kind, words, condition.phrasings)
    if condition.messages == "held-out":
        said = [SmalltalkPair(rng.choice(HELD_OUT_MESSAGES), "I see.") for _ in range(num_turns)]
    else:
        said = [draw_message(rng, words) for _ in range(num_turns)]
    if kind in QUESTIONS:
        said[-1] = ask(rng, kind)
    return instruction, said
