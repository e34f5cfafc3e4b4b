"""Routes of Text Embeddings Inference, in process, over the fake models: fields and errors."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.service.conftest import MakeBackend, Running, Start, classifying, until
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio
TEXTS = ["a dog", "Größe 🙂", "x"]


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    async with start(classifying(make_backend()), default_model="fake") as running:
        yield running


async def ask(running: Running, path: str, **body: Any) -> Any:
    return await running.result(path, body)


async def test_an_embedding_is_the_normalized_mean_unless_disabled(running: Running) -> None:
    own = await ask(running, "/v1/encode", inputs=TEXTS, normalize=True)
    assert await ask(running, "/embed", inputs=TEXTS) == own["embeddings"]
    assert await ask(running, "/embed", inputs=TEXTS[0], normalize=None) == own["embeddings"][:1]
    raw = await ask(running, "/v1/encode", inputs=TEXTS)
    assert await ask(running, "/embed", inputs=TEXTS, normalize=False) == raw["embeddings"] != own["embeddings"]


async def test_embed_all_returns_a_row_for_each_token(running: Running) -> None:
    own = await ask(running, "/v1/encode", inputs=TEXTS, pooling="none")
    rows = [np.reshape(flat, shape).tolist() for flat, shape in zip(own["embeddings"], own["shapes"], strict=True)]
    assert await ask(running, "/embed_all", inputs=TEXTS) == rows
    assert await ask(running, "/embed_all", inputs=TEXTS[0]) == rows[:1]


async def test_a_similarity_is_the_cosine_of_two_embeddings(running: Running) -> None:
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    source, *others = (await ask(running, "/v1/encode", inputs=TEXTS, normalize=True))["embeddings"]
    cosines = [float(np.dot(source, other)) for other in others]
    assert await ask(running, "/similarity", inputs=inputs) == pytest.approx(cosines, abs=1e-6)
    nothing = {"truncate": None, "truncation_direction": "Right", "prompt_name": None}
    assert await ask(running, "/similarity", inputs=inputs, parameters=nothing) == pytest.approx(cosines, abs=1e-6)


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/predict?model=judge"])
async def test_long_inputs_are_truncated_on_request(running: Running, path: str) -> None:
    assert await ask(running, path, inputs="x" * 70, truncate=True) == await ask(running, path, inputs="x" * 62)
    sentences = {"source_sentence": "x", "sentences": ["x" * 70]}
    assert len(await ask(running, "/similarity", inputs=sentences, parameters={"truncate": True})) == 1


async def test_predictions_are_the_labels_of_classify(running: Running) -> None:
    own = await ask(running, "/v1/classify", model="judge", inputs=TEXTS)
    labels = [output["labels"] for output in own["outputs"]]
    path = "/predict?model=judge"
    assert await ask(running, path, inputs=TEXTS[0]) == labels[0]
    assert await ask(running, path, inputs=[TEXTS[0]]) == labels[0]
    assert await ask(running, path, inputs=[[text] for text in TEXTS]) == labels
    assert await ask(running, path, inputs=[[TEXTS[0]]], raw_scores=False) == labels[:1]


async def test_with_the_parameters_of_a_pipeline_each_text_has_a_list_of_predictions(running: Running) -> None:
    own = await ask(running, "/v1/classify", model="judge", inputs=TEXTS[0])
    labels = own["outputs"][0]["labels"]
    for parameters in ({}, {"top_k": None, "function_to_apply": "softmax"}, {"top_k": 9}):
        assert await ask(running, "/predict?model=judge", inputs=TEXTS[0], parameters=parameters) == [labels]
    best = await ask(running, "/predict?model=judge", inputs=TEXTS[0], parameters={"top_k": 1})
    assert best == [labels[:1]]


async def test_a_model_is_named_in_the_url(running: Running) -> None:
    assert (await running.post("/embed?model=judge", {"inputs": "x"})).status_code == 200
    requests = 'sightline_request_success_total{finished_reason="encoded",model_name="judge"}'
    assert await running.metric(requests) == 1


async def test_errors_have_the_statuses_of_the_service_and_the_types_of_tei(
    start: Start, make_backend: MakeBackend
) -> None:
    hang, loading = threading.Event(), threading.Event()
    async with start(make_backend(wait_for=loading)) as running:
        response = await running.post("/embed", {"inputs": "x"})
        assert (response.status_code, response.json()["error_type"]) == (503, "Unhealthy")
        assert response.headers["retry-after"] == "1"
        loading.set()
        await until(lambda: running.app.state.service.unavailable_code is None)
        running.app.state.service.drain()
        response = await running.post("/embed", {"inputs": "x"})
        assert (response.status_code, response.json()["error_type"]) == (503, "Unhealthy")
    backend = make_backend(faults=Faults(hang=hang))
    async with start(backend, max_rows=1, max_waiting_sequences=1, max_body_bytes=100) as running:
        held = asyncio.ensure_future(running.post("/v1/generate", {"inputs": "x"}))
        await until(lambda: running.backend.num_busy == 1)
        late = asyncio.ensure_future(running.post("/embed", {"inputs": "x"}, **{"x-request-timeout-ms": "500"}))
        await until(lambda: running.app.state.service.models["fake"].admission.num_sequences == 2)
        full = await running.post("/embed", {"inputs": "x"})
        assert (full.status_code, full.json()["error_type"], full.headers["retry-after"]) == (429, "Overloaded", "1")
        response = await late
        assert (response.status_code, response.json()["error_type"]) == (504, "Backend")
        hang.set()
        assert (await held).status_code == 200
        large = await running.post("/embed", {"inputs": "x" * 100})
        assert (large.status_code, large.json()["error_type"]) == (413, "Validation")
