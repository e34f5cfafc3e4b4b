"""Recall of instructions: a model answers scripted dialogues, and the last answer is checked.

Touvron et al. 2023 ("Llama 2", section A.3.5) ask for an attribute at turns 2 to 20 and use human
judges; here a script asks and checks. The model is a function from prompts to answers, so that a
served model can be measured in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tokenizers import Tokenizer

from model.architectures.causal import CausalModel
from model.data.dialogues import CHAT, with_instruction
from model.data.instructions import KINDS, NOBODY, WHO_ARE_YOU, Instruction, Kind, draw_instruction
from model.data.open_dialogues import CONDITIONS, OPEN_KINDS, OpenInstruction, draw_parts
from model.data.smalltalk import Exchange, draw_exchange
from model.data.tokenizer import decode_ids, encode_lines, prompt_tokenizer
from model.decoding.batched import continue_greedily
from model.evaluation.share import Share

MAX_ANSWER_TOKENS = 32

Answer = Callable[[Sequence[str]], Sequence[str]]  # maps prompts to their answers


@dataclass
class Script:
    """Scripted dialogue: the messages of the user, and the exchanges so far."""

    instruction: Instruction | OpenInstruction
    plain: list[Exchange]  # all messages, with the answers of a model without an instruction
    said: list[Exchange]  # the exchanges so far

    @property
    def message(self) -> str:
        """Next message of the user; only the first message contains the instruction."""
        message = self.plain[len(self.said)].message
        return message if self.said else with_instruction(self.instruction, message)

    @property
    def prompt(self) -> str:
        """Prompt for the next answer."""
        return CHAT.render(self.said, self.message)

    def add_answer(self, answer: str) -> None:
        self.said.append(Exchange(self.message, answer))

    @property
    def is_kept(self) -> bool:
        """True if the last answer follows the instruction."""
        return self.instruction.is_kept(self.plain[-1].message, self.said[-1].answer)


def draw_script(rng: Random, kind: Kind, num_turns: int) -> Script:
    """Generate a random script of small talk.

    For the kind "person", only the last message asks for the name.
    """
    instruction = draw_instruction(rng, kind)
    plain = [draw_exchange(rng) for _ in range(num_turns)]
    if kind == "person":
        plain[-1] = Exchange(rng.choice(WHO_ARE_YOU), NOBODY)
    return Script(instruction, plain, [])


def recall(
    answer: Answer, turns: Sequence[int], num_dialogues: int, seed: int, *, after_plain_answers: bool = False
) -> dict[str, Any]:
    """Count the dialogues whose last answer follows the instruction.

    Args:
        answer: the model.
        turns: lengths of dialogues, in turns.
        num_dialogues: number of dialogues of each kind and length.
        seed: seed of the dialogues.
        after_plain_answers: use scripted answers that ignore the instruction for all turns but the
            last. Otherwise the model sees its own earlier answers, which also show it the
            instruction.

    Returns:
        Counts with 95 % confidence intervals, by length and kind of instruction.
    """
    rng = Random(seed)  # noqa: S311 - dialogues, not secrets
    counts: dict[str, Any] = {}
    for num_turns in turns:
        scripts = [draw_script(rng, kind, num_turns) for kind in KINDS for _ in range(num_dialogues)]
        counts[str(num_turns)] = _count_kept(answer, scripts, after_plain_answers)
    return counts


def open_recall(answer: Answer, turns: Sequence[int], num_dialogues: int, seed: int) -> dict[str, Any]:
    """Count the dialogues whose last answer follows an instruction with an open value.

    Args:
        answer: the model.
        turns: lengths of dialogues, in turns.
        num_dialogues: number of dialogues of each condition, kind and length.
        seed: seed of the dialogues.

    Returns:
        For each condition of `model.data.open_dialogues`, what `recall` returns.
    """
    counts: dict[str, Any] = {}
    for name, condition in CONDITIONS.items():
        rng = Random(f"{seed} {name}")  # noqa: S311 - dialogues, not secrets
        counts[name] = {}
        for num_turns in turns:
            parts = [draw_parts(rng, kind, num_turns, condition) for kind in OPEN_KINDS for _ in range(num_dialogues)]
            scripts = [Script(instruction, said, []) for instruction, said in parts]
            counts[name][str(num_turns)] = _count_kept(answer, scripts)
    return counts


def _count_kept(answer: Answer, scripts: Sequence[Script], after_plain_answers: bool = False) -> dict[str, Any]:
    """Run dialogues of the same length; return the counts of each kind of instruction."""
    num_turns = len(scripts[0].plain)
    for turn in range(num_turns):
        if after_plain_answers and turn < num_turns - 1:
            texts: Sequence[str] = [script.plain[turn].answer for script in scripts]
        else:
            texts = answer([script.prompt for script in scripts])
        for script, text in zip(scripts, texts, strict=True):
            script.add_answer(text)
    kinds = dict.fromkeys(script.instruction.kind for script in scripts)
    kept = {kind: [one.is_kept for one in scripts if one.instruction.kind == kind] for kind in kinds}
    return {name: _counted(of_kind) for name, of_kind in kept.items()} | {
        "all": _counted([one.is_kept for one in scripts])
    }


def _counted(kept: Sequence[bool]) -> dict[str, Any]:
    share = Share(sum(kept), len(kept))
    return {"kept": share.count, "total": share.total, "interval_95": [round(end, 4) for end in share.interval]}


def greedy_answers(model: CausalModel, tokenizer: Tokenizer) -> Answer:
    """Return a function that answers prompts by greedy decoding without a cache.

    Args:
        model: in evaluation mode.
        tokenizer: tokenizer of the checkpoint.
    """
    assert not model.training
    prompts_tokenizer, end_id = prompt_tokenizer(tokenizer), model.config.eos_id

    def answer(prompts: Sequence[str]) -> list[str]:
        rows = encode_lines(prompts_tokenizer, prompts)
        return [decode_ids(tokenizer, ids) for ids in continue_greedily(model, rows, [end_id], MAX_ANSWER_TOKENS)]

    return answer
