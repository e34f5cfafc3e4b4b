from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.inference.labels import apply_function
from sightline.service.tasks.classify import rank_scores
from tests.service.conftest import MakeBackend, Running, Start, changed, classifying, with_heads
from tests.support.fake_runner import LABELS, Faults, fake_classifier_manifest, fake_label_logits, fake_label_logprobs

pytestmark = pytest.mark.anyio
TEXTS = ["a dog", "Hund und a dog", "x"]


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    async with start(classifying(make_backend()), default_model="judge") as running:
        yield running


async def classify(running: Running, inputs: Any, **fields: Any) -> Any:
    return await running.result("/v1/classify", {"inputs": inputs, **fields})


def test_labels_are_ranked_and_their_scores_sum_to_one() -> None:
    ranked = rank_scores(("a", "b", "c"), apply_function(np.log(np.array([0.2, 0.5, 0.3], np.float32)), "softmax"))
    assert [one.label for one in ranked] == ["b", "c", "a"]
    assert [one.score for one in ranked] == pytest.approx([0.5, 0.3, 0.2])
    assert sum(one.score for one in ranked) == pytest.approx(1, abs=1e-12)


async def test_a_model_without_a_form_of_pairs_reads_single_texts(start: Start, make_backend: MakeBackend) -> None:
    async with start(changed(classifying(make_backend()), reads_pairs=False), default_model="judge") as running:
        assert len((await classify(running, ["a dog"]))["outputs"]) == 1
        status, code, _ = await running.error("/v1/classify", {"inputs": [["a", "dog"]]})
        assert (status, code) == (422, "unsupported_parameter")


def test_labels_with_equal_scores_keep_the_order_of_the_model() -> None:
    ranked = rank_scores(("a", "b", "c"), np.array([0.2, 0.4, 0.4]))
    assert [one.label for one in ranked] == ["b", "c", "a"]


async def test_outputs_keep_the_order_of_the_inputs_and_have_all_labels(
    running: Running, tokenizer: TextTokenizer
) -> None:
    response = await classify(running, TEXTS)
    assert response["model"] == "judge"
    assert [output["index"] for output in response["outputs"]] == [0, 1, 2]
    for text, output in zip(TEXTS, response["outputs"], strict=True):
        assert set(output) == {"index", "labels", "source_tokens", "source_offsets", "maps"}
        assert output["source_tokens"] is output["source_offsets"] is output["maps"] is None
        expected = np.exp(fake_label_logprobs(tokenizer.encode(text)))
        scores = {one["label"]: one["score"] for one in output["labels"]}
        assert [scores[label] for label in LABELS] == pytest.approx(expected.tolist(), rel=1e-5)
        assert sum(scores.values()) == pytest.approx(1, abs=1e-9)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert response["usage"] == {"input_tokens": sum(len(tokenizer.encode(text)) for text in TEXTS), "output_tokens": 0}
    assert set(response["timings_ms"]) == {"tokenize", "queue", "encode", "decode", "total"}


async def test_an_input_in_a_list_is_classified_as_it_is_alone(running: Running) -> None:
    together = (await classify(running, TEXTS, return_attention=True))["outputs"]
    for text, output in zip(TEXTS, together, strict=True):
        (alone,) = (await classify(running, text, return_attention=True))["outputs"]
        assert alone == {**output, "index": 0}


async def test_maps_are_returned_with_their_tokens(running: Running) -> None:
    (output,) = (await classify(running, "Hund x", return_attention=True))["outputs"]
    assert output["source_tokens"] == [" H", "un", "d", " ", "x", "</s>"]
    assert output["source_offsets"] == [[0, 1], [1, 3], [3, 4], [4, 5], [5, 6], None]
    (entry,) = output["maps"]
    assert (entry["kind"], entry["shape"], entry["normalized"]) == ("encoder", [2, 2, 6, 6], True)
    np.testing.assert_allclose(np.reshape(entry["data"], entry["shape"]).sum(axis=-1), 1, rtol=1e-5)
    requested = {"layers": [1], "heads": [1], "encoding": "float"}
    (part,) = (await classify(running, "Hund x", return_attention=requested))["outputs"]
    chosen = np.reshape(entry["data"], entry["shape"])[1:, 1:]
    np.testing.assert_array_equal(np.reshape(part["maps"][0]["data"], part["maps"][0]["shape"]), chosen)


async def test_long_inputs_are_truncated_on_request(running: Running) -> None:
    (cut,) = (await classify(running, "x" * 70, truncate=True, return_attention=True))["outputs"]
    (whole,) = (await classify(running, "x" * 62, return_attention=True))["outputs"]  # with its blank and its end
    assert cut == whole


async def test_maps_that_are_too_large_are_rejected_before_anything_is_computed(
    start: Start, make_backend: MakeBackend
) -> None:
    backend = with_heads(classifying(make_backend()), 200)
    async with start(backend, default_model="judge") as running:
        body = {"inputs": "x" * 62, "return_attention": True}
        assert await running.error("/v1/classify", body) == (422, "response_too_large", None)
        assert [runner.num_encodes for runner in backend.runners] == [0, 0]


async def test_a_model_without_maps_classifies(start: Start, make_backend: MakeBackend) -> None:
    backend = changed(classifying(make_backend()), attention=(), tasks=("encode", "classify"))
    async with start(backend, default_model="judge") as running:
        assert (await classify(running, "x"))["outputs"][0]["labels"]


async def test_scores_that_are_not_finite_are_an_internal_error_of_one_call(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    poisoned = tokenizer.encode("x")[-2]  # the end token is the last
    backend = classifying(make_backend(faults=Faults(nan_id=poisoned)))
    async with start(backend, default_model="judge") as running:
        assert await running.error("/v1/classify", {"inputs": "x"}) == (500, "internal", None)
        assert (await classify(running, "a dog"))["outputs"]


async def test_a_classifier_is_shown_with_its_labels(running: Running) -> None:
    response = (await running.client.get("/v1/models/judge")).json()
    assert response["tasks"] == ["encode", "attention", "classify", "tokenize"]
    assert response["labels"] == list(LABELS)
    assert response["limits"]["max_output_tokens"] == 0
    assert (await running.client.get("/v1/models/fake")).json()["labels"] == []


async def test_a_classifier_returns_embeddings(running: Running) -> None:
    own, other = [
        (await running.post("/v1/encode", {"model": name, "inputs": "a dog"})).json() for name in ("judge", "fake")
    ]
    assert own["embeddings"] == other["embeddings"]


async def test_attention_of_a_classifier_returns_only_encoder_maps(running: Running) -> None:
    response = (await running.post("/v1/attention", {"inputs": "a dog"})).json()
    (explained,) = response["outputs"]
    (output,) = (await classify(running, "a dog", return_attention=True))["outputs"]
    assert (explained["source_tokens"], explained["maps"]) == (output["source_tokens"], output["maps"])
    assert (explained["text"], explained["target_tokens"], explained["decoder_input_tokens"]) == ("", [], [])
    assert explained["finish_reason"] is None
    assert response["usage"] == {"input_tokens": 3, "output_tokens": 0}


async def test_calls_of_every_kind_are_counted(running: Running) -> None:
    await classify(running, TEXTS)
    assert await running.metric('sightline_request_success_total{finished_reason="encoded",model_name="judge"}') == 3


async def test_a_pair_of_texts_is_one_input(running: Running, tokenizer: TextTokenizer) -> None:
    response = await classify(running, [["a dog", "Hund"], "x"])
    expected = np.exp(fake_label_logprobs(tokenizer.encode_pair("a dog", "Hund", None)))
    scores = {one["label"]: one["score"] for one in response["outputs"][0]["labels"]}
    assert [scores[label] for label in LABELS] == pytest.approx(expected.tolist(), rel=1e-5)
    (alone,) = (await classify(running, "x"))["outputs"]
    assert response["outputs"][1] == {**alone, "index": 1}
    long = [["x" * 40, "y" * 40]]
    assert (await classify(running, long, truncate=True))["usage"]["input_tokens"] == 64


async def test_independent_labels_have_probabilities_of_their_own(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = make_backend()
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64}
    backend.manifests = (fake_classifier_manifest("emotions", "independent", **sizes),)
    async with start(backend) as running:
        (output,) = (await classify(running, "a dog"))["outputs"]
        logits = fake_label_logits(tokenizer.encode("a dog")).astype(np.float64)
        scores = {one["label"]: one["score"] for one in output["labels"]}
        assert [scores[label] for label in LABELS] == pytest.approx((1 / (1 + np.exp(-logits))).tolist(), rel=1e-15)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        raw = (await running.post("/predict", {"inputs": "a dog", "raw_scores": True})).json()
        assert {one["label"]: one["score"] for one in raw} == dict(zip(LABELS, logits.tolist(), strict=True))
        details = (await running.client.get("/v1/models/emotions")).json()
        assert (details["tasks"][2], details["label_kind"]) == ("classify", "independent")
