"""Recall of instructions: scripted dialogues that a model answers, checked at their last turn.

Touvron et al. 2023 ("Llama 2", section A.3.5) ask for an attribute at turns 2 to 20 and let people judge; here a script
asks and checks. It knows a model as something that answers texts, so that a served one can be asked the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from model.architectures.causal import CausalModel
from model.data.batches import pad
from model.data.dialogues import CHAT, with_instruction
from model.data.instructions import KINDS, NOBODY, WHO_ARE_YOU, Instruction, Kind, draw_instruction
from model.data.smalltalk import Exchange, draw_exchange
from model.data.tokenizer import decode_ids, encode_lines, prompt_tokenizer
from model.evaluation.share import Share

TURNS = (2, 4, 6, 20)  # Llama 2's
SEED = 1_000_000  # no training's dialogues come from it
MAX_ANSWER_TOKENS = 32

Answer = Callable[[Sequence[str]], Sequence[str]]  # an answer to each prompt


@dataclass
class Script:
    """One dialogue: what the user will say, and what has been said."""

    instruction: Instruction
    plain: list[Exchange]  # what the user will say, and what one answers that has read no instruction
    said: list[Exchange]

    @property
    def message(self) -> str:
        """What the user says next. The instruction stands in the first message alone."""
        message = self.plain[len(self.said)].message
        return message if self.said else with_instruction(self.instruction, message)

    @property
    def prompt(self) -> str:
        """What the next answer follows."""
        return CHAT.render(self.said, self.message)

    def hear(self, answer: str) -> None:
        self.said.append(Exchange(self.message, answer))

    @property
    def is_kept(self) -> bool:
        """Whether the last answer keeps the instruction."""
        return self.instruction.is_kept(self.plain[-1].message, self.said[-1].answer)


def draw_script(rng: Random, kind: Kind, num_turns: int) -> Script:
    """Small talk; where there is a person to act as, the last message asks who it is, and none before does."""
    instruction = draw_instruction(rng, kind)
    plain = [draw_exchange(rng) for _ in range(num_turns)]
    if kind == "person":
        plain[-1] = Exchange(rng.choice(WHO_ARE_YOU), NOBODY)
    return Script(instruction, plain, [])


def recall(
    answer: Answer, turns: Sequence[int], num_dialogues: int, seed: int, *, after_plain_answers: bool = False
) -> dict[str, Any]:
    """How many dialogues of each length and kind keep the instruction at their last turn, with 95 % intervals.

    Args:
        answer: the model.
        turns: lengths of dialogues.
        num_dialogues: of each kind and length.
        seed: the same gives the same messages.
        after_plain_answers: whether all answers before the last are given, from one that has read no instruction, so
            that the instruction alone says what to do; elsewhere the model's own say it too.
    """
    rng = Random(seed)  # noqa: S311 - dialogues, not secrets
    counts: dict[str, Any] = {}
    for num_turns in turns:
        scripts = [draw_script(rng, kind, num_turns) for kind in KINDS for _ in range(num_dialogues)]
        for turn in range(num_turns):
            if after_plain_answers and turn < num_turns - 1:
                texts: Sequence[str] = [script.plain[turn].answer for script in scripts]
            else:
                texts = answer([script.prompt for script in scripts])
            for script, text in zip(scripts, texts, strict=True):
                script.hear(text)
        kept = {kind: [one.is_kept for one in scripts if one.instruction.kind == kind] for kind in KINDS}
        counts[str(num_turns)] = {name: _counted(of_kind) for name, of_kind in kept.items()} | {
            "all": _counted([one.is_kept for one in scripts])
        }
    return counts


def _counted(kept: Sequence[bool]) -> dict[str, Any]:
    share = Share(sum(kept), len(kept))
    return {"kept": share.count, "total": share.total, "interval_95": [round(end, 4) for end in share.interval]}


def greedy_answers(model: CausalModel, tokenizer: Tokenizer) -> Answer:
    """The answers of a PyTorch model in evaluation mode, which reads everything anew for each token."""
    assert not model.training
    prompts_tokenizer, end_id = prompt_tokenizer(tokenizer), model.config.eos_id

    @torch.inference_mode()
    def answer(prompts: Sequence[str]) -> list[str]:
        rows = encode_lines(prompts_tokenizer, prompts)
        num_read = [len(row) for row in rows]
        still_open = list(range(len(rows)))
        for _ in range(MAX_ANSWER_TOKENS):
            features, _ = model.read(pad([rows[row] for row in still_open], model.config.pad_id))  # (B, T, M)
            last = torch.tensor([len(rows[row]) - 1 for row in still_open])
            chosen = model.logits(features[torch.arange(len(still_open)), last]).argmax(dim=-1)  # (B,)
            for row, token_id in zip(still_open, chosen.tolist(), strict=True):
                rows[row].append(token_id)
            still_open = [row for row in still_open if rows[row][-1] != end_id]
            if not still_open:
                break
        return [decode_ids(tokenizer, row[first:]) for row, first in zip(rows, num_read, strict=True)]

    return answer
