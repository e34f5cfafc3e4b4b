"""POST .../infer of the Open Inference Protocol: its outputs, parameters and errors."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.compat.open_inference.outputs import PARAMETERS, generate_parameters, outputs_of
from sightline.service.compat.open_inference.schemas import InferParameters
from tests.service.conftest import FakeBackend, MakeBackend, Running, Start, generate, until
from tests.support.fake_runner import Faults, fake_classifier_manifest, fake_manifest, fake_slots_manifest

pytestmark = pytest.mark.anyio

TEXTS = ["a dog", "a dog und Hund"]  # of which the fake makes 3 and 9 tokens
INFER = "/v2/models/fake/infer"


def body_of(texts: Any, *outputs: str, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    return {"inputs": [tensor], "outputs": [{"name": name} for name in outputs], "parameters": parameters}


async def infer(running: Running, texts: Any, *outputs: str, model: str = "fake", **parameters: Any) -> Any:
    """The outputs by name, as arrays."""
    content = await running.result(f"/v2/models/{model}/infer", body_of(texts, *outputs, **parameters))
    assert (content["model_name"], content["model_version"]) == (model, "1")
    return {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in content["outputs"]}


async def error_message(running: Running, body: Any, path: str = INFER) -> str:
    response = await running.post(path, body)
    assert response.status_code == 422, response.text
    assert list(response.json()) == ["error"]
    message: str = response.json()["error"]
    return message


@pytest.fixture
async def judge(start: Start, tokenizer: TextTokenizer) -> AsyncIterator[Running]:
    manifest = fake_classifier_manifest("judge", vocabulary=len(tokenizer), max_source_tokens=64)
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        yield running


async def test_the_default_outputs_are_the_text_and_its_tokens(running: Running) -> None:
    outputs = await infer(running, TEXTS, max_new_tokens=20)
    own = (await generate(running, TEXTS, max_new_tokens=20))["outputs"]
    assert list(outputs) == ["text_output", "finish_reason", "score", "num_tokens", "token_ids", "logprobs"]
    assert list(outputs["text_output"]) == [one["text"] for one in own]
    assert list(outputs["finish_reason"]) == [one["finish_reason"] for one in own]
    assert outputs["score"] == pytest.approx([one["score"] for one in own])
    assert outputs["num_tokens"][0] != outputs["num_tokens"][1]
    for row, one in enumerate(own):
        count = outputs["num_tokens"][row]
        assert list(outputs["token_ids"][row, :count]) == [token["id"] for token in one["tokens"]]
        assert outputs["logprobs"][row, :count] == pytest.approx([token["logprob"] for token in one["tokens"]])
        assert set(outputs["token_ids"][row, count:]) <= {0} and set(outputs["logprobs"][row, count:]) <= {0}


async def test_parameters_are_those_of_generate(running: Running) -> None:
    requested: dict[str, Any] = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": 0.5,
        "target_prefix": ["a", "Hund"],
    }
    outputs = await infer(running, TEXTS, "text_output", "score", **requested)
    own = (await generate(running, TEXTS, **requested))["outputs"]
    assert list(outputs["text_output"]) == [one["text"] for one in own]
    assert outputs["score"] == pytest.approx([one["score"] for one in own])
    assert len(own) == 4
    drawn: dict[str, Any] = {"do_sample": True, "seed": 5, "temperature": 2.0, "top_k": 9, "top_p": 0.9, "stop": ["x"]}
    outputs = await infer(running, TEXTS, "text_output", **drawn)
    assert list(outputs["text_output"]) == [one["text"] for one in (await generate(running, TEXTS, **drawn))["outputs"]]


async def test_alternatives_are_five_or_the_requested_number(running: Running) -> None:
    cases: list[tuple[dict[str, Any], int]] = [({}, 5), ({"top_logprobs": 2}, 2), ({"top_logprobs": 0}, 0)]
    for requested, count in cases:
        (output,) = (await generate(running, "a dog", top_logprobs=5))["outputs"]
        outputs = await infer(running, ["a dog"], "top_token_ids", "top_logprobs", **requested)
        if count == 0:
            assert outputs["top_logprobs"].shape == (1, len(output["tokens"]), 0)
            continue
        alternatives = [token["alternatives"][:count] for token in output["tokens"]]
        assert outputs["top_token_ids"].tolist() == [[[one["id"] for one in ones] for ones in alternatives]]
        expected = [[one["logprob"] for one in ones] for ones in alternatives]
        assert outputs["top_logprobs"][0] == pytest.approx(np.array(expected))


@pytest.mark.parametrize("decoder_start", ["start_token", "source"])
async def test_maps_and_their_tokens_are_padded_to_one_tensor(
    start: Start, tokenizer: TextTokenizer, decoder_start: Any
) -> None:
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64, "max_target_tokens": 64}
    manifest = fake_manifest(decoder_start=decoder_start, **sizes)
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        names = ["source_tokens", "target_tokens", "decoder_input_tokens"]
        kinds = [one.kind for one in manifest.attention]
        asked = [name for kind in kinds for name in (f"attention_{kind}", f"attention_{kind}_shape")]
        outputs = await infer(running, TEXTS, *asked, *names, layers=[-1], target_prefix="a", max_new_tokens=9)
        requested = {"return_attention": {"layers": [1]}, "target_prefix": "a", "max_new_tokens": 9}
        own = [one["attention"] for one in (await generate(running, TEXTS, **requested))["outputs"]]
        for row, attention in enumerate(own):
            for one in attention["maps"]:
                shape = outputs[f"attention_{one['kind']}_shape"][row]
                assert shape.tolist() == one["shape"]
                tensor = outputs[f"attention_{one['kind']}"][row]
                part = tuple(map(slice, shape))
                assert tensor[part] == pytest.approx(np.array(one["data"]).reshape(shape))
                assert tensor.sum() == pytest.approx(tensor[part].sum())
            for name in names:
                tokens = outputs[name][row].tolist()
                assert tokens == attention[name] + [""] * (len(tokens) - len(attention[name]))


@pytest.mark.parametrize(("reduce", "is_normalized"), [("none", True), ("mean", True), ("max", False)])
async def test_maps_whose_rows_do_not_sum_to_1_are_marked(
    start: Start, tokenizer: TextTokenizer, reduce: str, is_normalized: bool
) -> None:
    manifest = fake_slots_manifest("fake", vocabulary=len(tokenizer), max_source_tokens=64)
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        for is_binary in (False, True):
            body = body_of(TEXTS, "attention_encoder", "attention_cross", "text_output", reduce=reduce)
            body["parameters"]["binary_data_output"] = is_binary
            response = await running.post(INFER, body)
            length = int(response.headers.get("Inference-Header-Content-Length", len(response.content)))
            encoder, cross, text = json.loads(response.content[:length])["outputs"]
            assert encoder["parameters"]["normalized"] is False
            assert cross["parameters"]["normalized"] is is_normalized
            assert "normalized" not in text.get("parameters", {})
            assert ("binary_data_size" in cross["parameters"]) == is_binary


async def test_only_requested_outputs_are_computed(running: Running) -> None:
    (runner,) = running.backend.runners
    await infer(running, TEXTS, "embedding")
    assert (runner.num_encodes, runner.num_steps) == (1, 0)
    await infer(running, TEXTS, "text_output", "attention_cross")
    assert runner.num_encodes == 2
    model = running.app.state.service.models["fake"]
    outputs = outputs_of(model.manifest)
    for names, kinds in (
        (["text_output"], None),
        (["attention_cross", "attention_cross_shape"], ["cross"]),
        (["attention_decoder", "attention_encoder", "source_tokens"], ["decoder", "encoder"]),
        (["source_tokens"], ["encoder"]),
    ):
        selection = generate_parameters(model, InferParameters(), [outputs[name] for name in names]).return_attention
        assert (selection.kinds if selection else None) == kinds


async def test_embeddings_are_those_of_encode(running: Running) -> None:
    cases: list[dict[str, Any]] = [{}, {"pooling": "max", "normalize": True}, {"pooling": "none"}]
    for requested in cases:
        own = (await running.post("/v1/encode", {"inputs": TEXTS, **requested})).json()
        outputs = await infer(running, TEXTS, "embedding", "embedding_shape", **requested)
        shapes = own.get("shapes") or [[own["dimensions"]]] * 2
        assert outputs["embedding_shape"].tolist() == shapes
        for tensor, embedding, shape in zip(outputs["embedding"], own["embeddings"], shapes, strict=True):
            assert tensor[tuple(map(slice, shape))] == pytest.approx(np.array(embedding).reshape(shape))
    long = await infer(running, ["x" * 100], "embedding", truncate=True)
    assert long["embedding"].shape == (1, 4)


async def test_labels_are_sorted_by_score_and_have_maps(judge: Running) -> None:
    outputs = await infer(judge, TEXTS, "labels", "label_scores", "attention_encoder", model="judge", reduce="mean")
    own = (await judge.post("/v1/classify", {"inputs": TEXTS, "return_attention": {"reduce": "mean"}})).json()
    for row, one in enumerate(own["outputs"]):
        assert outputs["labels"][row].tolist() == [label["label"] for label in one["labels"]]
        assert outputs["label_scores"][row] == pytest.approx([label["score"] for label in one["labels"]])
        (maps,) = one["maps"]
        part = tuple(map(slice, maps["shape"]))
        assert outputs["attention_encoder"][row][part] == pytest.approx(np.array(maps["data"]).reshape(maps["shape"]))
    assert list(await infer(judge, TEXTS, model="judge")) == ["labels", "label_scores"]
    assert (await infer(judge, ["x" * 100], model="judge", truncate=True))["labels"].shape == (1, 3)


async def test_outputs_of_several_tasks_are_in_the_requested_order(running: Running) -> None:
    outputs = await infer(running, ["a dog"], "embedding", "text_output", "attention_cross", max_new_tokens=5)
    assert list(outputs) == ["embedding", "text_output", "attention_cross"]
    assert await running.metric('sightline_e2e_request_latency_seconds_count{model_name="fake"}') == 1  # a call


async def test_the_tasks_of_a_call_share_one_reservation(start: Start) -> None:
    async with start(max_rows=1, max_waiting_sequences=1) as running:
        outputs = await infer(running, TEXTS, "embedding", "text_output")
        assert outputs["embedding"].shape == (2, 4)
        admission = running.app.state.service.models["fake"].admission
        assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (0, 0, 0)


async def test_the_id_is_returned(running: Running) -> None:
    response = (await running.post(INFER, body_of(["a dog"]) | {"id": "q7"})).json()
    assert response["id"] == "q7"
    assert "id" not in (await running.post(INFER, body_of(["a dog"]))).json()


def test_the_openapi_document_has_exactly_the_parameters_that_affect_outputs() -> None:
    names = {name for of_one in PARAMETERS.values() for name in of_one}
    assert InferParameters.model_fields.keys() == names | {"binary_data_output"}


async def test_a_field_that_is_not_supported_may_be_null(running: Running) -> None:
    body = body_of(["a dog"], "text_output")
    shared = dict.fromkeys(("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"))
    body["inputs"][0]["parameters"] = shared
    body["outputs"][0]["parameters"] = {"shared_memory_region": None, "classification": None}
    await running.result(INFER, body)


async def test_padding_counts_towards_the_size_of_a_response(start: Start, tokenizer: TextTokenizer) -> None:
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 300, "max_target_tokens": 24}
    async with start(FakeBackend(tokenizer, (fake_manifest(layers=4, heads=2, **sizes),))) as running:
        texts = ["x" * 290, *["x"] * 3]
        assert (await infer(running, texts[:1], "attention_encoder"))["attention_encoder"].size < 1_000_000
        message = await error_message(running, body_of(texts, "attention_encoder"))
        assert message.startswith("The padded tensors have at least 2")
        texts = ["x" * 246, "x"]
        assert (await infer(running, texts, "attention_encoder"))["attention_encoder"].size < 1_000_000
        message = await error_message(
            running, body_of(texts, "attention_encoder", "attention_cross", min_new_tokens=20)
        )
        assert message.startswith("The tensors have at least 10")


async def test_errors_have_their_status_and_the_protocols_shape(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend(faults=Faults(step_calls=frozenset({1}))), max_body_bytes=1000) as running:
        for path in ("/v2/models/nobody/infer", "/v2/models/fake/versions/2/infer"):
            response = await running.post(path, body_of(["x"]))
            assert (response.status_code, list(response.json())) == (404, ["error"])
        for body, headers, status in (
            (body_of(["x" * 1000]), {}, 413),
            (body_of(["x"]), {"content-type": "text/plain"}, 415),
            (body_of(["x"]), {"content-encoding": "br"}, 415),
            (body_of(["x"]), {"content-encoding": "gzip"}, 400),
            (body_of(["x"]), {"x-request-timeout-ms": "0"}, 422),
            (body_of(["x"]), {}, 500),
        ):
            response = await running.post(INFER, body, **headers)
            assert response.status_code == status
            assert isinstance(response.json()["error"], str) and list(response.json()) == ["error"]
        response = await running.client.put(INFER)
        assert (response.status_code, list(response.json()), response.headers["allow"]) == (405, ["error"], "POST")


async def test_errors_of_overload_and_deadlines_have_the_shape_of_the_route(
    start: Start, make_backend: MakeBackend
) -> None:
    loading = threading.Event()
    async with start(make_backend(wait_for=loading)) as running:
        response = await running.post(INFER, body_of(["x"]))
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json() == {"error": "The models are being loaded. Retry later."}
        loading.set()
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang)), max_rows=1, max_waiting_sequences=1) as running:
        calls = [running.post(INFER, body_of(["x"]), **{"x-request-timeout-ms": "500"}) for _ in range(2)]
        late = asyncio.gather(*calls)
        await until(lambda: running.backend.num_busy == 2)
        response = await running.post(INFER, body_of(["x"]))
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json() == {
            "error": "The queue is full: 2 of 2 sequences are running or waiting (SIGHTLINE_MAX_WAITING_SEQUENCES), "
            "and a call of 1 needs space for 1. Retry later."
        }
        assert [(one.status_code, list(one.json())) for one in await late] == [(504, ["error"])] * 2
        hang.set()
