"""Synthetic dialogues, and what a model is tuned on: with Ghost Attention, or without it.

Ghost Attention (Touvron et al. 2023, "Llama 2", section 3.3): to sample, the instruction is concatenated to every
message of the user, so that every answer keeps it; to train, it stands in the first message alone, and only the last
answer bears loss. Here a script gives the answers that the paper samples from a model. That model, which has no data of
this kind, is the one tuned without: it has learnt to keep an instruction that stands right before its answer, and to
talk for many turns, and nothing of the two together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from model.data.instructions import KINDS, NOBODY, WHO_ARE_YOU, Instruction, draw_instruction
from model.data.smalltalk import Exchange, draw_exchange

PLAIN_SHARE = 0.15  # dialogues without an instruction
# Shares of dialogues by their number of turns. Few long ones: they are for the positions, which no short one reaches.
TURNS = ((1, 1, 0.25), (2, 4, 0.4), (5, 8, 0.25), (9, 20, 0.1))  # from, to, share
ASKED_SHARE = 0.4  # messages that ask for the name where there is one to act as; elsewhere a tenth of that


@dataclass(frozen=True)
class ChatTemplate:
    """How a dialogue is written as text. A model reads all up to and including `reply` and writes the answer."""

    user: str = "User: {}\n"
    bot: str = "Bot: {}\n"
    reply: str = "Bot:"

    def render(self, earlier: Sequence[Exchange], message: str) -> str:
        """The text that the answer to `message` follows, after a space."""
        turns = [self.user.format(one.message) + self.bot.format(one.answer) for one in earlier]
        return "".join(turns) + self.user.format(message) + self.reply


CHAT = ChatTemplate()


@dataclass(frozen=True)
class Dialogue:
    """Turns as they are read in training: the instruction stands in the first message alone."""

    instruction: Instruction | None
    turns: tuple[Exchange, ...]

    def example(self, template: ChatTemplate = CHAT) -> tuple[str, str]:
        """What is read and the last answer, which alone bears loss."""
        *earlier, last = self.turns
        return template.render(earlier, last.message), last.answer


def draw_dialogue(rng: Random, has_ghost_attention: bool) -> Dialogue:
    """Any dialogue.

    Args:
        rng: the same state gives the same messages, with Ghost Attention and without.
        has_ghost_attention: whether dialogues of several turns have an instruction; those of one have it anyway.
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
    """The dialogue that answers are sampled from, with the instruction before every message, each answer keeping it."""
    return [
        Exchange(with_instruction(instruction, one.message), instruction.apply(one.message, one.answer)) for one in said
    ]


def draw_exchanges(rng: Random, num_turns: int, instruction: Instruction | None) -> list[Exchange]:
    """Messages with the answers of one that has read no instruction."""
    is_person = instruction is not None and instruction.kind == "person"
    asked = ASKED_SHARE if is_person else ASKED_SHARE / 10
    return [
        Exchange(rng.choice(WHO_ARE_YOU), NOBODY) if rng.random() < asked else draw_exchange(rng)
        for _ in range(num_turns)
    ]


def with_instruction(instruction: Instruction | None, message: str) -> str:
    return message if instruction is None else f"{instruction.text} {message}"


def draw_examples(seed: int, count: int, has_ghost_attention: bool) -> list[tuple[str, str]]:
    """So many pairs of what is read and what is to be answered."""
    rng = Random(seed)  # noqa: S311 - dialogues, not secrets
    return [draw_dialogue(rng, has_ghost_attention).example() for _ in range(count)]
