"""Open Inference Protocol: health, metadata, configuration, statistics and index of models."""

import threading
from typing import Any

import pytest

from sightline import __version__
from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import FakeBackend, MakeBackend, Running, Start, generate
from tests.support.fake_runner import fake_classifier_manifest, fake_slots_manifest

pytestmark = pytest.mark.anyio


async def test_server_metadata_has_the_name_and_the_extensions(running: Running) -> None:
    metadata = await running.get("/v2")
    assert (metadata["name"], metadata["version"]) == ("sightline", __version__)
    assert {"binary_tensor_data", "statistics"} <= set(metadata["extensions"])


async def test_it_is_live_before_it_is_ready(start: Start, make_backend: MakeBackend) -> None:
    loading = threading.Event()
    async with start(make_backend(wait_for=loading)) as running:
        assert await running.get("/v2/health/live") == {"live": True}
        for path in ("/v2/health/ready", "/v2/models/fake/ready", "/v2/models/fake", "/v2/models/stats"):
            response = await running.client.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json() == {"error": "The models are being loaded. Retry later."}
        loading.set()


@pytest.mark.parametrize("path", ["", "/ready", "/config", "/stats"])
async def test_a_model_has_one_version_and_another_name_is_404(running: Running, path: str) -> None:
    assert await running.get(f"/v2/models/fake{path}") == await running.get(f"/v2/models/fake/versions/1{path}")
    assert await running.get(f"/v2/models/f%61ke{path}") == await running.get(f"/v2/models/fake{path}")
    for model in ("nobody", "fake/versions/2", "fake/versions/01", "%ff"):
        response = await running.client.get(f"/v2/models/{model}{path}")
        assert (response.status_code, list(response.json())) == (404, ["error"])


async def test_readiness_follows_the_state_of_the_models(running: Running) -> None:
    assert await running.get("/v2/health/ready") == {"ready": True}
    assert await running.get("/v2/models/fake/ready") == {"name": "fake", "ready": True}


async def test_metadata_and_configuration_list_the_tensors_of_a_models_tasks(
    start: Start, tokenizer: TextTokenizer
) -> None:
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer)}
    manifests = (fake_slots_manifest("slots", **sizes), fake_classifier_manifest("judge", **sizes))
    async with start(FakeBackend(tokenizer, manifests)) as running:
        expected = {
            "judge": [
                *("labels", "label_scores", "attention_encoder", "attention_encoder_shape", "source_tokens"),
                *("embedding", "embedding_shape"),
            ],
            "slots": [
                *("text_output", "finish_reason", "score", "num_tokens", "token_ids", "logprobs"),
                *("top_token_ids", "top_logprobs"),
                *(
                    f"attention_{kind}{part}"
                    for kind in (one.kind for one in manifests[0].attention)
                    for part in ("", "_shape")
                ),
                *("source_tokens", "target_tokens", "decoder_input_tokens", "embedding", "embedding_shape"),
            ],
        }
        for model, names in expected.items():
            metadata = await running.get(f"/v2/models/{model}")
            assert (metadata["name"], metadata["versions"], metadata["platform"]) == (model, ["1"], "onnx_onnxv1")
            assert metadata["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}]
            assert [one["name"] for one in metadata["outputs"]] == names
            config = await running.get(f"/v2/models/{model}/config")
            assert (config["name"], config["max_batch_size"]) == (model, 2048)
            assert config["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]
            for mine, reported in zip(config["output"], metadata["outputs"], strict=True):
                assert (mine["name"], mine["dims"]) == (reported["name"], reported["shape"][1:])
                assert mine["data_type"] == f"TYPE_{reported['datatype']}".replace("BYTES", "STRING")
            tensor = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["a dog", "Hund"]}
            outputs = [{"name": name} for name in names]
            response = await running.post(f"/v2/models/{model}/infer", {"inputs": [tensor], "outputs": outputs})
            for found, reported in zip(response.json()["outputs"], metadata["outputs"], strict=True):
                assert found["datatype"] == reported["datatype"]
                pairs = zip(found["shape"], reported["shape"], strict=True)
                assert all(size == expected_size or expected_size == -1 for size, expected_size in pairs), found["name"]


async def test_statistics_are_the_sums_of_the_metrics(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend("fake", "other")) as running:
        await generate(running, ["a dog", "Hund"])
        await generate(running, "a dog")
        (stats,) = (await running.get("/v2/models/fake/stats"))["model_stats"]
        (runner, _) = running.backend.runners
        assert (stats["name"], stats["version"]) == ("fake", "1")
        assert stats["inference_count"] == 3
        assert stats["execution_count"] == runner.num_encodes + runner.num_steps
        parts = stats["inference_stats"]
        assert (parts["success"]["count"], parts["queue"]["count"], parts["compute_infer"]["count"]) == (2, 3, 3)

        async def seconds(name: str) -> float:
            return await running.metric(f'sightline_{name}_seconds_sum{{model_name="fake"}}')

        assert parts["success"]["ns"] == pytest.approx(1e9 * await seconds("e2e_request_latency"), abs=1)
        assert parts["queue"]["ns"] == pytest.approx(1e9 * await seconds("request_queue_time"), abs=1)
        inside = await seconds("request_prefill_time") + await seconds("request_decode_time")
        assert parts["compute_infer"]["ns"] == pytest.approx(1e9 * inside, abs=2)
        assert parts["compute_input"] == parts["compute_output"] == {"count": 3, "ns": 0}
        assert parts["cache_hit"] == parts["cache_miss"] == {"count": 0, "ns": 0}
        both = (await running.get("/v2/models/stats"))["model_stats"]
        assert [one["name"] for one in both] == ["fake", "other"]
        assert both[0] == stats and both[1]["inference_count"] == 0


async def test_the_index_lists_the_models_with_or_without_a_body(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend("one", "two")) as running:
        expected = [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in ("one", "two")]
        assert (await running.client.post("/v2/repository/index")).json() == expected
        assert (await running.post("/v2/repository/index", {"ready": True})).json() == expected


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_the_repository_is_not_changed_unless_the_settings_allow_it(running: Running, verb: str) -> None:
    for name in ("fake", "nobody"):
        response = await running.client.post(f"/v2/repository/models/{name}/{verb}", content=b'{"parameters": {}}')
        assert response.status_code == 403
        assert response.json() == {
            "error": "Models are loaded only when the service starts; set SIGHTLINE_MODEL_CONTROL=explicit to load and "
            "unload them by request."
        }
    assert (await running.client.get("/v2/models/fake/ready")).status_code == 200


async def test_openapi_declares_optional_fields_and_fields_that_are_never_returned(running: Running) -> None:
    paths = (await running.get("/openapi.json"))["paths"]
    assert paths["/v2/repository/index"]["post"]["requestBody"]["required"] is False
    for verb in ("load", "unload"):
        described = paths[f"/v2/repository/models/{{model_name}}/{verb}"]["post"]
        assert described["requestBody"]["required"] is False
        assert {"200", "403", "404"} <= set(described["responses"])
    for path, operations in paths.items():
        parameters = {
            one["name"]: one["schema"] for operation in operations.values() for one in operation["parameters"]
        }
        assert ("model_version" in parameters) == ("{model_version}" in path)
        assert parameters.get("model_version", {"const": "1"})["const"] == "1"


@pytest.mark.parametrize("path", ["/v2/logging", "/v2/models", "/v2/models/fake/trace/setting", "/v2/x"])
async def test_an_unknown_path_is_404_in_the_shape_of_the_protocol(running: Running, path: str) -> None:
    for response in (await running.client.get(path), await running.client.post(path)):
        assert response.status_code == 404
        assert response.json()["error"].startswith("There is no such route.")
        assert response.json()["error"].endswith(" GET /docs lists all routes.")
    assert (await running.client.get("/v2x")).json()["error"]["code"] == "not_found"


async def test_another_method_is_405_in_the_shape_of_the_protocol(running: Running) -> None:
    response = await running.client.post("/v2/models/fake/stats")
    assert (response.status_code, response.headers["allow"]) == (405, "GET")
    assert response.json() == {"error": "/v2/models/{model_name}/stats accepts only GET."}
