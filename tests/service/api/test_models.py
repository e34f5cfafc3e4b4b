import asyncio
import math
from typing import Any

import pytest

from sightline.base.bundle import FileRecord, Languages
from tests.service.conftest import MakeBackend, Start, until

pytestmark = pytest.mark.anyio


async def test_models_are_listed_by_name(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend("b", "a")) as running:
        response = (await running.client.get("/v1/models")).json()
        assert response["object"] == "list"
        assert [(one["id"], one["object"]) for one in response["data"]] == [("a", "model"), ("b", "model")]
        assert set(response["data"][0]) >= {"created", "owned_by", "architecture", "description", "tasks", "attention"}


async def test_a_model_reports_its_limits_its_attention_and_its_runtime(start: Start) -> None:
    async with start() as running:
        response = (await running.client.get("/v1/models/fake")).json()
        assert response["limits"] == {
            "max_input_tokens": 64,
            "max_output_tokens": 64,
            "vocabulary": 265,
            "shortlist": None,
        }
        assert response["attention_methods"] == ["weights"]
        assert response["attention"][0] == {
            "kind": "encoder",
            "layers": 2,
            "heads": 2,
            "normalized": True,
            "columns": None,
            "window": None,
        }
        assert (response["provider"], response["dtype"], response["architecture"]) == ("cpu", "float32", "fake")
        assert response["tasks"] == ["generate", "encode", "attention", "score", "tokenize"]
        assert response["sentence_similarity"] is False
        assert len(response["sha256"]) == 64


async def test_a_translation_model_reports_its_languages_and_its_unit(start: Start, make_backend: MakeBackend) -> None:
    backend = make_backend("plain", "translator")
    plain, translator = backend.manifests
    languages = Languages(sources=("en",), targets=("de",))
    changes = {"languages": languages, "training_unit": "sentence"}
    backend.manifests = (plain, translator.model_copy(update=changes))
    async with start(backend) as running:
        cards = (await running.client.get("/v1/models")).json()["data"]
        cards.append((await running.client.get("/v1/models/translator")).json())
        shown = {"source": "en", "target": "de", "sources": ["en"], "targets": ["de"]}
        assert [card.get("languages") for card in cards] == [None, *[shown] * 2]
        assert cards[0]["languages"] is None
        assert [card["training_unit"] for card in cards] == ["text", *["sentence"] * 2]


@pytest.mark.parametrize("name", ["other", "%2e%2e", "fake%00", "F" * 300])
async def test_an_unknown_model_is_not_found(start: Start, name: str) -> None:
    async with start() as running:
        response = await running.client.get(f"/v1/models/{name}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_reports_its_memory_and_metrics_report_the_same(start: Start, make_backend: MakeBackend) -> None:
    backend = make_backend("fake", step_s=0.005)
    (manifest,) = backend.manifests
    sizes = {"weights.bin": 1000, "step.onnx": 30, "tokenizer.json": 7}
    files = {name: FileRecord(bytes=size, sha256="0" * 64) for name, size in sizes.items()}
    backend.manifests = (manifest.model_copy(update={"files": files}),)
    # By hand: two float32 scores of each token, and the states of one row.
    row = 2 * 4 * manifest.limits.vocabulary + sum(
        {"float32": 4, "float16": 2}[state.dtype]
        * math.prod(64 if isinstance(axis, str) else axis for axis in state.shape)
        for state in manifest.states
    )
    idle = {
        "weight_bytes": 1030,
        "max_rows": 32,
        "state_bytes_per_row": row,
        "max_state_bytes": 32 * row,
        "state_bytes": 0,
        "max_prefix_cache_bytes": 0,  # only decoder-only models have one
        "prefix_cache_bytes": 0,
    }
    async with start(backend) as running:

        async def memory() -> Any:
            return (await running.client.get("/v1/models/fake")).json()["memory"]

        async def metrics() -> dict[str, float]:
            names = idle.keys() - {"max_rows"}
            return {name: await running.metric(f'sightline_model_{name}{{model_name="fake"}}') for name in names}

        assert await memory() == idle
        await running.post("/v1/generate", {"inputs": "x"})
        assert await metrics() == {name: value for name, value in idle.items() if name != "max_rows"}
        parameters = {"num_beams": 3, "max_new_tokens": 60, "min_new_tokens": 60}
        call = asyncio.create_task(running.post("/v1/generate", {"inputs": "x", "parameters": parameters}))
        await until(lambda: backend.engines[0].num_rows_in_use > 0)
        assert (await memory())["state_bytes"] == 3 * row
        assert (await metrics())["state_bytes"] == 3 * row
        assert (await call).status_code == 200
        assert await memory() == idle
