import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.factory import build_model
from sightline.model.config import CausalConfig
from sightline.model.data.chat_template import CHAT_TOKENS, IM_END, dialogue_encoder
from sightline.model.data.encoding import encode, encode_language
from sightline.model.data.records import DialogueMessage, DialogueRecord, Record, TextRecord
from sightline.model.data.tokenizer_training import decode_ids, special_id, train_tokenizer
from sightline.model.evaluation import language
from sightline.model.evaluation.language import (
    answer_dialogues,
    evaluate_language,
    likelihoods,
    perplexity,
)
from tests.model.pretrained_folders import LINES, TEMPLATE, begin, write_decoder
from tests.support.reference_decoding import greedy, pytorch_steps

QUESTIONS = ("How are you?", "Where is the dog?", "And the cat?")


@pytest.fixture(scope="module")
def tokenizer(sentences: list[str]) -> Tokenizer:
    return train_tokenizer(sentences[:100], 400, CHAT_TOKENS)


@pytest.fixture
def model(tokenizer: Tokenizer) -> CausalModel:
    torch.manual_seed(1)
    config = CausalConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=1, max_positions=96)
    return CausalModel(config).eval()


def dialogue(*contents: str) -> DialogueRecord:
    return DialogueRecord(
        tuple(DialogueMessage("assistant" if index % 2 else "user", text) for index, text in enumerate(contents))
    )


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[DialogueMessage]) -> list[int]:
    return dialogue_encoder(None, tokenizer).prompt(DialogueRecord(tuple(messages)))


def greedy_answer(
    model: CausalModel, tokenizer: Tokenizer, messages: Sequence[DialogueMessage], max_new_tokens: int
) -> str:
    prompt, end_ids = prompt_ids(tokenizer, messages), (special_id(tokenizer, IM_END), 2)
    ids = greedy(pytorch_steps(model, prompt), prompt[-1], end_ids, max_new_tokens).ids
    return decode_ids(tokenizer, ids)


def test_perplexity_is_that_of_a_loop_over_tokens(model: CausalModel, tokenizer: Tokenizer) -> None:
    records: list[Record] = [TextRecord("A man sleeps."), dialogue("How are you?", "Fine.")]
    costs = []
    for ids, is_counted in encode(tokenizer, records):
        log_probs = model(torch.tensor([list(ids)]))[0].double().log_softmax(-1)
        costs += [-log_probs[i - 1, ids[i]].item() for i in range(1, len(ids)) if is_counted[i]]
    found = evaluate_language(model, tokenizer, records).metrics["perplexity"]
    assert found == pytest.approx(math.exp(sum(costs) / len(costs)), rel=1e-5)


def test_a_long_text_is_read_in_windows(model: CausalModel, tokenizer: Tokenizer) -> None:
    text = "Two girls are playing with a dog. " * 20
    length = len(encode(tokenizer, [TextRecord(text)])[0][0])
    assert length > 2 * model.config.max_positions
    windows = encode(tokenizer, [TextRecord(text)], max_length_tokens=model.config.max_positions)
    assert likelihoods(model, windows)[1].sum() == length - 1
    assert list(evaluate_language(model, tokenizer, [TextRecord(text)]).metrics) == ["perplexity"]


def test_an_extreme_perplexity_is_infinite() -> None:
    assert perplexity(1e6, 1) == math.inf
    assert math.isnan(perplexity(0.0, 0))
    assert perplexity(2.0, 2) == pytest.approx(math.e)


def test_replies_are_those_of_greedy_decoding(tokenizer: Tokenizer) -> None:
    torch.manual_seed(2)  # the replies differ, and are not only whitespace
    config = CausalConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=1, max_positions=96)
    model = CausalModel(config).eval()
    records = [dialogue(question, "Fine.") for question in QUESTIONS]
    limit = len(encode(tokenizer, records[:1])[0][0]) - len(prompt_ids(tokenizer, records[0].messages[:1]))
    answers = answer_dialogues(model, tokenizer, records)
    assert [one.message for one in answers] == list(QUESTIONS)
    assert [one.expected for one in answers] == ["Fine."] * 3
    assert [one.given for one in answers] == [
        greedy_answer(model, tokenizer, [DialogueMessage("user", question)], limit) for question in QUESTIONS
    ]
    assert len({one.given for one in answers}) == 2 and not any(one.is_exact for one in answers)


def test_the_last_reply_is_generated_after_all_earlier_messages(
    model: CausalModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[list[int]]()

    def repeat(model: CausalModel, prompts: Sequence[list[int]], end_ids: object, limit: int) -> list[list[int]]:
        read.extend(prompts)
        return [tokenizer.encode("Fine.", add_special_tokens=False).ids for _ in prompts]

    monkeypatch.setattr(language, "continue_greedily", repeat)
    record = dialogue("How are you?", "Well.", "And the dog?", "Fine.", "Good.")
    (answer,) = answer_dialogues(model, tokenizer, [TextRecord("x"), record])
    assert answer.is_exact
    assert read == [prompt_ids(tokenizer, record.messages[:3])]
    metrics = evaluate_language(model, tokenizer, [record, dialogue("x", "y")]).metrics
    assert metrics["exact answers"] == 50


@pytest.mark.parametrize("after_end", ["\n", "", "\n\n", "</s>\n"])
@pytest.mark.parametrize("eos_id", [2, 4])
def test_text_after_the_end_token_is_no_part_of_a_reply(
    after_end: str, eos_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template ends a reply with token 4; the configuration may have another end token."""
    write_decoder(
        tmp_path / "from", template=TEMPLATE.replace(LINES, LINES.replace("<|im_end|>\n", f"<|im_end|>{after_end}"))
    )
    start, _ = begin(tmp_path / "from", "language-model")
    model: Any = build_model(dataclasses.replace(start.config, eos_id=eos_id)).eval()

    def perfect(model: object, prompts: Sequence[list[int]], end_ids: Collection[int], limit: int) -> list[list[int]]:
        ids = start.tokenizer.encode("Fine.").ids
        continued = [*ids, 4, *start.tokenizer.encode(f"{after_end}user").ids]
        length = next(number for number, id_ in enumerate(continued, 1) if id_ in end_ids)
        return [continued[: min(length, limit)] for _ in prompts]

    monkeypatch.setattr(language, "continue_greedily", perfect)
    records = [dialogue("How are you?", "Fine."), dialogue("x", "y")]
    assert evaluate_language(model, start.tokenizer, records).metrics["exact answers"] == 50


def test_predictions_belong_to_their_records_although_one_gives_several_examples(tmp_path: Path) -> None:
    write_decoder(tmp_path / "from", template=TEMPLATE)
    start, _ = begin(tmp_path / "from", "language-model")
    model: Any = build_model(start.config).eval()
    too_long = dialogue("x", "y", "c", "d")  # it is divided
    records: list[TextRecord | DialogueRecord] = [too_long, TextRecord("A man sleeps."), dialogue("x", "y")]
    parts = encode_language(start.tokenizer, records, model.config, model.config.max_positions)
    assert [len(examples) for examples in parts] == [2, 1, 1]
    rows = evaluate_language(model, start.tokenizer, records).predictions
    assert json.loads(json.dumps(rows)) == rows and rows[1]["text"] == "A man sleeps."
    assert rows[2]["messages"] == [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for examples, row in zip(parts, rows, strict=True):
        nats, counts = likelihoods(model, examples)
        assert row["perplexity"] == pytest.approx(perplexity(nats.sum().item(), int(counts.sum())), abs=1e-3)
    assert [("expected" in row) for row in rows] == [False, False, True]


def test_dialogues_that_do_not_fit_are_skipped(model: CausalModel, tokenizer: Tokenizer) -> None:
    long = dialogue("How are you? " * 50, "Fine.")
    assert answer_dialogues(model, tokenizer, [long, DialogueRecord((DialogueMessage("user", "x"),))]) == []
    assert len(answer_dialogues(model, tokenizer, [dialogue("x", "y")] * (language.MAX_ANSWERS + 5))) == 50


def test_samples_show_answers_and_continuations(model: CausalModel, tokenizer: Tokenizer) -> None:
    answer, text = evaluate_language(model, tokenizer, [TextRecord("A man sleeps."), dialogue("x", "y")]).samples
    assert answer.startswith("message: x | expected: y | output: ")
    assert text.startswith("A man sleeps. → A man sleeps.")
