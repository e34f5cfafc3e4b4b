"""The model of a request that names none depends on the task of the request."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from sightline.base.bundle import Manifest, SentenceEmbedding
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.inference.service import default_models
from tests.service.conftest import FakeBackend, MakeBackend, Running, Start
from tests.support.dialogues import LINES
from tests.support.fake_runner import fake_classifier_manifest, fake_manifest

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "a dog"}]
PLAIN = SentenceEmbedding(pooling="mean", normalize=False)  # of an encoder without settings of its own


def manifests(tokenizer: TextTokenizer) -> dict[str, Manifest]:
    """Return manifests of different tasks; the names do not sort by usefulness."""
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64}
    found = (
        fake_classifier_manifest("a-judge", **sizes),
        fake_classifier_manifest("b-minilm", **sizes).model_copy(
            update={
                "tasks": ("encode", "attention"),
                "labels": (),
                "embedding": SentenceEmbedding(pooling="mean", normalize=True),
            }
        ),
        fake_manifest("c-writer", **sizes, max_target_tokens=64),
        fake_manifest("d-chat", **sizes, max_target_tokens=64, decoder_start="source").model_copy(
            update={"chat": LINES}
        ),
    )
    return {manifest.name: manifest for manifest in found}


@pytest.fixture
def backend(tokenizer: TextTokenizer) -> FakeBackend:
    return FakeBackend(tokenizer, tuple(manifests(tokenizer).values()))


@pytest.fixture
async def several(start: Start, backend: FakeBackend) -> AsyncIterator[Running]:
    async with start(backend, default_model="c-writer,b-minilm") as running:
        yield running


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/generate", {"inputs": "a dog"}, "c-writer"),
    ("/v1/score", {"inputs": "a dog", "targets": "Hund"}, "c-writer"),
    ("/v1/completions", {"prompt": "a dog"}, "c-writer"),
    ("/v1/completions", {"prompt": "a dog", "model": "tgi"}, "c-writer"),
    ("/v1/attention", {"inputs": "a dog"}, "c-writer"),
    ("/v1/align", {"inputs": "a dog"}, "c-writer"),
    ("/v1/tokenize", {"inputs": "a dog"}, "c-writer"),
    ("/v1/detokenize", {"ids": [[5]]}, "c-writer"),
]
ONE_CAN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}, "d-chat"),
    ("/v1/chat/completions", {"messages": MESSAGES, "model": "tgi"}, "d-chat"),
    ("/v1/classify", {"inputs": "a dog"}, "a-judge"),
    ("/v1/encode", {"inputs": "a dog"}, "b-minilm"),  # others can, but were not trained for it
    ("/v1/embeddings", {"input": "a dog"}, "b-minilm"),
    ("/v1/embeddings", {"input": "a dog", "model": "text-embeddings-inference"}, "b-minilm"),
]


@pytest.mark.parametrize(("path", "body", "expected"), REQUESTS + ONE_CAN)
async def test_the_default_is_the_first_of_the_setting_or_the_only_model_that_can_do_the_task(
    several: Running, path: str, body: dict[str, Any], expected: str
) -> None:
    response = await several.post(path, body)
    assert (response.status_code, response.json().get("model")) == (200, expected), response.text
    named = await several.post(path, {**body, "model": "nothing"})
    assert named.status_code == 404


async def test_without_the_setting_requests_need_no_model_if_one_can_do_the_task(
    start: Start, backend: FakeBackend
) -> None:
    async with start(backend, default_model="") as running:
        for path, body, expected in ONE_CAN:
            assert (await running.result(path, body))["model"] == expected


async def test_a_loaded_model_never_takes_the_requests_of_another_one(start: Start, tokenizer: TextTokenizer) -> None:
    all_of_them = manifests(tokenizer)
    backend = FakeBackend(tokenizer, (all_of_them["c-writer"],))
    async with start(backend, model_control="explicit") as running:
        backend.repository.manifests |= all_of_them
        assert (await running.post("/v1/classify", {"inputs": "x"})).json()["error"]["code"] == "unsupported_task"
        assert (await running.post("/v1/encode", {"inputs": "x"})).json()["model"] == "c-writer"
        assert (await running.post("/v2/repository/models/a-judge/load", {})).status_code == 200
        assert (await running.post("/v1/classify", {"inputs": "x"})).json()["model"] == "a-judge"
        assert (await running.post("/v1/encode", {"inputs": "x"})).status_code == 422
        assert (await running.post("/v1/generate", {"inputs": "x"})).json()["model"] == "c-writer"
        assert (await running.post("/v2/repository/models/b-minilm/load", {})).status_code == 200
        assert (await running.post("/v1/encode", {"inputs": "x"})).json()["model"] == "b-minilm"


async def test_no_other_model_answers_for_a_default_model_that_was_unloaded(start: Start, backend: FakeBackend) -> None:
    async with start(backend, default_model="c-writer", model_control="explicit") as running:
        assert (await running.post("/v1/classify", {"inputs": "x"})).json()["model"] == "a-judge"
        assert (await running.post("/v2/repository/models/c-writer/unload", {})).status_code == 200
        for path, body in (("/v1/encode", {"inputs": "x"}), ("/v1/classify", {"inputs": "x"})):
            error = (await running.post(path, body)).json()["error"]
            assert (
                error["message"]
                == "The default model c-writer is not loaded; the models are a-judge, b-minilm, d-chat."
            )


async def test_apis_whose_responses_name_no_model_use_the_same(several: Running) -> None:
    for path, body, model in (
        ("/generate", {"inputs": "a dog"}, "c-writer"),
        ("/", {"inputs": "a dog", "stream": False}, "c-writer"),
        ("/", {"inputs": "a dog", "parameters": {"max_new_tokens": 5}}, "c-writer"),
        ("/", {"inputs": "a dog", "parameters": {"function_to_apply": "softmax"}}, "a-judge"),
        ("/embed", {"inputs": "a dog"}, "b-minilm"),
        ("/predict", {"inputs": "a dog"}, "a-judge"),
    ):
        expected = await several.post(f"{path}?model={model}", body)
        assert expected.status_code == 200, expected.text
        assert (await several.post(path, body)).json() == expected.json()
    assert (await several.client.get("/info")).json()["model_id"] == "c-writer"


async def test_a_body_of_hugging_face_need_not_tell_its_task_if_all_models_have_one(
    start: Start, make_backend: MakeBackend
) -> None:
    async with start(make_backend("a", "b")) as running:
        for body in ({"inputs": "a dog"}, {"inputs": "a dog", "parameters": {}}):
            assert "generated_text" in (await running.result("/", body))[0]


async def test_the_root_lists_the_default_models(several: Running) -> None:
    root = (await several.client.get("/")).json()
    assert root["default_model"] == "c-writer"
    assert root["default_models"] == {
        "attention": "c-writer",
        "chat": "d-chat",
        "classify": "a-judge",
        "encode": "b-minilm",
        "generate": "c-writer",
    }


def test_models_without_a_task_are_not_its_default(tokenizer: TextTokenizer) -> None:
    by_name = manifests(tokenizer)
    assert default_models([], []) == {}
    assert default_models([by_name["a-judge"], by_name["b-minilm"]], []) == {
        "classify": "a-judge",
        "encode": "b-minilm",
    }
    both = [by_name["d-chat"], by_name["c-writer"]]
    assert default_models(both, ["c-writer"])["encode"] == "c-writer"
    assert default_models(both, ["d-chat", "c-writer"])["encode"] == "d-chat"
    assert default_models(both, ["missing", "c-writer"])["encode"] == "c-writer"
    assert "chat" not in default_models(both, ["missing", "c-writer"])


@pytest.mark.parametrize(
    ("changes", "chosen", "expected"),
    [
        ({}, ["c-writer"], "b-minilm"),
        ({}, ["c-writer", "a-judge"], "b-minilm"),
        ({"lazy": True}, ["c-writer"], "c-writer"),
        ({"lazy": True}, ["c-writer", "b-minilm"], "b-minilm"),
        ({"embedding": None}, ["c-writer"], "c-writer"),
        ({"embedding": PLAIN}, ["c-writer"], "b-minilm"),
        ({"embedding": PLAIN, "tasks": ("encode", "fill-mask", "sparse")}, ["c-writer"], "c-writer"),
        ({"embedding": PLAIN.model_copy(update={"pooling": "first"}), "tasks": ("encode", "sparse")}, [], "b-minilm"),
    ],
)
def test_only_models_that_were_trained_for_embeddings_are_their_default(
    tokenizer: TextTokenizer, changes: dict[str, Any], chosen: list[str], expected: str
) -> None:
    by_name = manifests(tokenizer)
    by_name["b-minilm"] = by_name["b-minilm"].model_copy(update=changes)
    assert default_models(by_name.values(), chosen)["encode"] == expected


def test_a_lazy_manifest_is_a_default_only_by_its_name(tokenizer: TextTokenizer) -> None:
    writer = manifests(tokenizer)["c-writer"]
    lazy = writer.model_copy(update={"name": "lazy", "lazy": True})
    assert default_models([writer, lazy], [])["generate"] == "c-writer"
    assert default_models([writer, lazy], ["lazy"])["generate"] == "lazy"
    assert default_models([lazy], []) == {}


async def test_an_error_lists_at_most_ten_models(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend(*(f"model-{number:02}" for number in range(12)))) as running:
        response = await running.post("/v1/generate", {"model": "nobody", "inputs": "x"})
        assert response.status_code == 404
        assert "model-08, model-09 and 2 more." in response.text and "model-10" not in response.text
