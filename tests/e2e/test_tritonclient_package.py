"""The tritonclient package, unmodified, against the service with real models."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from lab.bench.server import RunningServer, serving
from sightline.base.bundle_files import read_manifest, write_manifest
from tests.e2e.asking import post

TEXTS = ["Two girls are playing.", "A man sleeps on a bench in the park."]
CLASSIFIER = "toy-classifier"

each_way = pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "JSON"])


@pytest.fixture(scope="module")
def server(bundle: Path, classifier_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("served")
    for one in (bundle, classifier_bundle):
        (folder / one.name).symlink_to(one)
    with serving(folder, default_model="toy", workers=1) as server:
        yield server


def connect(server: RunningServer, connections: int = 1) -> Any:
    return InferenceServerClient(server.url.removeprefix("http://"), concurrency=connections)


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with connect(server) as client:
        yield client


def text_input(texts: Sequence[str], *, is_binary: bool = True) -> list[Any]:
    rows = np.array([[text] for text in texts], dtype=object)
    tensor = InferInput("text_input", list(rows.shape), "BYTES")
    return [tensor.set_data_from_numpy(rows, binary_data=is_binary)]


def asked(*names: str, is_binary: bool = True) -> list[Any]:
    return [InferRequestedOutput(name, binary_data=is_binary) for name in names]


def strings(array: Any) -> list[str]:
    """BYTES are bytes where they came as such, and strings where they came as JSON."""
    return [text.decode() if isinstance(text, bytes) else text for text in array.ravel()]


def test_the_client_reads_health(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("toy") and client.is_model_ready("toy", "1")
    assert not client.is_model_ready("toy", "2") and not client.is_model_ready("nobody")


def test_the_client_reads_metadata_configuration_and_the_index(client: Any) -> None:
    assert client.get_server_metadata()["name"] == "sightline"
    metadata = client.get_model_metadata("toy", "1")
    assert metadata["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}]
    assert client.get_model_config("toy")["max_batch_size"] == 2048
    assert client.get_model_repository_index() == [
        {"name": name, "version": "1", "state": "READY", "reason": ""} for name in ("toy", CLASSIFIER)
    ]


@each_way
def test_texts_equal_those_of_generate(server: RunningServer, client: Any, is_binary: bool) -> None:
    outputs = asked("text_output", "token_ids", "num_tokens", "logprobs", "top_logprobs", is_binary=is_binary)
    requested = {"max_new_tokens": 12, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
    result = client.infer(
        "toy", text_input(TEXTS, is_binary=is_binary), outputs=outputs, request_id="q7", parameters=requested
    )
    assert result.get_response()["id"] == "q7"
    own = post(server, "/v1/generate", {"inputs": TEXTS, "parameters": {**requested, "top_logprobs": 5}})["outputs"]
    assert strings(result.as_numpy("text_output")) == [one["text"] for one in own]
    assert result.as_numpy("top_logprobs").shape == (2, result.as_numpy("num_tokens").max(), 5)
    for row, one in enumerate(own):
        count = result.as_numpy("num_tokens")[row]
        assert result.as_numpy("token_ids")[row, :count].tolist() == [token["id"] for token in one["tokens"]]
        expected = np.array([token["logprob"] for token in one["tokens"]], np.float32)
        assert np.array_equal(result.as_numpy("logprobs")[row, :count], expected)
        best = [token["alternatives"][0]["logprob"] for token in one["tokens"]]
        assert np.array_equal(result.as_numpy("top_logprobs")[row, :count, 0], np.array(best, np.float32))


def test_without_outputs_the_client_gets_those_of_the_task_of_the_model(server: RunningServer, client: Any) -> None:
    result = client.infer("toy", text_input(TEXTS[:1]))
    (own,) = post(server, "/v1/generate", {"inputs": TEXTS[:1]})["outputs"]
    assert strings(result.as_numpy("text_output")) == [own["text"]]
    assert strings(result.as_numpy("finish_reason")) == [own["finish_reason"]]
    assert result.as_numpy("attention_cross") is None


@each_way
def test_embeddings_are_those_of_encode(server: RunningServer, client: Any, is_binary: bool) -> None:
    outputs = asked("embedding", is_binary=is_binary)
    texts = text_input(TEXTS, is_binary=is_binary)
    result = client.infer("toy", texts, outputs=outputs, parameters={"pooling": "max", "normalize": True})
    own = post(server, "/v1/encode", {"inputs": TEXTS, "pooling": "max", "normalize": True})
    assert result.as_numpy("embedding").dtype == np.float32
    assert np.array_equal(result.as_numpy("embedding"), np.array(own["embeddings"], np.float32))


@each_way
def test_attention_maps_are_tensors_with_their_own_shapes(server: RunningServer, client: Any, is_binary: bool) -> None:
    names = ("attention_cross", "attention_cross_shape", "source_tokens", "target_tokens")
    texts = text_input(TEXTS, is_binary=is_binary)
    result = client.infer("toy", texts, outputs=asked(*names, is_binary=is_binary), parameters={"max_new_tokens": 9})
    requested = {"max_new_tokens": 9, "return_attention": {"kinds": ["cross"]}}
    own = post(server, "/v1/generate", {"inputs": TEXTS, "parameters": requested})["outputs"]
    maps = result.as_numpy("attention_cross")
    assert maps.dtype == np.float32
    for row, attention in enumerate(one["attention"] for one in own):
        layers, heads, targets, sources = result.as_numpy("attention_cross_shape")[row]
        (expected,) = attention["maps"]
        assert [layers, heads, targets, sources] == expected["shape"]
        weights = np.array(expected["data"], np.float32).reshape(expected["shape"])
        assert np.array_equal(maps[row, :, :, :targets, :sources], weights)
        assert maps[row, 0, 0, 0].sum() == pytest.approx(1, abs=1e-4)
        assert strings(result.as_numpy("source_tokens")[row, :sources]) == attention["source_tokens"]
        assert strings(result.as_numpy("target_tokens")[row, :targets]) == attention["target_tokens"]


@each_way
def test_labels_are_those_of_classify(server: RunningServer, client: Any, is_binary: bool) -> None:
    outputs = asked("labels", "label_scores", "attention_encoder", is_binary=is_binary)
    result = client.infer(CLASSIFIER, text_input(TEXTS, is_binary=is_binary), outputs=outputs)
    own = post(server, "/v1/classify", {"model": CLASSIFIER, "inputs": TEXTS})["outputs"]
    labels = [label for one in own for label in one["labels"]]
    assert strings(result.as_numpy("labels")) == [label["label"] for label in labels]
    scores = np.array([label["score"] for label in labels], np.float32)
    assert np.array_equal(result.as_numpy("label_scores").ravel(), scores)
    assert result.as_numpy("attention_encoder").shape[:3] == (2, 2, 2)


@each_way
@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_read(client: Any, is_binary: bool, algorithm: str) -> None:
    texts = text_input(TEXTS, is_binary=is_binary)
    plain = client.infer("toy", texts, request_id="plain")
    compressed = client.infer("toy", texts, request_id="packed", request_compression_algorithm=algorithm)
    assert compressed.get_response()["id"] == "packed"
    assert strings(compressed.as_numpy("text_output")) == strings(plain.as_numpy("text_output"))


def test_a_compressed_request_has_the_limit_of_a_plain_one(client: Any) -> None:
    texts = text_input(["x" * 2_000_000])
    for algorithm in (None, "gzip"):
        with pytest.raises(InferenceServerException) as caught:
            client.infer("toy", texts, request_compression_algorithm=algorithm)
        assert caught.value.status() == "413"


def test_several_calls_at_once_give_the_same(server: RunningServer) -> None:
    with connect(server, connections=4) as client:  # calls that share a connection could wait for ever for each other
        one = strings(client.infer("toy", text_input(TEXTS)).as_numpy("text_output"))
        pending = [client.async_infer("toy", text_input(TEXTS)) for _ in range(4)]
        assert [strings(call.get_result().as_numpy("text_output")) for call in pending] == [one] * 4


def test_statistics_count_calls(client: Any) -> None:
    (before,) = client.get_inference_statistics("toy")["model_stats"]
    client.infer("toy", text_input(TEXTS))
    after, _ = client.get_inference_statistics()["model_stats"]
    assert after["inference_count"] == before["inference_count"] + 2
    assert after["execution_count"] > before["execution_count"]
    success, earlier = after["inference_stats"]["success"], before["inference_stats"]["success"]
    assert success["count"] == earlier["count"] + 1 and success["ns"] > earlier["ns"]


@pytest.fixture(scope="module")
def two_models(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serve the bundles `toy` and `other`, which is loaded on its first use."""
    folder = tmp_path_factory.mktemp("bundles")
    shutil.copytree(bundle, folder / "toy")
    other = shutil.copytree(bundle, folder / "other")
    write_manifest(other, read_manifest(other).model_copy(update={"name": "other"}))
    settings = {"model_control": "explicit", "lazy_models": "other", "default_model": "toy"}
    with serving(folder, **settings, max_rows=8, workers=1) as server:
        yield server


def states(client: Any) -> dict[str, tuple[str, str]]:
    return {one["name"]: (one["state"], one["reason"]) for one in client.get_model_repository_index()}


def test_a_lazy_model_is_ready_and_loaded_by_its_first_request(two_models: RunningServer) -> None:
    with connect(two_models) as client:
        assert client.is_server_ready() and client.is_model_ready("other")
        assert client.get_model_metadata("other")["inputs"] and client.get_model_config("other")
        assert client.get_inference_statistics("other")["model_stats"][0]["inference_count"] == 0
        assert states(client)["other"] == ("UNAVAILABLE", "unloaded")
        before = two_models.memory_mb("VmRSS")
        pending = [client.async_infer("other", text_input(TEXTS)) for _ in range(4)]
        first, *others = [strings(call.get_result().as_numpy("text_output")) for call in pending]
        assert others == [first] * 3
        assert states(client)["other"] == ("READY", "")
        assert two_models.memory_mb("VmRSS") > before
        client.unload_model("other")


def test_models_are_loaded_and_unloaded_by_name(two_models: RunningServer) -> None:
    ready, unloaded = ("READY", ""), ("UNAVAILABLE", "unloaded")
    with connect(two_models) as client:
        expected = strings(client.infer("toy", text_input(TEXTS)).as_numpy("text_output"))
        assert states(client) == {"other": unloaded, "toy": ready}
        client.load_model("other")
        assert states(client) == {"other": ready, "toy": ready}
        assert strings(client.infer("other", text_input(TEXTS)).as_numpy("text_output")) == expected
        client.unload_model("other")
        assert states(client) == {"other": unloaded, "toy": ready}
        assert not client.is_model_ready("other")
        with pytest.raises(InferenceServerException, match="There is no model of this name; the models are toy"):
            client.infer("other", text_input(TEXTS))
        assert strings(client.infer("toy", text_input(TEXTS)).as_numpy("text_output")) == expected
        client.load_model("other")
        assert client.is_model_ready("other")
        assert strings(client.infer("other", text_input(TEXTS)).as_numpy("text_output")) == expected
        calls: list[tuple[Callable[[], Any], str, str]] = [
            (lambda: client.load_model("nobody"), "404", "model: No bundle in the bundles folder has this name"),
            (lambda: client.load_model("../toy"), "404", "There is no such route"),
            (lambda: client.load_model("toy", config="{}"), "422", "parameters.config is not a field of parameters"),
            (
                lambda: client.load_model("toy", config="{}", files={"file:1/model.onnx": b"x"}),
                "422",
                "parameters.config is not a field of parameters",
            ),
        ]
        for call, status, message in calls:
            with pytest.raises(InferenceServerException) as caught:
                call()
            assert caught.value.status() == status
            assert caught.value.message().startswith(message)


def test_an_error_is_an_exception_with_its_message_and_status(client: Any) -> None:
    calls: list[tuple[Callable[[], Any], str, str]] = [
        (lambda: client.infer("nobody", text_input(TEXTS)), "404", "There is no model of this name"),
        (
            lambda: client.infer("toy", text_input(TEXTS), model_version="2"),
            "404",
            "The only version of each model is 1.",
        ),
        (
            lambda: client.infer("toy", text_input(["a", " "])),
            "422",
            "text_input[1] is empty or contains only whitespace",
        ),
        (
            lambda: client.infer("toy", text_input(TEXTS), parameters={"x": 1}),
            "422",
            "parameters.x is not a field of parameters; its",
        ),
        (
            lambda: client.infer("toy", text_input(TEXTS), priority=1),
            "422",
            "parameters.priority is not a field of parameters",
        ),
        (
            lambda: client.infer("toy", text_input(TEXTS), outputs=asked("logits")),
            "422",
            "outputs[0].name must be an output of toy",
        ),
        (lambda: client.async_infer("nobody", text_input(TEXTS)).get_result(), "404", "There is no model of this name"),
        (lambda: client.load_model("toy"), "403", "Models are loaded only when the service starts"),
        (lambda: client.unload_model("toy"), "403", "Models are loaded only when the service starts"),
        (lambda: client.get_log_settings(), "404", "There is no such route."),
    ]
    for call, status, message in calls:
        with pytest.raises(InferenceServerException) as caught:
            call()
        assert caught.value.status() == status
        assert caught.value.message().startswith(message)
