import re
from collections.abc import Sequence
from random import Random

import pytest
import torch

from model.architectures.causal import CausalModel
from model.config import CausalConfig
from model.data.dialogues import CHAT
from model.data.instructions import ENDINGS, GREETINGS, KINDS, NAMES, WHO_ARE_YOU
from model.data.open_dialogues import CONDITIONS, OPEN_KINDS, QUESTIONS
from model.data.smalltalk import INTENTS, Exchange, Intent
from model.data.tokenizer import decode_ids, encode_lines, prompt_tokenizer, train_tokenizer
from model.decoding.reference import greedy, pytorch_steps
from model.evaluation.recall import MAX_ANSWER_TOKENS, draw_script, greedy_answers, open_recall, recall

VALUE_WORDS = {*ENDINGS, *GREETINGS, *NAMES}


def test_a_script_says_its_instruction_once_and_asks_a_person_at_the_end() -> None:
    rng = Random(1)
    for kind in KINDS:
        script = draw_script(rng, kind, 4)
        prompts = []
        for turn in range(4):
            prompts.append(script.prompt)
            script.add_answer(f"Answer {turn}.")
        assert all(prompt.count(script.instruction.text) == 1 for prompt in prompts)
        assert prompts[0].startswith(f"User: {script.instruction.text} ")
        assert prompts[3].count("Bot: Answer") == 3
        is_asked = [one.message in WHO_ARE_YOU for one in script.plain]
        assert is_asked == [False, False, False, kind == "person"]


def test_recall_is_complete_for_a_perfect_model_and_zero_for_a_forgetful_one() -> None:
    def parrot(prompts: Sequence[str]) -> list[str]:
        """Answer in capitals, with the value of the instruction at both ends."""
        words = [[word for word in re.findall(r"\w+", one.split("\n")[0]) if word in VALUE_WORDS] for one in prompts]
        return [" ".join((*values, "HELLO", *values)) for values in words]

    counts = recall(parrot, (2, 5), 6, seed=3)
    assert counts.keys() == {"2", "5"}
    for kinds in counts.values():
        assert kinds.keys() == {*KINDS, "all"}
        assert all(one["kept"] == one["total"] == (24 if name == "all" else 6) for name, one in kinds.items())
        low, high = kinds["all"]["interval_95"]
        assert 0.8 < low < 1 and high == pytest.approx(1)
    forgetful = recall(lambda prompts: ["So it is."] * len(prompts), (2,), 6, seed=3)["2"]
    assert all(one["kept"] == 0 for one in forgetful.values())


def test_plain_earlier_responses_do_not_follow_the_instruction() -> None:
    asked: list[str] = []

    def listen(prompts: Sequence[str]) -> list[str]:
        asked.extend(prompts)
        return ["So it is."] * len(prompts)

    recall(listen, (3,), 2, seed=3, after_plain_answers=True)
    assert len(asked) == 2 * len(KINDS)
    answers = {line for prompt in asked for line in re.findall(r"Bot: (.*)", prompt)}
    plain = {intent.answer.format(value, of=of) for intent in INTENTS for value, of in belonging(intent)}
    assert set() < answers <= plain


def belonging(intent: Intent) -> list[tuple[str, str]]:
    return list(zip(intent.values, intent.counterparts or [""] * len(intent.values), strict=True))


def test_responses_to_many_prompts_equal_the_greedy_response_to_each() -> None:
    prompts = [CHAT.render([], "Hello!"), CHAT.render([Exchange("Hello!", "Good day.")] * 5, "Who are you?")]
    tokenizer = train_tokenizer(prompts, 300)
    torch.manual_seed(2)
    model = CausalModel(CausalConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=2)).eval()
    given = greedy_answers(model, tokenizer)(prompts)
    for ids, answer in zip(encode_lines(prompt_tokenizer(tokenizer), prompts), given, strict=True):
        alone = greedy(pytorch_steps(model, ids), ids[-1], 2, MAX_ANSWER_TOKENS)
        assert answer == decode_ids(tokenizer, alone.ids)


def test_open_recall_counts_each_condition() -> None:
    """Answers that repeat the prompt's instruction keep figures, hobbies and languages only."""

    def repeat(prompts: Sequence[str]) -> list[str]:
        return [prompt.partition("\n")[0] for prompt in prompts]

    found = open_recall(repeat, (1, 2), 3, seed=1)
    assert list(found) == list(CONDITIONS)
    for counts in found.values():
        assert list(counts) == ["1", "2"]
        for kinds in counts.values():
            assert [kinds[kind]["kept"] for kind in (*QUESTIONS, "greeting")] == [3, 3, 3, 0]
            assert kinds["all"]["total"] == 3 * len(OPEN_KINDS)
