"""Maps of generated texts equal those of /v1/attention, within the limit of one response."""

import asyncio
from typing import Any

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import MakeBackend, Running, Start, until, with_heads

pytestmark = pytest.mark.anyio


async def generate(running: Running, inputs: Any, **parameters: Any) -> Any:
    return (await running.result("/v1/generate", {"inputs": inputs, "parameters": parameters}))["outputs"]


@pytest.mark.parametrize(
    "parameters", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 2}, {"target_prefix": "Hund"}, {"stop": "a"}]
)
async def test_maps_equal_those_of_attention(running: Running, parameters: dict[str, Any]) -> None:
    for requested in ({}, {"kinds": ["decoder", "cross"], "layers": [1], "heads": [1, 0], "reduce": "max"}):
        options = {**parameters, "max_new_tokens": 7}
        (output,) = await generate(running, "a dog", return_attention=requested or True, **options)
        response = (await running.post("/v1/attention", {"inputs": "a dog", "parameters": options, **requested})).json()
        (explained,) = response["outputs"]
        assert output["attention"] == {name: explained[name] for name in output["attention"]}
        assert set(output["attention"]) == {
            "source_tokens",
            "source_offsets",
            "target_tokens",
            "target_offsets",
            "decoder_input_tokens",
            "maps",
        }
        (plain,) = await generate(running, "a dog", **options)
        assert output | {"attention": None} == plain


async def test_every_output_of_a_beam_search_has_maps_of_its_own_tokens(running: Running) -> None:
    outputs = await generate(
        running, ["a dog", "x"], num_beams=3, num_return_sequences=3, target_prefix="Hund", return_attention=True
    )
    assert len(outputs) == 6
    for output in outputs:
        attention = output["attention"]
        generated = [token["text"] for token in output["tokens"]]
        assert attention["target_tokens"] == [" H", "un", "d", *generated]
        assert attention["decoder_input_tokens"] == ["<s>", *attention["target_tokens"][:-1]]
        sizes = {one["kind"]: (one["rows"], one["columns"]) for one in attention["maps"]}
        rows, columns = len(attention["target_tokens"]), len(attention["source_tokens"])
        assert sizes == {"encoder": (columns, columns), "cross": (rows, columns), "decoder": (rows, rows)}
        for one in attention["maps"]:
            np.testing.assert_allclose(np.reshape(one["data"], one["shape"]).sum(axis=-1), 1, rtol=1e-5)


async def test_maps_are_returned_only_on_request(running: Running) -> None:
    assert (await generate(running, "x", return_attention=False))[0]["attention"] is None
    assert (await generate(running, "x"))[0]["attention"] is None


async def work_before_rejection(running: Running, inputs: Any, **parameters: Any) -> int:
    """Return the work done before the response was rejected for its size."""
    response = await running.post("/v1/generate", {"inputs": inputs, "parameters": parameters})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "response_too_large")
    return running.backend.runners[0].num_encodes


async def test_maps_of_known_excessive_size_are_rejected_before_they_are_computed(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    async with start(with_heads(make_backend(), 200)) as running:
        text = "x" * 38
        assert len(tokenizer.encode(text)) == 40  # so a map of the encoder has 2 * 200 * 40 * 40 = 640,000 numbers
        encoder = {"kinds": ["encoder"]}
        assert await work_before_rejection(running, [text, text], return_attention=encoder) == 0
        assert (
            await work_before_rejection(running, text, return_attention=encoder, num_beams=2, num_return_sequences=2)
            == 0
        )
        assert await work_before_rejection(running, text, return_attention={"kinds": ["cross"]}, min_new_tokens=63) == 0
        assert (
            await work_before_rejection(running, "x", return_attention={"kinds": ["decoder"]}, target_prefix="x" * 50)
            == 0
        )
        body = {"inputs": [text, text], "parameters": {"return_attention": encoder}}
        message = (await running.post("/v1/generate", body)).json()["error"]["message"]
        assert "Select fewer kinds, layers (about 1 of the 2 fit) or heads, or reduce the heads." in message
        assert len(await generate(running, text, return_attention=encoder)) == 1
        assert len(await generate(running, [text, text], return_attention={**encoder, "reduce": "mean"})) == 2


async def test_the_maps_of_all_outputs_are_counted_together(start: Start, make_backend: MakeBackend) -> None:
    """The size is not known in advance: each text alone would fit."""
    async with start(with_heads(make_backend(), 200)) as running:
        # A stop string could have ended each at its first token: its own 40 tokens are not certain.
        options = {"return_attention": {"kinds": ["cross"]}, "stop": "never comes", "min_new_tokens": 40}
        text = "x" * 38
        assert len(await generate(running, text, max_new_tokens=40, **options)) == 1
        assert await work_before_rejection(running, [text, text], max_new_tokens=40, **options) > 0
        await until(lambda: running.backend.num_busy == 0)


@pytest.mark.parametrize("parameters", [{}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}])
async def test_maps_that_grow_too_large_end_the_call_at_once(
    start: Start, make_backend: MakeBackend, parameters: dict[str, Any]
) -> None:
    """A row of a cross map has 2 * 200 * 40 = 16,000 numbers: 62 rows fit into a response."""
    # The stop string that never comes keeps the least number of rows at one.
    options = {"return_attention": {"kinds": ["cross"]}, "stop": "never comes", "min_new_tokens": 60, **parameters}
    async with start(with_heads(make_backend(), 200)) as running:
        (runner,) = running.backend.runners
        rows_a_step = 3 * parameters.get("num_return_sequences", 1)
        assert await work_before_rejection(running, ["x" * 38] * 3, max_new_tokens=60, **options) > 0
        # More if the engine begins with the first text before it has the others.
        assert 62 // rows_a_step + 1 <= runner.num_steps < 40
        await until(lambda: running.backend.num_busy == 0)
        assert len(await generate(running, "x" * 38, max_new_tokens=60, **parameters)) >= 1


async def test_calls_with_and_without_maps_share_one_batch(running: Running) -> None:
    calls: list[dict[str, Any]] = [{"return_attention": True, "num_beams": 2}, {}, {"return_attention": True}]
    together = await asyncio.gather(*(generate(running, "two men", **parameters) for parameters in calls))
    assert together == [await generate(running, "two men", **parameters) for parameters in calls]
