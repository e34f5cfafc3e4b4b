"""Recall of instructions: a model answers scripted dialogues, and the last answer is checked.

Touvron et al. 2023 ("Llama 2", section A.3.5) ask for an attribute at turns 2 to 20 and use human
judges; here a script asks and checks. The model is a function from prompts to answers, so that a
served model can be measured in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from lab.zoo.dialogues import CHAT, CONDITIONS, Condition, draw_parts, with_instruction
from lab.zoo.instructions import KINDS, Instruction
from lab.zoo.smalltalk import SmalltalkPair
from sightline.base.errors import UsageError
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import load_metadata, load_model
from sightline.model.config import architecture_of
from sightline.model.data.tokenizer_training import decode_ids, encode_lines, prompt_tokenizer
from sightline.model.decoding import continue_greedily, one_thread
from sightline.model.evaluation.result import Share
from sightline.model.parts import WEIGHTS

MAX_ANSWER_TOKENS = 32
TURNS = (1, 2, 4, 6, 20)  # lengths of dialogues, as in Llama 2, and the first turn
SEED = 1_000_000  # of dialogues; differs from the seeds of training dialogues
NUM_DIALOGUES = 10  # dialogues of each condition, kind of instruction and length

Answer = Callable[[Sequence[str]], Sequence[str]]  # maps prompts to their answers


@dataclass
class Script:
    """Scripted dialogue: the messages of the user, and the exchanges so far."""

    instruction: Instruction
    plain: list[SmalltalkPair]  # all messages, with the answers of a model without an instruction
    said: list[SmalltalkPair] = field(default_factory=list)  # the exchanges so far

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
        self.said.append(SmalltalkPair(self.message, answer))

    @property
    def is_kept(self) -> bool:
        """True if the last answer follows the instruction."""
        return self.instruction.is_kept(self.plain[-1].message, self.said[-1].answer)


def recall(
    answer: Answer,
    turns: Sequence[int],
    num_dialogues: int,
    seed: int,
    conditions: Mapping[str, Condition] = CONDITIONS,
    *,
    after_plain_answers: bool = False,
) -> dict[str, Any]:
    """Count the dialogues whose last answer follows the instruction, with 95 % confidence
    intervals, by condition, length and kind of instruction.

    Args:
        turns: lengths of dialogues, in turns.
        num_dialogues: number of dialogues of each condition, kind and length.
        conditions: parts from which the dialogues are drawn, by name.
        after_plain_answers: use scripted answers that ignore the instruction for all turns but the
            last. Otherwise the model sees its own earlier answers, which also show it the
            instruction.
    """
    counts: dict[str, Any] = {}
    for name, condition in conditions.items():
        rng = Random(f"{seed} {name}")
        counts[name] = {}
        for num_turns in turns:
            scripts = [
                Script(*draw_parts(rng, kind, num_turns, condition)) for kind in KINDS for _ in range(num_dialogues)
            ]
            counts[name][str(num_turns)] = _count_kept(answer, scripts, after_plain_answers)
    return counts


def _count_kept(answer: Answer, scripts: Sequence[Script], after_plain_answers: bool) -> dict[str, Any]:
    """Run dialogues of the same length; return the counts of each kind of instruction."""
    num_turns = len(scripts[0].plain)
    for turn in range(num_turns):
        if after_plain_answers and turn < num_turns - 1:
            texts: Sequence[str] = [script.plain[turn].answer for script in scripts]
        else:
            texts = answer([script.prompt for script in scripts])
        for script, text in zip(scripts, texts, strict=True):
            script.add_answer(text)
    kept = {kind: [script.is_kept for script in scripts if script.instruction.kind == kind] for kind in KINDS}
    return {name: _counted(of_kind) for name, of_kind in kept.items()} | {
        "all": _counted([script.is_kept for script in scripts])
    }


def _counted(kept: Sequence[bool]) -> dict[str, Any]:
    share = Share(sum(kept), len(kept))
    return {"kept": share.count, "total": share.total, "interval_95": [round(end, 4) for end in share.interval]}


def greedy_answers(model: CausalModel, tokenizer: Tokenizer) -> Answer:
    """Return a function that answers prompts by greedy decoding without a cache, with a model in
    evaluation mode.
    """
    assert not model.training
    prompts_tokenizer, end_id = prompt_tokenizer(tokenizer), model.config.eos_id

    def answer(prompts: Sequence[str]) -> list[str]:
        rows = encode_lines(prompts_tokenizer, prompts)
        return [decode_ids(tokenizer, ids) for ids in continue_greedily(model, rows, [end_id], MAX_ANSWER_TOKENS)]

    return answer


def recall_report(checkpoint: Path, turns: Sequence[int], num_dialogues: int, seed: int) -> dict[str, Any]:
    """Return the counts of a checkpoint. Raises `UsageError` if it is not a chat model."""
    model, tokenizer = load_model(checkpoint)
    if not isinstance(model, CausalModel):
        raise UsageError(f"{checkpoint} must be a chat model, but its architecture is {architecture_of(model.config)}")
    with one_thread():
        counts = recall(greedy_answers(model, tokenizer), turns, num_dialogues, seed)
    return {"seed": seed, "checkpoint": load_metadata(checkpoint / WEIGHTS), "turns": counts}
