"""Endpoints that TGI and TEI share: POST / does the main task, GET /info describes the model.

In process, over fake models."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from sightline import __version__
from sightline.base.bundle import Languages
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.http.dispatch import EndpointRoute
from tests.service.conftest import FakeBackend, MakeBackend, Running, Start, classifying
from tests.support.fake_runner import fake_manifest
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio


def with_encoder(backend: FakeBackend) -> FakeBackend:
    """The same backend with a classifier and a model that only encodes."""
    judge = classifying(backend).manifests[-1]
    outputs = tuple(name for name in judge.encoder_graph.outputs if name != "label_logprobs")
    encoder = judge.encoder_graph.model_copy(update={"outputs": outputs})
    changes = {"name": "vectors", "tasks": ("encode",), "labels": (), "encoder": encoder}
    backend.manifests = (*backend.manifests, judge.model_copy(update=changes))
    return backend


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    async with start(with_encoder(make_backend()), default_model="fake") as running:
        yield running


@pytest.mark.parametrize(("model", "path", "body"), read_table(__file__))
async def test_the_task_of_the_model_chooses_the_route(
    running: Running, model: str, path: str, body: dict[str, Any]
) -> None:
    response = await running.post(f"/?model={model}", body)
    assert (response.status_code, response.content) == (
        200,
        (await running.post(f"{path}?model={model}", body)).content,
    )


async def test_a_generated_text_is_returned_in_a_list(running: Running) -> None:
    body = {"inputs": "a dog", "parameters": {"details": True}}
    assert (await running.post("/", body)).json() == [(await running.post("/generate", body)).json()]


async def test_a_translation_model_returns_translation_text(start: Start, tokenizer: TextTokenizer) -> None:
    manifest = fake_manifest(vocabulary=len(tokenizer))
    manifest = manifest.model_copy(update={"languages": Languages(sources=("en",), targets=("de",))})
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        (response,) = (await running.post("/", {"inputs": "a dog"})).json()
        assert response == {
            "generated_text": response["generated_text"],
            "translation_text": response["generated_text"],
        }


async def test_info_has_the_limits_of_the_model_and_of_the_service(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_encoder(make_backend()), default_model="fake", max_rows=5, max_batch_tokens=77) as running:
        own = (await running.client.get("/v1/models/fake")).json()
        info = (await running.client.get("/info")).json()
        assert info == {
            "model_id": "fake",
            "served_model_name": "fake",
            "model_sha": own["sha256"],
            "model_dtype": "float32",
            "model_type": {"embedding": {"pooling": "mean"}},
            "model_pipeline_tag": "text2text-generation",
            "max_concurrent_requests": 5 + 256,
            "max_input_length": 64,
            "max_input_tokens": 64,
            "max_total_tokens": 128,
            "max_batch_tokens": 77,
            "max_batch_requests": None,
            "max_client_batch_size": 2048,
            "max_best_of": 1,
            "max_stop_sequences": 4,
            "auto_truncate": False,
            "validation_workers": 1,
            "tokenization_workers": 1,
            "router": "sightline",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
        judge = (await running.client.get("/info?model=judge")).json()
        labels = {"id2label": {"0": "bad", "1": "fair", "2": "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}
        assert (judge["model_type"], judge["model_pipeline_tag"]) == ({"classifier": labels}, "text-classification")
        assert judge["max_total_tokens"] == 64
        vectors = (await running.client.get("/info?model=vectors")).json()
        assert vectors["model_pipeline_tag"] == "feature-extraction"
        missing = await running.client.get("/info?model=gpt")
        assert (missing.status_code, missing.json()["error_type"]) == (404, "validation")


async def test_the_info_of_a_causal_model_counts_its_prompt_once(start: Start, tokenizer: TextTokenizer) -> None:
    manifest = fake_manifest(vocabulary=len(tokenizer), decoder_start="source")
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        info = (await running.client.get("/info")).json()
        assert (info["model_pipeline_tag"], info["max_total_tokens"]) == ("text-generation", 25)
        longest = {"inputs": "x" * 10, "parameters": {"max_new_tokens": 24, "min_new_tokens": 24}}
        usage = (await running.post("/v1/generate", longest)).json()["usage"]
        assert sum(usage.values()) == info["max_total_tokens"]


@pytest.mark.parametrize("api", ["tgi", "tei"])
async def test_shared_routes_exist_if_either_api_is_enabled(start: Start, api: str) -> None:
    own = {"tgi": {"/generate", "/generate_stream"}}
    own["tei"] = {"/embed", "/embed_all", "/embed_sparse", "/similarity", "/predict", "/rerank"}
    async with start(compatible_apis=api) as running:
        paths = {route.path for route in running.app.routes if isinstance(route, EndpointRoute)}
        assert paths >= own[api] | {"/", "/info", "/health"}
        assert not paths & {path for name, of_name in own.items() if name != api for path in of_name}
    async with start(compatible_apis="openai") as running:
        assert (await running.post("/", {"inputs": "a dog"})).status_code == 405  # GET is the service's own
        assert (await running.client.get("/info")).status_code == 404
        assert (await running.client.get("/health")).json() == {"status": "ok"}


async def test_openapi_declares_the_model_in_the_query(running: Running) -> None:
    paths = (await running.client.get("/openapi.json")).json()["paths"]
    with_model = {
        path
        for path, operations in paths.items()
        for operation in operations.values()
        if any((one["in"], one["name"]) == ("query", "model") for one in operation["parameters"])
    }
    assert with_model == {
        *("/", "/info", "/generate", "/generate_stream"),
        *("/embed", "/embed_all", "/embed_sparse", "/similarity", "/predict", "/rerank"),
    }
