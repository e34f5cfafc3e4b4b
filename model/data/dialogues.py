"""Synthetic dialogues for training chat models with and without Ghost Attention.

Ghost Attention (Touvron et al. 2023, "Llama 2", section 3.3) samples dialogues with the instruction
concatenated to every user message, so that every answer follows it. It then trains on the same
dialogues with the instruction only in the first message, and computes the loss only on the last
answer.

The paper samples the answers from a model; here a script generates them. The baseline without Ghost
Attention is trained on dialogues of one turn with an instruction and on longer dialogues without
one, but never on a longer dialogue with an instruction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from model.data.instructions import KINDS, NOBODY, WHO_ARE_YOU, Instruction, draw_instruction
from model.data.smalltalk import Exchange, draw_exchange

PLAIN_SHARE = 0.15  # share of dialogues without an instruction
# Shares of dialogues by number of turns. The few long dialogues train positions that shorter ones
# do not reach.
TURNS = ((1, 1, 0.25), (2, 4, 0.4), (5, 8, 0.25), (9, 20, 0.1))  # from, to, share
# Share of messages that ask for the model's name if the instruction assigns one; otherwise a tenth
# of it.
ASKED_SHARE = 0.4


class HasText(Protocol):
    """Instruction in the words of a user."""

    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class ChatTemplate:
    """Text format of a dialogue.

    The model reads the text up to and including `reply` and generates the answer.
    """

    user: str = "User: {}\n"
    bot: str = "Bot: {}\n"
    reply: str = "Bot:"

    def render(self, earlier: Sequence[Exchange], message: str) -> str:
        """Return the prompt for the answer to `message`; a space separates the two."""
        turns = [self.user.format(one.message) + self.bot.format(one.answer) for one in earlier]
        return "".join(turns) + self.user.format(message) + self.reply


CHAT = ChatTemplate()


@dataclass(frozen=True)
class Dialogue:
    """Training dialogue with the instruction only in the first message."""

    instruction: Instruction | None
    turns: tuple[Exchange, ...]

    def example(self, template: ChatTemplate = CHAT) -> tuple[str, str]:
        """Return the prompt, and the last answer, on which the loss is computed."""
        *earlier, last = self.turns
        return template.render(earlier, last.message), last.answer


def draw_dialogue(rng: Random, has_ghost_attention: bool) -> Dialogue:
    """Generate a random dialogue.

    Args:
        rng: source of randomness. The same state gives the same messages with and without Ghost
            Attention.
        has_ghost_attention: allow an instruction in dialogues of several turns. Dialogues of one
            turn may always have one.
    """
    first, last, _ = rng.choices(TURNS, [share for *_, share in TURNS])[0]
    instruction = None if rng.random() < PLAIN_SHARE else draw_instruction(rng, rng.choice(KINDS))
    said = draw_exchanges(rng, rng.randint(first, last), instruction)
    if instruction is None or (len(said) > 1 and not has_ghost_attention):
        return Dialogue(None, tuple(said))
    sampled = sample_answers(instruction, said)
    later = [Exchange(one.message, answered.answer) for one, answered in zip(said, sampled, strict=True)][1:]
    return Dialogue(instruction, (sampled[0], *later))


def sample_answers(instruction: Instruction, said: Sequence[Exchange]) -> list[Exchange]:
    """Return the dialogue with the instruction before every message and answers that follow it."""
    return [
        Exchange(with_instruction(instruction, one.message), instruction.apply(one.message, one.answer)) for one in said
    ]


def draw_exchanges(rng: Random, num_turns: int, instruction: Instruction | None) -> list[Exchange]:
    """Generate messages with the answers that a model without an instruction gives."""
    is_person = instruction is not None and instruction.kind == "person"
    asked = ASKED_SHARE if is_person else ASKED_SHARE / 10
    return [
        Exchange(rng.choice(WHO_ARE_YOU), NOBODY) if rng.random() < asked else draw_exchange(rng)
        for _ in range(num_turns)
    ]


def with_instruction(instruction: HasText | None, message: str) -> str:
    return message if instruction is None else f"{instruction.text} {message}"


def draw_examples(seed: int, count: int, has_ghost_attention: bool) -> list[tuple[str, str]]:
    """Generate `count` pairs of prompt and answer."""
    rng = Random(seed)  # noqa: S311 - dialogues, not secrets
    return [draw_dialogue(rng, has_ghost_attention).example() for _ in range(count)]
