"""Nearest tokens and analogies of each architecture equal those of the embeddings in PyTorch."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from sightline.model.architectures.factory import Model
from sightline.model.architectures.pretrained import PretrainedModel
from sightline.model.checkpoint import load_model
from sightline.model.rounding import reference
from tests.equality.systems import small
from tests.rounding import assert_within_rounding

pytestmark = pytest.mark.anyio
# One of each architecture.
SYSTEMS = {name: small(name) for name in ("chat-gatt", "sentiment", "bahdanau", "post-norm")}
NOISE = 0.1  # of the weights of the fixture `folder`


@pytest.mark.parametrize("name", SYSTEMS)
async def test_the_service_gives_pytorchs_neighbours_alone_and_many_at_once(
    name: str, folder: Path, client: httpx.AsyncClient
) -> None:
    model, tokenizer = load_model(folder / "checkpoints" / name)
    models = reference(model)
    special = [id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special]

    def cosines(model: Model, ids: list[int]) -> Tensor:
        assert not isinstance(model, PretrainedModel)
        table = model.embedding.weight.detach()
        units = normalize(table)
        query = table[ids[0]] if len(ids) == 1 else units[ids[1]] - units[ids[0]] + units[ids[2]]
        scores = cosine_similarity(query[None], table)
        scores[[*ids, *special]] = -2
        return scores

    asked = [["dog"], ["A"], ["A", "the", "dog"], ["dog", "the", "A"]]

    async def ask(words: list[str]) -> list[tuple[int, float]]:
        body = {"token": words[0]} if len(words) == 1 else {"analogy": words}
        response = await client.post("/v1/similar", json={"model": name, **body})
        assert response.status_code == 200, response.text
        return [(one["id"], one["score"]) for one in response.json()["neighbours"]]

    together = await asyncio.gather(*map(ask, asked * 4))
    for words, given in zip(asked * 4, together, strict=True):
        assert given == await ask(words)
        ids: list[int] = [tokenizer.token_to_id(f"Ġ{word}") for word in words]  # type: ignore[misc]
        best = cosines(models.exact, ids).topk(10).indices
        assert [id_ for id_, _ in given] == best.tolist()

        def compute(model: Model, ids: list[int] = ids, best: Tensor = best) -> dict[str, NDArray[Any]]:
            return {"scores": cosines(model, ids)[best].numpy()}

        assert_within_rounding(models, compute, {"scores": np.array([score for _, score in given])})
