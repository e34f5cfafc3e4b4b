"""The routes with a decoder-only model, which continues its input."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
from tokenizers import processors

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import FakeBackend, Running, Start, byte_level_tokenizer, generate
from tests.support.fake_runner import FakeRunner, fake_manifest

pytestmark = pytest.mark.anyio
LIMIT = 20


@pytest.fixture
async def prompted(start: Start, tokenizer: TextTokenizer) -> AsyncIterator[Running]:
    manifest = fake_manifest(
        vocabulary=len(tokenizer), max_source_tokens=LIMIT, max_target_tokens=LIMIT, decoder_start="source"
    )
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        yield running


async def test_generate_continues_its_input(prompted: Running, tokenizer: TextTokenizer) -> None:
    inputs = ["a", "a dog x", "Hund"]
    response = await generate(prompted, inputs)
    runner = FakeRunner(prompted.backend.manifests[0], 1)
    for text, output in zip(inputs, response["outputs"], strict=True):
        assert [token["id"] for token in output["tokens"]] == runner.expected(tokenizer.encode(text), LIMIT)


async def test_a_stream_forms_the_whole_text(prompted: Running) -> None:
    whole = (await generate(prompted, "a dog x"))["outputs"][0]
    events = await prompted.events("/v1/generate", {"inputs": "a dog x", "stream": True})
    assert "".join(event["text"] for event in events if "token" in event) == whole["text"]


async def test_columns_of_a_decoder_map_are_the_input_and_then_the_target(prompted: Running) -> None:
    (response,) = (await prompted.result("/v1/attention", {"inputs": "Hund x", "kinds": ["decoder"]}))["outputs"]
    assert response["decoder_input_tokens"] == [*response["source_tokens"], *response["target_tokens"][:-1]]
    (one,) = response["maps"]
    assert (one["rows"], one["columns"]) == (len(response["target_tokens"]), len(response["decoder_input_tokens"]))
    np.testing.assert_allclose(np.reshape(one["data"], one["shape"]).sum(axis=-1), 1, rtol=1e-5)


async def test_score_reads_the_target_after_the_input(prompted: Running) -> None:
    prefix = (await generate(prompted, "a dog", max_new_tokens=3))["outputs"][0]["text"]
    scored = (await prompted.result("/v1/score", {"inputs": ["a dog"], "targets": [prefix]}))["outputs"][0]
    assert scored["tokens"][-1]["text"] == "</s>"
    (again,) = (await generate(prompted, "a dog", target_prefix=prefix, max_new_tokens=1))["outputs"]
    assert again["text"].startswith(prefix)


async def test_input_and_output_share_the_limit(prompted: Running) -> None:
    body = {"inputs": "x" * 10, "parameters": {"max_new_tokens": LIMIT, "min_new_tokens": LIMIT}}
    response = await prompted.result("/v1/generate", body)
    input_tokens, output_tokens = response["usage"]["input_tokens"], response["usage"]["output_tokens"]
    assert input_tokens - 1 + output_tokens == LIMIT
    assert response["outputs"][0]["finish_reason"] == "length"


async def test_a_truncated_prompt_loses_only_its_end(start: Start) -> None:
    """A tokenizer without an end token leaves none to keep."""
    endless = byte_level_tokenizer()
    endless.post_processor = processors.ByteLevel()
    tokenizer = TextTokenizer(endless)
    manifest = fake_manifest(vocabulary=len(tokenizer), max_source_tokens=LIMIT, decoder_start="source")
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        text = "abcdefghij" * 5
        cut = await running.result("/v1/encode", {"inputs": text, "truncate": True, "pooling": "none"})
        fitting = await running.result("/v1/encode", {"inputs": text[:LIMIT], "pooling": "none"})
    assert cut["shapes"] == [[LIMIT, 4]]
    assert cut["embeddings"] == fitting["embeddings"]
