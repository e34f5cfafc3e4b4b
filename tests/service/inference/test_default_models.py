"""The model of a request that names none depends on the task of the request."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from service.bundle import ChatTemplate, Embedding, Manifest
from service.inference.service import default_models
from service.text.tokenizer import TextTokenizer
from tests.service.conftest import FakeBackend, Running, Start
from tests.support.fake_runner import fake_classifier_manifest, fake_manifest

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "a dog"}]
CHAT = ChatTemplate(user="U: {}\n", assistant="B: {}\n", reply="B:", single_line=True)


def manifests(tokenizer: TextTokenizer) -> dict[str, Manifest]:
    """Return manifests of different tasks; the names do not sort by usefulness."""
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64}
    found = (
        fake_classifier_manifest("a-judge", **sizes),
        fake_classifier_manifest("b-minilm", **sizes).model_copy(
            update={
                "tasks": ("encode", "attention"),
                "labels": (),
                "embedding": Embedding(pooling="mean", normalize=True),
            }
        ),
        fake_manifest("c-writer", **sizes, max_target_tokens=64),
        fake_manifest("d-chat", **sizes, max_target_tokens=64, decoder_start="source").model_copy(
            update={"chat": CHAT}
        ),
    )
    return {manifest.name: manifest for manifest in found}


@pytest.fixture
def backend(tokenizer: TextTokenizer) -> FakeBackend:
    return FakeBackend(tokenizer, tuple(manifests(tokenizer).values()))


@pytest.fixture
async def several(start: Start, backend: FakeBackend) -> AsyncIterator[Running]:
    async with start(backend) as running:
        yield running


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/generate", {"inputs": "a dog"}, "c-writer"),
    ("/v1/score", {"inputs": "a dog", "targets": "Hund"}, "c-writer"),
    ("/v1/completions", {"prompt": "a dog"}, "c-writer"),
    ("/v1/completions", {"prompt": "a dog", "model": "tgi"}, "c-writer"),
    ("/v1/attention", {"inputs": "a dog"}, "c-writer"),
    ("/v1/tokenize", {"inputs": "a dog"}, "c-writer"),
    ("/v1/detokenize", {"ids": [[5]]}, "c-writer"),
    ("/v1/chat/completions", {"messages": MESSAGES}, "d-chat"),
    ("/v1/chat/completions", {"messages": MESSAGES, "model": "tgi"}, "d-chat"),
    ("/v1/encode", {"inputs": "a dog"}, "b-minilm"),
    ("/v1/embeddings", {"input": "a dog"}, "b-minilm"),
    ("/v1/classify", {"inputs": "a dog"}, "a-judge"),
]


@pytest.mark.parametrize(("path", "body", "expected"), REQUESTS)
async def test_the_default_model_can_do_the_task(
    several: Running, path: str, body: dict[str, Any], expected: str
) -> None:
    response = await several.post(path, body)
    assert (response.status_code, response.json().get("model")) == (200, expected), response.text
    named = await several.post(path, {**body, "model": "nothing"})
    assert named.status_code == 404


async def test_apis_whose_responses_name_no_model_use_the_same(several: Running) -> None:
    for path, body, model in (
        ("/generate", {"inputs": "a dog"}, "c-writer"),
        ("/", {"inputs": "a dog"}, "c-writer"),
        ("/embed", {"inputs": "a dog"}, "b-minilm"),
        ("/predict", {"inputs": "a dog"}, "a-judge"),
    ):
        expected = await several.post(f"{path}?model={model}", body)
        assert expected.status_code == 200, expected.text
        assert (await several.post(path, body)).json() == expected.json()
    assert (await several.client.get("/info")).json()["model_id"] == "c-writer"


async def test_the_root_lists_the_default_models(several: Running) -> None:
    root = (await several.client.get("/")).json()
    assert root["default_model"] == "c-writer"
    assert root["default_models"] == {
        "attention": "c-writer",
        "chat": "d-chat",
        "classify": "a-judge",
        "encode": "b-minilm",
        "generate": "c-writer",
        "similar": "c-writer",
    }


async def test_a_task_that_no_model_can_do_is_an_error(several: Running) -> None:
    error = (await several.post("/v1/rerank", {"query": "x", "documents": ["y"]})).json()["error"]
    assert (error["code"], error["message"]) == (
        "unsupported_task",
        "c-writer cannot do the task rerank; GET /v1/models lists the tasks of each model.",
    )


async def test_the_setting_applies_to_every_task(start: Start, backend: FakeBackend) -> None:
    async with start(backend, default_model="a-judge") as running:
        root = (await running.client.get("/")).json()
        assert root["default_model"] == "a-judge"
        assert root["default_models"] == dict.fromkeys(sorted(backend.manifests[0].tasks), "a-judge")
        for path, body, _ in REQUESTS:
            response = await running.post(path, body)
            if response.status_code == 200:
                assert response.json()["model"] == "a-judge"
                continue
            error = response.json()["error"]
            assert error["code"] == "unsupported_task"
            assert (
                error["message"] == "a-judge cannot do the task generate; GET /v1/models lists the tasks of each model."
            )
        assert (await running.post("/v1/classify", {"inputs": "a dog"})).status_code == 200
        assert (await running.post("/predict", {"inputs": "a dog"})).status_code == 200
    async with start(backend, default_model="c-writer") as running:
        for path, body, message in (
            (
                "/v1/chat/completions",
                {"messages": MESSAGES},
                "model: c-writer has no chat template, so it cannot chat.",
            ),
            ("/v1/classify", {"inputs": "a dog"}, "c-writer cannot do the task classify;"),
        ):
            error = (await running.post(path, body)).json()["error"]
            assert error["code"] == "unsupported_task" and error["message"].startswith(message)
        predicted = await running.post("/predict", {"inputs": "a dog"})
        assert predicted.status_code == 422 and "c-writer cannot do the task classify;" in predicted.json()["error"]


async def test_a_model_that_is_loaded_later_is_the_default_of_new_tasks_only(
    start: Start, tokenizer: TextTokenizer
) -> None:
    all_of_them = manifests(tokenizer)
    backend = FakeBackend(tokenizer, (all_of_them["c-writer"], all_of_them["d-chat"]))
    async with start(backend, model_control="explicit") as running:
        backend.repository.manifests |= all_of_them
        assert (await running.post("/v1/classify", {"inputs": "x"})).json()["error"]["code"] == "unsupported_task"
        assert (await running.post("/v1/encode", {"inputs": "x"})).json()["model"] == "c-writer"
        for name in ("a-judge", "b-minilm"):
            assert (await running.post(f"/v2/repository/models/{name}/load", {})).status_code == 200
        assert (await running.post("/v1/classify", {"inputs": "x"})).json()["model"] == "a-judge"
        assert (await running.post("/v1/encode", {"inputs": "x"})).json()["model"] == "c-writer"
        assert (await running.post("/v2/repository/models/c-writer/unload", {})).status_code == 200
        error = (await running.post("/v1/encode", {"inputs": "x"})).json()["error"]
        assert error["message"] == "The default model is not loaded; the models are a-judge, b-minilm, d-chat."


def test_models_without_a_task_are_not_its_default(tokenizer: TextTokenizer) -> None:
    by_name = manifests(tokenizer)
    assert default_models([]) == {}
    assert default_models([by_name["a-judge"], by_name["b-minilm"]]) == {
        "encode": "b-minilm",
        "attention": "a-judge",
        "classify": "a-judge",
        "similar": "a-judge",
    }
    assert default_models([by_name["d-chat"], by_name["c-writer"]])["encode"] == "c-writer"
