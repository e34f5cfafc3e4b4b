"""Filling masks and sparse vectors, compared with plain NumPy."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.service.conftest import MakeBackend, Running, Start, byte_level_tokenizer
from tests.support.fake_runner import fake_masked_manifest, fake_predictions

pytestmark = pytest.mark.anyio
TOKENIZER = byte_level_tokenizer()
SIZE = TOKENIZER.get_vocab_size()
MASK, END = (str(TOKENIZER.id_to_token(id_)) for id_ in (1, 2))


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    backend = make_backend()
    sizes: dict[str, Any] = {"vocabulary": SIZE, "max_source_tokens": 64}
    backend.manifests = (
        *backend.manifests,
        fake_masked_manifest("masked", mask_id=1, **sizes),
        fake_masked_manifest("maskless", mask_id=None, **sizes),
    )
    async with start(backend, default_model="masked", max_inputs=4) as running:
        yield running


async def masks_of(running: Running, **fields: Any) -> list[list[dict[str, Any]]]:
    (output,) = (await running.result("/v1/fill-mask", fields))["outputs"]
    masks: list[list[dict[str, Any]]] = output["masks"]
    return masks


def expected(ids: list[int], place: int, count: int) -> list[tuple[int, float]]:
    """Return the best ids at a place, and their probabilities."""
    logits = fake_predictions(ids, SIZE)[place].astype(np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    return [(id_, shares[id_]) for id_ in sorted(range(SIZE), key=lambda id_: -shares[id_])[:count]]


async def test_masks_get_the_most_probable_tokens(running: Running) -> None:
    text = f"a dog {MASK} {MASK}"
    ids = TOKENIZER.encode(text).ids
    places = [index for index, id_ in enumerate(ids) if id_ == 1]
    assert len(places) == 2
    masks = await masks_of(running, inputs=text, top_k=3)
    for place, mask in zip(places, masks, strict=True):
        wanted = expected(ids, place, 3)
        assert [one["id"] for one in mask] == [id_ for id_, _ in wanted]
        assert [one["score"] for one in mask] == pytest.approx([score for _, score in wanted], rel=1e-4)
        for one in mask:
            assert MASK in one["sequence"]  # the other mask stays
    (alone,) = await masks_of(running, inputs=f"a dog {MASK}", top_k=1, targets=["b", "c"])
    assert {one["text"] for one in alone} <= {"b", "c"} and MASK not in alone[0]["sequence"]


async def test_only_the_mask_is_no_plain_text(running: Running) -> None:
    (mask,) = await masks_of(running, inputs=f"a {END} {MASK}", top_k=1)
    plain = TOKENIZER.from_str(TOKENIZER.to_str())
    plain.encode_special_tokens = True
    before = plain.encode(f"a {END} ", add_special_tokens=False).ids
    assert 2 not in before
    ids = [*before, 1, 2]
    assert mask[0]["id"] == expected(ids, len(before), 1)[0][0]
    assert END in mask[0]["sequence"]  # the sequence leaves out special tokens
    # Elsewhere, the mask is plain text, too.
    for path, body in (("/v1/tokenize", {"model": "masked", "inputs": MASK}),):
        tokens = (await running.post(path, body)).json()["outputs"][0]
        assert 1 not in [one["id"] for one in tokens]


async def test_hugging_faces_task_has_the_form_of_the_pipeline(running: Running) -> None:
    one, two = f"a dog {MASK}", f"{MASK} dog {MASK}"

    async def ask(inputs: Any, **parameters: Any) -> Any:
        body = {"inputs": inputs, **({"parameters": parameters} if parameters else {})}
        return await running.result("/?model=masked", body)

    first, second = await ask(one, top_k=2), await ask(two, top_k=2)
    assert [set(item) for item in first] == [{"score", "token", "token_str", "sequence"}] * 2
    assert [len(mask) for mask in second] == [2, 2]
    assert await ask([one, two], top_k=2) == [first, second]
    assert await ask(one) == await ask(one, top_k=5)
    assert await ask("a dog") == (await running.post("/embed?model=masked", {"inputs": "a dog"})).json()
    assert (await running.client.get("/info")).json()["model_pipeline_tag"] == "fill-mask"


async def test_sparse_vectors(running: Running) -> None:
    texts = ["a dog runs", "b"]
    vectors = await running.result("/embed_sparse?model=maskless", {"inputs": texts})
    for text, vector in zip(texts, vectors, strict=True):
        weights = np.log1p(np.maximum(fake_predictions(TOKENIZER.encode(text).ids, SIZE), 0)).max(axis=0)
        assert [one["index"] for one in vector] == weights.nonzero()[0].tolist()
        assert 0 < len(vector) < SIZE
        np.testing.assert_allclose([one["value"] for one in vector], weights[weights > 0], rtol=1e-4)
