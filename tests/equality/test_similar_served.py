"""Nearest tokens and analogies of every architecture: the service answers as PyTorch's embedding table does."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2 as httpx
import pytest
from torch.nn.functional import cosine_similarity, normalize

from model.checkpoint import load_model
from tests.equality.serving import client_of, write_bundles
from tests.equality.systems import random_models, small

pytestmark = pytest.mark.anyio
# One of each architecture.
SYSTEMS = {name: small(name) for name in ("chat-gatt", "sentiment", "bahdanau", "post-norm")}


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights of each kind, and its bundle."""
    tokenizer = checkpoint / "tokenizer.json"
    models = random_models(SYSTEMS, tokenizer, noise=0.1)
    return write_bundles(tmp_path_factory.mktemp("similar"), models, tokenizer, ["A dog."])


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(folder / "bundles") as client:
        yield client


@pytest.mark.parametrize("name", SYSTEMS)
async def test_the_service_gives_pytorchs_neighbours_alone_and_many_at_once(
    name: str, folder: Path, client: httpx.AsyncClient
) -> None:
    model, tokenizer = load_model(folder / "checkpoints" / name)
    table = model.embedding.weight.detach()
    units = normalize(table)

    def expected(words: list[str]) -> list[tuple[int, float]]:
        ids = [tokenizer.token_to_id(f"Ġ{word}") for word in words]
        wanted = table[ids[0]] if len(ids) == 1 else units[ids[1]] - units[ids[0]] + units[ids[2]]
        scores = cosine_similarity(wanted[None], table)
        scores[[*ids, *(id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special)]] = -2
        best = scores.topk(10)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    asked = [["dog"], ["A"], ["A", "the", "dog"], ["dog", "the", "A"]]

    async def ask(words: list[str]) -> list[tuple[int, float]]:
        body = {"token": words[0]} if len(words) == 1 else {"analogy": words}
        answer = await client.post("/v1/similar", json={"model": name, **body})
        assert answer.status_code == 200, answer.text
        return [(one["id"], one["score"]) for one in answer.json()["neighbours"]]

    together = await asyncio.gather(*map(ask, asked * 4))
    for words, given in zip(asked * 4, together, strict=True):
        assert given == await ask(words)
        assert [id_ for id_, _ in given] == [id_ for id_, _ in expected(words)]
        assert [score for _, score in given] == pytest.approx([score for _, score in expected(words)], abs=1e-5)
