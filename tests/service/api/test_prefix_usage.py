"""Hits of the prefix cache in usage, metrics and the memory of a model."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.runtime.runner import BLOCK_TOKENS
from sightline.service.runtime.state_memory import prefix_block_bytes
from tests.service.conftest import FakeBackend, Running, Start
from tests.support.fake_runner import fake_manifest

pytestmark = pytest.mark.anyio
PROMPT = "a dog Hund x " * 30
SAMPLING = {"n": 3, "temperature": 2.0, "seed": 1}


@pytest.fixture
async def caching(start: Start, tokenizer: TextTokenizer) -> AsyncIterator[Running]:
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 400, "max_target_tokens": 400}
    manifests = fake_manifest("causal", decoder_start="source", **sizes), fake_manifest("translator", **sizes)
    async with start(FakeBackend(tokenizer, manifests, num_prefix_blocks=80), default_model="causal") as running:
        yield running


async def test_usage_reports_the_tokens_of_the_prompt_that_were_cached(caching: Running) -> None:
    first = await caching.result("/v1/generate", {"inputs": PROMPT})
    num_tokens = first["usage"]["input_tokens"]
    whole = (num_tokens - 2) // BLOCK_TOKENS * BLOCK_TOKENS
    assert whole > 0
    assert first["usage"]["cached_tokens"] == 0
    second = await caching.result("/v1/generate", {"inputs": [PROMPT, PROMPT]})
    assert second["usage"] | {"output_tokens": 0} == {
        "input_tokens": 2 * num_tokens,
        "output_tokens": 0,
        "cached_tokens": 2 * whole,
    }
    assert second["outputs"][1]["tokens"] == first["outputs"][0]["tokens"]
    scored = await caching.result("/v1/score", {"inputs": [PROMPT], "targets": ["x"]})
    assert scored["usage"]["cached_tokens"] == whole
    *_, end = await caching.events("/v1/generate", {"inputs": PROMPT, "stream": True})
    assert end["usage"] == {**first["usage"], "cached_tokens": whole}
    for options in ({}, SAMPLING):  # samples of one prompt count it once
        body = {"model": "causal", "prompt": PROMPT, **options}
        completion = await caching.result("/v1/completions", body)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *_, last = await caching.events("/v1/completions", streamed)
        assert last["usage"] == completion["usage"]
        assert completion["usage"]["prompt_tokens_details"] == {"cached_tokens": whole}
        assert completion["usage"]["prompt_tokens"] == num_tokens
    reply = await caching.result("/api/generate", {"model": "causal", "prompt": PROMPT, "stream": False})
    assert reply["prompt_eval_count"] == num_tokens  # as in Ollama, with the cached tokens


async def test_calls_of_other_keys_do_not_share_states_of_prompts(start: Start, tokenizer: TextTokenizer) -> None:
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 400, "max_target_tokens": 400}
    backend = FakeBackend(tokenizer, (fake_manifest("causal", decoder_start="source", **sizes),), num_prefix_blocks=80)
    async with start(backend, keys=Path("tests/data/keys.json")) as running:
        found = []
        for key in ("sl-alice", "sl-boss", "sl-alice", "sl-boss"):
            response = await running.post("/v1/generate", {"inputs": PROMPT}, **{"x-api-key": key})
            found.append(response.json()["usage"]["cached_tokens"])
        assert found[:2] == [0, 0] and found[2] == found[3] > 0


async def test_usage_of_a_model_with_an_encoder_has_no_cached_tokens(caching: Running) -> None:
    body = {"model": "translator", "inputs": "x"}
    assert set((await caching.result("/v1/generate", body))["usage"]) == {"input_tokens", "output_tokens"}
    *_, end = await caching.events("/v1/generate", {**body, "stream": True})
    assert set(end["usage"]) == {"input_tokens", "output_tokens"}
    completion = await caching.result("/v1/completions", {"model": "translator", "prompt": "x"})
    assert "prompt_tokens_details" not in completion["usage"]


async def test_metrics_count_looked_up_and_cached_tokens_and_memory(caching: Running) -> None:
    usage = [(await caching.result("/v1/generate", {"inputs": PROMPT}))["usage"] for _ in range(2)]
    await caching.result("/v1/encode", {"inputs": PROMPT})  # does not use the cache
    model = '{model_name="causal"}'
    num_queried = sum(one["input_tokens"] for one in usage)
    assert await caching.metric(f"sightline_prefix_cache_queries_total{model}") == num_queried
    assert await caching.metric(f"sightline_prefix_cache_hits_total{model}") == usage[1]["cached_tokens"] > 0
    block = prefix_block_bytes(caching.backend.manifests[0])
    num_blocks = usage[1]["input_tokens"] // BLOCK_TOKENS
    memory = (await caching.client.get("/v1/models/causal")).json()["memory"]
    assert (memory["max_prefix_cache_bytes"], memory["prefix_cache_bytes"]) == (80 * block, num_blocks * block)
    assert await caching.metric(f"sightline_model_prefix_cache_bytes{model}") == num_blocks * block
