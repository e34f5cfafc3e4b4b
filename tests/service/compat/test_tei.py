"""Routes of Text Embeddings Inference, in process, over the fake models: fields and errors."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import MakeBackend, Running, Start, byte_level_tokenizer, classifying, until
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


async def test_tokens_have_byte_offsets_and_special_tokens_have_none(running: Running) -> None:
    own = await ask(running, "/v1/tokenize", inputs=TEXTS)
    response = await ask(running, "/tokenize", inputs=TEXTS)
    for text, tokens, expected in zip(TEXTS, response, own["outputs"], strict=True):
        assert [token["id"] for token in tokens] == [token["id"] for token in expected]
        *plain, last = tokens
        assert last == {"id": 2, "text": "</s>", "special": True, "start": None, "stop": None}
        for token in plain:
            assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
            assert not token["special"]
    assert [token["text"] for token in response[0]] == ["a", " dog", "</s>"]
    bare = await ask(running, "/tokenize", inputs=TEXTS[0], add_special_tokens=False)
    assert bare == [response[0][:-1]]


async def test_decode_reverses_tokenize(running: Running) -> None:
    ids = [[token["id"] for token in tokens] for tokens in await ask(running, "/tokenize", inputs=TEXTS)]
    assert await ask(running, "/decode", ids=ids) == TEXTS
    assert await ask(running, "/decode", ids=ids[0]) == TEXTS[:1]
    assert await ask(running, "/decode", ids=ids[0], skip_special_tokens=False) == ["a dog</s>"]


async def test_tokenize_and_decode_use_the_tokens_of_the_encoder(running: Running) -> None:
    listed, other = running.app.state.service.models["fake"], TextTokenizer(byte_level_tokenizer([]))
    model = dataclasses.replace(listed.loaded.model, target_tokenizer=other)
    listed.loaded = dataclasses.replace(listed.loaded, model=model)
    (tokens,) = await ask(running, "/tokenize", inputs="a dog")
    assert await ask(running, "/decode", ids=[token["id"] for token in tokens]) == ["a dog"]


async def test_a_model_is_named_in_the_url(running: Running) -> None:
    for path, body in (("/embed", {"inputs": "x"}), ("/decode", {"ids": [1]}), ("/tokenize", {"inputs": "x"})):
        assert (await running.post(f"{path}?model=judge", body)).status_code == 200
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
        response = await running.post("/tokenize", {"inputs": "x"})
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
