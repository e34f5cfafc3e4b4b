"""Effects of all generation parameters over HTTP."""

import asyncio
import itertools
from typing import Any

import pytest

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import Running, Start, generate

pytestmark = pytest.mark.anyio


def ids_of(output: Any) -> list[int]:
    return [token["id"] for token in output["tokens"]]


async def test_several_sequences_of_an_input_are_ordered_by_index_and_rank(running: Running) -> None:
    response = await generate(running, ["a dog", "Hund"], num_beams=4, num_return_sequences=3, max_new_tokens=12)
    outputs = response["outputs"]
    assert [(output["index"], output["rank"]) for output in outputs] == [
        (i, rank) for i in range(2) for rank in range(3)
    ]
    assert len({tuple(ids_of(output)) for output in outputs[:3]}) == 3
    assert response["usage"]["output_tokens"] == sum(len(output["tokens"]) for output in outputs)
    assert all(output["seed"] is None for output in outputs)
    alone = await generate(running, "Hund", num_beams=4, max_new_tokens=12)
    assert alone["outputs"][0]["tokens"] == outputs[3]["tokens"]


async def test_more_beams_find_a_likelier_text(running: Running) -> None:
    options = {"min_new_tokens": 20, "max_new_tokens": 20}
    greedy = (await generate(running, "two men", **options))["outputs"][0]
    best = (await generate(running, "two men", num_beams=8, length_penalty=0.0, **options))["outputs"][0]
    assert best["score"] > greedy["score"]


async def test_the_length_penalty_divides_the_score_and_favours_longer_texts(running: Running) -> None:
    lengths = []
    for penalty in (0.0, 1.0, 3.0):
        output = (await generate(running, "a dog", num_beams=3, length_penalty=penalty))["outputs"][0]
        lengths.append(len(output["tokens"]))
        expected = sum(token["logprob"] for token in output["tokens"]) / lengths[-1] ** penalty
        assert output["score"] == pytest.approx(expected)
    assert lengths[0] < lengths[2]


async def test_early_stopping_controls_the_end_of_a_beam_search(running: Running) -> None:
    steps = []
    for early_stopping in (True, "never"):
        before = running.backend.runners[0].num_steps
        await generate(running, "a dog", num_beams=3, early_stopping=early_stopping, max_new_tokens=30)
        steps.append(running.backend.runners[0].num_steps - before)
    assert steps[0] < steps[1]


async def test_the_repetition_penalty_applies_to_earlier_tokens(running: Running) -> None:
    options = {"min_new_tokens": 30, "max_new_tokens": 30}
    plain = ids_of((await generate(running, "Hund", **options))["outputs"][0])
    penalised = ids_of((await generate(running, "Hund", repetition_penalty=10, **options))["outputs"][0])
    assert len(set(plain)) < len(plain)
    assert len(set(penalised)) == len(penalised)


@pytest.mark.parametrize("num_beams", [1, 3])
async def test_no_repeat_ngram_size_prevents_repeated_runs_of_tokens(running: Running, num_beams: int) -> None:
    options = {"num_beams": num_beams, "min_new_tokens": 40, "max_new_tokens": 40, "repetition_penalty": 0.5}
    repeating = ids_of((await generate(running, "Hund", **options))["outputs"][0])
    ids = ids_of((await generate(running, "Hund", no_repeat_ngram_size=2, **options))["outputs"][0])
    pairs = [list(itertools.pairwise(one)) for one in (repeating, ids)]
    assert len(set(pairs[0])) < len(pairs[0])
    assert len(set(pairs[1])) == len(pairs[1])


@pytest.mark.parametrize("parameters", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}])
async def test_suppressed_tokens_are_never_generated(running: Running, parameters: dict[str, Any]) -> None:
    plain = ids_of((await generate(running, "a dog", min_new_tokens=8, **parameters))["outputs"][0])
    options = {"min_new_tokens": 8, "suppress_tokens": plain, **parameters}
    assert not set(plain) & set(ids_of((await generate(running, "a dog", **options))["outputs"][0]))


@pytest.mark.parametrize("parameters", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}])
async def test_a_bias_prefers_or_avoids_a_token(running: Running, parameters: dict[str, Any]) -> None:
    options = {"min_new_tokens": 8, "max_new_tokens": 8, **parameters}
    plain = ids_of((await generate(running, "a dog", **options))["outputs"][0])
    avoided = await generate(running, "a dog", logit_bias={str(one): -100 for one in plain}, **options)
    assert not set(plain) & set(ids_of(avoided["outputs"][0]))
    preferred = await generate(running, "a dog", logit_bias={"7": 100}, **options)
    assert ids_of(preferred["outputs"][0]) == [7] * 8
    assert all(token["logprob"] <= 0 for token in preferred["outputs"][0]["tokens"])  # of the model


@pytest.mark.parametrize("parameters", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}])
async def test_penalties_of_generated_tokens_avoid_or_prefer_them(running: Running, parameters: dict[str, Any]) -> None:
    options = {"min_new_tokens": 40, "max_new_tokens": 40, **parameters}

    async def num_different(**penalties: float) -> int:
        (output,) = (await generate(running, "a dog", **penalties, **options))["outputs"]
        assert all(token["logprob"] <= 0 for token in output["tokens"])  # of the model
        return len(set(ids_of(output)))

    plain = await num_different()
    for name in ("presence_penalty", "frequency_penalty"):
        assert await num_different(**{name: -2.0}) < plain < await num_different(**{name: 2.0})


async def test_the_end_token_is_generated_if_every_token_is_suppressed(
    running: Running, tokenizer: TextTokenizer
) -> None:
    output = (await generate(running, "a dog", suppress_tokens=list(range(len(tokenizer)))))["outputs"][0]
    assert [token["text"] for token in output["tokens"]] == ["</s>"]


@pytest.mark.parametrize("parameters", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}])
async def test_a_prefix_starts_the_text_and_is_not_in_the_tokens(
    running: Running, tokenizer: TextTokenizer, parameters: dict[str, Any]
) -> None:
    response = await generate(running, "x", target_prefix="a dog", max_new_tokens=6, **parameters)
    for output in response["outputs"]:
        assert output["text"] == "a dog" + b"".join(map(tokenizer.bytes_of, ids_of(output))).decode("utf-8", "replace")
        assert len(output["tokens"]) <= 6
    assert response["usage"]["output_tokens"] == sum(len(output["tokens"]) for output in response["outputs"])


async def test_a_text_continues_a_prefix_as_if_the_model_had_generated_it(
    running: Running, tokenizer: TextTokenizer
) -> None:
    letters = {tokenizer.encode(letter, add_special_tokens=False)[1] for letter in "qrstvwxyz"}
    options = {"suppress_tokens": sorted(set(range(len(tokenizer))) - letters)}
    whole = (await generate(running, "a dog", target_prefix="x", max_new_tokens=9, **options))["outputs"][0]
    assert len(whole["text"]) == 10
    rest = (await generate(running, "a dog", target_prefix=whole["text"][:5], max_new_tokens=5, **options))["outputs"][
        0
    ]
    assert rest["text"] == whole["text"]
    assert ids_of(rest) == ids_of(whole)[4:]
    assert rest["score"] == pytest.approx(sum(token["logprob"] for token in whole["tokens"][4:]))


async def test_each_input_has_its_own_prefix_or_all_have_the_same(running: Running) -> None:
    each = (await generate(running, ["x", "x"], target_prefix=["a dog", "Hund"], max_new_tokens=3))["outputs"]
    assert [output["text"].startswith(prefix) for output, prefix in zip(each, ("a dog", "Hund"), strict=True)]
    same = (await generate(running, ["x", "y"], target_prefix="a dog", max_new_tokens=3))["outputs"]
    assert all(output["text"].startswith("a dog") for output in same)
    assert same[0]["tokens"] == each[0]["tokens"]


async def test_a_prefix_may_leave_space_for_only_one_token(running: Running, tokenizer: TextTokenizer) -> None:
    size = len(tokenizer.encode("x" * 62, add_special_tokens=False))
    assert size == 63  # of 64: a space is put before it
    output = (await generate(running, "x", target_prefix="x" * 62))["outputs"][0]
    assert (len(output["tokens"]), output["finish_reason"] in ("eos", "length")) == (1, True)


async def test_a_stop_string_is_searched_only_after_the_prefix(running: Running) -> None:
    options = {"target_prefix": "a dog", "min_new_tokens": 12, "max_new_tokens": 12}
    output = (await generate(running, "two men", stop="a dog", **options))["outputs"][0]
    assert (output["text"][:5], output["finish_reason"]) == ("a dog", "length")
    stop = output["text"][8:10]
    stopped = (await generate(running, "two men", stop=stop, **options))["outputs"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == output["text"][: output["text"].index(stop, 5)]


async def test_alternatives_of_each_token_are_sorted_by_probability(running: Running) -> None:
    for token in (await generate(running, "a dog", top_logprobs=5))["outputs"][0]["tokens"]:
        logprobs = [one["logprob"] for one in token["alternatives"]]
        assert (len(logprobs), logprobs) == (5, sorted(logprobs, reverse=True))
        assert token["alternatives"][0] == {name: token[name] for name in ("id", "text", "logprob")}  # greedy takes it
    sampled = await generate(running, "a dog", top_logprobs=1, do_sample=True, temperature=10.0, seed=1)
    assert any(token["alternatives"][0]["id"] != token["id"] for token in sampled["outputs"][0]["tokens"])
    beams = await generate(running, "a dog", top_logprobs=2, num_beams=2)
    assert all(len(token["alternatives"]) == 2 for token in beams["outputs"][0]["tokens"])
    assert "alternatives" not in (await generate(running, "a dog"))["outputs"][0]["tokens"][0]


async def test_a_call_may_have_as_many_beams_as_the_model_has_rows(start: Start) -> None:
    async with start(max_rows=4) as running:
        outputs = (await generate(running, ["x"] * 32, num_beams=4, max_new_tokens=4))["outputs"]
        assert len(outputs) == 32  # each waits for its rows
        assert all(output["tokens"] == outputs[0]["tokens"] for output in outputs)


async def test_beams_with_all_parameters_share_one_batch(running: Running) -> None:
    calls: list[dict[str, Any]] = [
        {"num_beams": 3, "num_return_sequences": 3, "repetition_penalty": 1.3},
        {"do_sample": True, "seed": 4, "no_repeat_ngram_size": 1},
        {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True, "target_prefix": "a"},
        {"top_logprobs": 3, "suppress_tokens": [5, 6]},
    ]
    together = await asyncio.gather(*(generate(running, "two men", **parameters) for parameters in calls))
    alone = [await generate(running, "two men", **parameters) for parameters in calls]
    assert [response["outputs"] for response in together] == [response["outputs"] for response in alone]


async def test_null_equals_an_absent_field_if_the_default_is_none(running: Running) -> None:
    nothing = await generate(running, "a dog", seed=None, stop=None, target_prefix=None)
    assert nothing["outputs"] == (await generate(running, "a dog"))["outputs"]
