"""Embedding settings of the manifest are the defaults of every API; requests override them."""

from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.base.bundle import SentenceEmbedding
from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import FakeBackend, MakeBackend, Running, Start
from tests.support.fake_runner import HIDDEN

pytestmark = pytest.mark.anyio
TEXTS = ["a dog", "x"]
PROMPTS = {"query": "query: ", "passage": "passage: "}
Pooling = Literal["mean", "first", "last", "max"]
# A mean of n float32 values has a relative error of at most about n * 2 ** -24; inputs have at most
# 3 tokens, and the norm adds the errors of 4 products.
TOLERANCE = 16 * 2.0**-24


def backend_with(make_backend: MakeBackend, embedding: SentenceEmbedding) -> FakeBackend:
    backend = make_backend("plain", "trained")
    plain, trained = backend.manifests
    backend.manifests = (plain, trained.model_copy(update={"embedding": embedding}))
    return backend


def reference(tokenizer: TextTokenizer, pooling: str, *, normalize: bool) -> NDArray[np.float64]:
    """Return the vectors of TEXTS as sentence-transformers' Pooling and Normalize define them."""
    vectors = []
    for text in TEXTS:
        hidden = np.array(tokenizer.encode(text), np.float64)[:, None] * np.arange(1, HIDDEN + 1)
        pooled = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1], "max": hidden.max(0)}[pooling]
        vectors.append(pooled / np.linalg.norm(pooled) if normalize else pooled)
    return np.stack(vectors)


async def encode(running: Running, inputs: Any, **fields: Any) -> Any:
    return (await running.result("/v1/encode", {"inputs": inputs, **fields}))["embeddings"]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "first", "last", "max"])
async def test_every_api_uses_the_models_pooling(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer, pooling: Pooling, normalize: bool
) -> None:
    backend = backend_with(make_backend, SentenceEmbedding(pooling=pooling, normalize=normalize))
    async with start(backend, default_model="trained") as running:
        own, units = [reference(tokenizer, pooling, normalize=unit) for unit in (normalize, True)]
        np.testing.assert_allclose(await encode(running, TEXTS), own, rtol=TOLERANCE)
        openai = (await running.result("/v1/embeddings", {"input": TEXTS}))["data"]
        np.testing.assert_allclose([one["embedding"] for one in openai], units, rtol=TOLERANCE)
        np.testing.assert_allclose(await running.result("/embed", {"inputs": TEXTS}), units, rtol=TOLERANCE)
        raw = await running.result("/embed", {"inputs": TEXTS, "normalize": False})
        np.testing.assert_allclose(raw, reference(tokenizer, pooling, normalize=False), rtol=TOLERANCE)


async def test_a_request_overrides_the_models_pooling(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = backend_with(make_backend, SentenceEmbedding(pooling="first", normalize=True))
    async with start(backend, default_model="trained") as running:
        other = await encode(running, TEXTS, pooling="max", normalize=False)
        np.testing.assert_allclose(other, reference(tokenizer, "max", normalize=False), rtol=TOLERANCE)
        plain = await encode(running, TEXTS, model="plain")
        np.testing.assert_allclose(plain, reference(tokenizer, "mean", normalize=False), rtol=TOLERANCE)
        rows = await encode(running, "x", pooling="none")  # not normalized, unless requested
        np.testing.assert_array_equal(rows[0][:HIDDEN], tokenizer.encode("x")[0] * np.arange(1, HIDDEN + 1))


async def test_prompts_are_put_before_the_inputs(start: Start, make_backend: MakeBackend) -> None:
    embedding = SentenceEmbedding(pooling="mean", normalize=True, prompts=PROMPTS, default_prompt="passage")
    async with start(backend_with(make_backend, embedding), default_model="trained") as running:
        expected = {
            name: await encode(running, [prompt + "dog"], model="plain", normalize=True)
            for name, prompt in PROMPTS.items()
        }
        for name in (None, *PROMPTS):
            vectors = expected[name or "passage"]
            assert await encode(running, ["dog"], prompt_name=name) == vectors
            assert await running.result("/embed", {"inputs": ["dog"], "prompt_name": name}) == vectors
        openai = await running.result("/v1/embeddings", {"input": "dog"})
        assert [one["embedding"] for one in openai["data"]] == expected["passage"]


@pytest.mark.parametrize(
    ("matryoshka", "size", "allowed"),
    [
        (None, 2, "4, the dimensions of the model's vectors"),
        ((), 3, None),
        ((2, 4), 2, None),
        ((2, 4), 3, "4, the dimensions of the model's vectors, or 2"),
        ((), 5, "4, the dimensions of the model's vectors, or a number from 1 to 3"),
        ((), 4, None),
    ],
)
async def test_vectors_have_fewer_dimensions_if_the_model_was_trained_for_it(
    start: Start, make_backend: MakeBackend, matryoshka: tuple[int, ...] | None, size: int, allowed: str | None
) -> None:
    embedding = SentenceEmbedding(pooling="mean", normalize=False, matryoshka=matryoshka)
    backend = backend_with(make_backend, embedding)
    async with start(backend, default_model="trained") as running:
        answers = [
            await running.post(path, {**body, "dimensions": size})
            for path, body in (
                ("/v1/embeddings", {"input": TEXTS}),
                ("/embed", {"inputs": TEXTS}),
                ("/api/embed", {"model": "trained", "input": TEXTS}),
                ("/embed", {"inputs": TEXTS, "normalize": False}),
            )
        ]
        if allowed is not None:
            message = f"dimensions must be {allowed}, got {size}."
            assert all(message in answer.text.replace("\\", "") for answer in answers)
            return
        openai, tei, ollama, raw = [answer.json() for answer in answers]
    cut = reference(backend.tokenizer, "mean", normalize=False)[:, :size]
    np.testing.assert_allclose(raw, cut, rtol=TOLERANCE)
    for vectors in ([one["embedding"] for one in openai["data"]], tei, ollama["embeddings"]):
        np.testing.assert_allclose(vectors, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=TOLERANCE)


async def test_each_api_cuts_long_texts_by_default_as_its_own_servers_do(
    start: Start, make_backend: MakeBackend
) -> None:
    text = "a dog " * 60
    async with start(make_backend("fake")) as running:
        (expected,) = await encode(running, [text], truncate=True, normalize=True)
        for path, body, is_cut, truncate in (
            ("/v1/embeddings", {"input": text}, False, {"truncate": True}),
            ("/embed", {"inputs": text}, False, {"truncate": True}),
            ("/api/embed", {"model": "fake", "input": text}, True, {"truncate": False}),
        ):
            for fields, has_vector in (({}, is_cut), ({"truncate": None}, is_cut), (truncate, not is_cut)):
                response = await running.post(path, body | fields)
                assert response.is_success == has_vector, (path, fields)
                answer = response.json()
                if not has_vector:
                    assert "must have at most 64 tokens for this model, got 122; shorten or split it" in response.text
                    assert "or set truncate to true." in response.text
                elif path == "/v1/embeddings":
                    assert answer["data"][0]["embedding"] == expected
                else:
                    assert (answer if path == "/embed" else answer["embeddings"]) == [expected]


async def test_a_model_shows_its_settings(start: Start, make_backend: MakeBackend) -> None:
    embedding = SentenceEmbedding(pooling="first", normalize=True, prompts=PROMPTS, default_prompt="query")
    async with start(backend_with(make_backend, embedding), default_model="trained") as running:
        plain, trained = (await running.client.get("/v1/models")).json()["data"]
        assert (plain["sentence_similarity"], plain["embedding"]) == (False, None)
        assert trained["sentence_similarity"]
        assert trained["embedding"] == embedding.model_dump(exclude={"dense"})
