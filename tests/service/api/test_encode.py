import base64
from typing import Any

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.tasks.encode import pool
from tests.service.conftest import Running

pytestmark = pytest.mark.anyio
HIDDEN = np.array([[3.0, 4.0], [1.0, -2.0], [0.0, 0.0]], np.float32)


async def encode(running: Running, inputs: Any, **options: Any) -> Any:
    return await running.result("/v1/encode", {"inputs": inputs, **options})


def hidden_of(tokenizer: TextTokenizer, text: str) -> Any:
    """Return the output of FakeRunner's encoder."""
    return np.array(tokenizer.encode(text), np.float32)[:, None] * np.arange(1, 5, dtype=np.float32)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("mean", [4 / 3, 2 / 3]), ("max", [3, 4]), ("first", [3, 4]), ("last", [0, 0]), ("none", HIDDEN)],
)
def test_pooling_reduces_the_rows_to_one_vector(pooling: Any, expected: Any) -> None:
    np.testing.assert_allclose(pool(HIDDEN, pooling, normalize=False), expected, rtol=1e-6)


def test_normalising_gives_length_one_and_leaves_zeros() -> None:
    np.testing.assert_allclose(pool(HIDDEN, "first", normalize=True), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(pool(HIDDEN, "none", normalize=True), axis=1), [1, 1, 0], rtol=1e-6)


async def test_embeddings_are_pooled_over_real_tokens_in_the_order_of_the_inputs(
    running: Running, tokenizer: TextTokenizer
) -> None:
    texts = ["a dog", "Hund und a dog", "x"]
    response = await encode(running, texts)
    for text, embedding in zip(texts, response["embeddings"], strict=True):
        np.testing.assert_allclose(embedding, hidden_of(tokenizer, text).mean(axis=0), rtol=1e-6)
    assert response["dimensions"] == 4
    assert response["usage"] == {"input_tokens": sum(len(tokenizer.encode(text)) for text in texts), "output_tokens": 0}
    assert response["shapes"] is None


async def test_without_pooling_each_token_has_a_row_and_the_shape_is_returned(
    running: Running, tokenizer: TextTokenizer
) -> None:
    response = await encode(running, ["a dog", "x"], pooling="none")
    assert response["shapes"] == [[3, 4], [3, 4]]
    np.testing.assert_allclose(np.reshape(response["embeddings"][0], (3, 4)), hidden_of(tokenizer, "a dog"))


async def test_base64_is_little_endian_float32(running: Running) -> None:
    plain = await encode(running, "a dog")
    packed = await encode(running, "a dog", encoding="base64")
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(packed["embeddings"][0]), "<f4"), np.array(plain["embeddings"][0], np.float32)
    )


async def test_long_inputs_are_truncated_on_request(running: Running) -> None:
    cut = await encode(running, "x" * 5000, truncate=True, pooling="none")
    assert cut["shapes"] == [[64, 4]]
    assert np.reshape(cut["embeddings"][0], (64, 4))[-1, 0] == 2  # the end token stays
