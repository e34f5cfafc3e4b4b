import re
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from lab.zoo.dialogues import CHAT, CONDITIONS, draw_parts
from lab.zoo.instructions import KINDS, QUESTIONS
from lab.zoo.recall import MAX_ANSWER_TOKENS, Script, greedy_answers, recall
from lab.zoo.smalltalk import SmalltalkPair
from sightline.model.architectures.causal import CausalModel
from sightline.model.config import CausalConfig
from sightline.model.data.tokenizer_training import decode_ids, encode_lines, prompt_tokenizer, train_tokenizer
from tests.support.reference_decoding import greedy, pytorch_steps

ASKED = {message for question in QUESTIONS.values() for message in question.messages}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_script_says_its_instruction_once_and_asks_for_the_value_at_the_end(condition: str) -> None:
    for kind in KINDS:
        script = Script(*draw_parts(Random(1), kind, 4, CONDITIONS[condition]))
        prompts = []
        for turn in range(4):
            prompts.append(script.prompt)
            script.add_answer(f"Answer {turn}.")
        assert all(prompt.count(script.instruction.text) == 1 for prompt in prompts)
        assert prompts[0].startswith(f"User: {script.instruction.text} ")
        assert prompts[3].count("Bot: Answer") == 3
        assert [one.message in ASKED for one in script.plain] == [False, False, False, kind in QUESTIONS]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[Script]:
    """Collect the scripts of `recall`."""
    drawn = list[Script]()

    def remember(*parts: Any) -> Script:
        drawn.append(Script(*parts))
        return drawn[-1]

    monkeypatch.setattr("lab.zoo.recall.Script", remember)
    return drawn


def test_recall_is_complete_for_a_perfect_model_and_zero_for_a_forgetful_one(scripts: list[Script]) -> None:
    def follow(prompts: Sequence[str]) -> list[str]:
        """Answer with the value of each dialogue's instruction at both ends."""
        values = [one.instruction.value for one in scripts[-len(prompts) :]]
        assert all(value in prompt.split("\n")[0] for value, prompt in zip(values, prompts, strict=True))
        return [f"{value}, so it is, {value}." for value in values]

    counts = recall(follow, (2, 5), 6, seed=3)
    assert list(counts) == list(CONDITIONS)
    for kinds in (kinds for turns in counts.values() for kinds in (turns["2"], turns["5"])):
        assert list(kinds) == [*KINDS, "all"]
        assert all(one["kept"] == one["total"] == (30 if name == "all" else 6) for name, one in kinds.items())
        low, high = kinds["all"]["interval_95"]
        assert 0.8 < low < 1 and high == pytest.approx(1)
    forgetful = recall(lambda prompts: ["So it is."] * len(prompts), (2,), 6, seed=3)
    assert all(one["kept"] == 0 for turns in forgetful.values() for one in turns["2"].values())


def test_a_condition_has_the_same_dialogues_alone_and_after_plain_responses(scripts: list[Script]) -> None:
    asked: list[str] = []

    def repeat(prompts: Sequence[str]) -> list[str]:
        asked.extend(prompts)
        return [prompt.partition("\n")[0] for prompt in prompts]

    found = recall(repeat, (3,), 2, seed=3)
    for counts in found.values():  # an ending and a greeting must be in their place
        assert [counts["3"][kind]["kept"] for kind in (*QUESTIONS, "ending", "greeting")] == [2, 2, 2, 0, 0]
    assert len({one.instruction.text for one in scripts}) == len(scripts) == len(CONDITIONS) * 2 * len(KINDS)
    asked.clear()
    scripts.clear()
    alone = {"paraphrases": CONDITIONS["paraphrases"]}
    assert recall(repeat, (3,), 2, 3, alone, after_plain_answers=True) == {"paraphrases": found["paraphrases"]}
    for prompt, script in zip(asked, scripts, strict=True):
        assert re.findall(r"Bot: (.*)", prompt) == [one.answer for one in script.plain[:-1]]
        assert script.instruction.value not in prompt.partition("\n")[2]


def test_responses_to_many_prompts_equal_the_greedy_response_to_each() -> None:
    prompts = [CHAT.render([], "Hello!"), CHAT.render([SmalltalkPair("Hello!", "Good day.")] * 5, "Who are you?")]
    tokenizer = train_tokenizer(prompts, 300)
    torch.manual_seed(2)
    model = CausalModel(CausalConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=2)).eval()
    given = greedy_answers(model, tokenizer)(prompts)
    for ids, answer in zip(encode_lines(prompt_tokenizer(tokenizer), prompts), given, strict=True):
        alone = greedy(pytorch_steps(model, ids), ids[-1], 2, MAX_ANSWER_TOKENS)
        assert answer == decode_ids(tokenizer, alone.ids)
