import asyncio
import math
import threading

import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.parameters import MAX_SEED
from tests.service.conftest import MakeBackend, Running, Start, generate, until
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio


async def test_the_response_has_the_generated_tokens_and_their_text(running: Running, tokenizer: TextTokenizer) -> None:
    response = await generate(running, "a dog", max_new_tokens=32)
    expected = running.backend.runners[0].expected(tokenizer.encode("a dog"), 32)
    output = response["outputs"][0]
    assert [token["id"] for token in output["tokens"]] == expected
    assert output["text"] == tokenizer.decode(expected)
    assert (output["index"], output["rank"], output["finish_reason"]) == (0, 0, "eos")
    assert output["tokens"][-1]["text"] == "</s>"
    assert output["score"] == pytest.approx(sum(token["logprob"] for token in output["tokens"]))
    assert output["seed"] is output["attention"] is None
    assert response["model"] == "fake"
    assert response["usage"] == {"input_tokens": 3, "output_tokens": len(expected)}
    assert set(response["timings_ms"]) == {"tokenize", "queue", "encode", "decode", "total"}
    assert all(value >= 0 for value in response["timings_ms"].values())


async def test_outputs_keep_the_order_of_the_inputs(running: Running) -> None:
    inputs = [f"sentence {index}" for index in range(32)]
    together = (await generate(running, inputs))["outputs"]
    assert [output["index"] for output in together] == list(range(32))
    for text, output in zip(inputs[:4], together, strict=False):
        alone = (await generate(running, text))["outputs"][0]
        assert [token["id"] for token in output["tokens"]] == [token["id"] for token in alone["tokens"]]


async def test_max_new_tokens_ends_with_the_reason_length(running: Running) -> None:
    output = (await generate(running, "a dog", min_new_tokens=5, max_new_tokens=5))["outputs"][0]
    assert (len(output["tokens"]), output["finish_reason"]) == (5, "length")


async def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_tokens(running: Running) -> None:
    whole = (await generate(running, "two men", min_new_tokens=12))["outputs"][0]
    stop = whole["text"][4:7]
    output = (await generate(running, "two men", min_new_tokens=12, stop=stop))["outputs"][0]
    assert output["finish_reason"] == "stop"
    assert output["text"] == whole["text"][: whole["text"].index(stop)]
    assert len(output["tokens"]) < len(whole["tokens"])


async def test_sampling_is_reproducible_from_the_seed_that_is_returned(running: Running) -> None:
    options = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 20}
    drawn = (await generate(running, ["x", "x"], **options))["outputs"]
    again = (await generate(running, ["x", "x"], seed=drawn[0]["seed"], **options))["outputs"]
    assert drawn == again
    assert drawn[1]["seed"] == (drawn[0]["seed"] + 1) % (MAX_SEED + 1)
    alone = (await generate(running, "x", seed=drawn[1]["seed"], **options))["outputs"][0]
    assert alone["tokens"] == drawn[1]["tokens"]
    assert drawn[0]["tokens"] != drawn[1]["tokens"]


async def test_seeds_wrap_around_after_the_largest(running: Running) -> None:
    """Regression: after the largest seed, the next input returned a seed that requests reject."""
    outputs = (await generate(running, ["x", "x"], do_sample=True, seed=MAX_SEED))["outputs"]
    assert [output["seed"] for output in outputs] == [MAX_SEED, 0]


async def test_the_default_model_is_the_configured_one_or_the_first_by_name(
    start: Start, make_backend: MakeBackend
) -> None:
    async with start(make_backend("b", "a")) as running:
        assert (await generate(running, "x"))["model"] == "a"
        response = await running.post("/v1/generate", {"inputs": "x", "model": "b"})
        assert response.json()["model"] == "b"
    async with start(make_backend("b", "a"), default_model="b") as running:
        assert (await generate(running, "x"))["model"] == "b"


async def test_a_failed_call_does_not_affect_others(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    poison = tokenizer.encode("~")[1]
    async with start(make_backend(faults=Faults(nan_id=poison))) as running:
        bodies = [{"inputs": "a dog"}, {"inputs": ["a dog", "~"]}, {"inputs": "Hund"}]
        responses = await asyncio.gather(*(running.post("/v1/generate", body) for body in bodies))
        assert [response.status_code for response in responses] == [200, 500, 200]
        await until(lambda: running.backend.num_busy == 0)


async def test_every_reservation_is_released_after_any_outcome(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend(faults=Faults(step_calls=frozenset({2})))) as running:
        for body in ({"inputs": "x"}, {"inputs": "x", "stream": True}, {"inputs": "x" * 70}, {"inputs": "ok"}):
            await running.post("/v1/generate", body)
        service = running.app.state.service
        admission = service.models["fake"].admission
        assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (0, 0, 0)


async def test_a_rejected_call_is_never_tokenised(start: Start, make_backend: MakeBackend) -> None:
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang)), max_rows=1, max_waiting_sequences=1) as running:
        first = asyncio.ensure_future(running.post("/v1/generate", {"inputs": "x"}))
        await until(lambda: running.backend.num_busy == 1)
        # Too long to be taken, which only tokenising would tell.
        response = await running.post("/v1/generate", {"inputs": ["x" * 70] * 3})
        assert response.json()["error"]["code"] == "overloaded"
        hang.set()
        assert (await first).status_code == 200


async def test_logprobs_are_natural_logarithms(running: Running) -> None:
    for token in (await generate(running, "a dog"))["outputs"][0]["tokens"]:
        assert 0 < math.exp(token["logprob"]) <= 1
