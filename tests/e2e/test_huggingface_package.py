"""huggingface_hub's clients, unmodified, against the service with real models."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient, close_session
from huggingface_hub.errors import HfHubHTTPError

from lab.bench.server import RunningServer, serving
from tests.e2e.asking import post

PROMPT = "Two girls are playing."
OTHERS = ["A man sleeps.", "A boy rides."]


@pytest.fixture(scope="module")
def server(bundle: Path, classifier_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("served")
    for source in (bundle, classifier_bundle):
        shutil.copytree(source, folder / source.name)
    manifest = folder / "toy" / "manifest.json"
    translating = json.loads(manifest.read_text()) | {"languages": {"sources": ["en"], "targets": ["de"]}}
    manifest.write_text(json.dumps(translating))
    with serving(folder, default_model="toy", workers=1) as server:
        yield server
    close_session()  # the package keeps connections for the process


@pytest.fixture
def client(server: RunningServer) -> InferenceClient:
    return InferenceClient(server.url)


def own_output(server: RunningServer, prompt: str = PROMPT, **parameters: Any) -> Any:
    return post(server, "/v1/generate", {"inputs": prompt, "parameters": parameters})["outputs"][0]


@pytest.mark.parametrize("path", ["", "/", "/generate", "/?model=toy"])
def test_a_text_equals_that_of_generate(server: RunningServer, path: str) -> None:
    text = InferenceClient(server.url + path).text_generation(PROMPT, max_new_tokens=16)
    assert text == own_output(server, max_new_tokens=16)["text"]


def test_details_have_the_tokens(server: RunningServer, client: InferenceClient) -> None:
    response = client.text_generation(PROMPT, details=True, max_new_tokens=12, top_n_tokens=2, return_full_text=False)
    own = own_output(server, max_new_tokens=12, top_logprobs=2)
    assert (response.generated_text, response.details is not None) == (own["text"], True)
    details = response.details
    assert details is not None
    assert details.finish_reason == {"length": "length", "eos": "eos_token"}[own["finish_reason"]]
    assert (details.generated_tokens, details.prefill, details.seed) == (len(own["tokens"]), [], None)
    assert [(token.id, token.text, token.logprob) for token in details.tokens] == [
        (token["id"], token["text"], token["logprob"]) for token in own["tokens"]
    ]
    assert details.top_tokens is not None
    for top, token in zip(details.top_tokens, own["tokens"], strict=True):
        assert [one["id"] for one in top] == [one["id"] for one in token["alternatives"]]


def test_parameters_are_those_of_generate(server: RunningServer, client: InferenceClient) -> None:
    drawn = client.text_generation(PROMPT, do_sample=True, temperature=1.3, top_k=50, top_p=0.9, seed=7, details=True)
    own = own_output(server, do_sample=True, temperature=1.3, top_k=50, top_p=0.9, seed=7)
    assert drawn.details is not None
    assert (drawn.generated_text, drawn.details.seed) == (own["text"], 7)
    whole = own_output(server, repetition_penalty=1.4, max_new_tokens=20)["text"]
    stop = whole[5:8]
    cut = client.text_generation(PROMPT, repetition_penalty=1.4, max_new_tokens=20, stop=[stop])
    assert cut == whole[: whole.index(stop)]


@pytest.mark.parametrize("path", ["", "/generate", "/generate_stream"])
def test_a_stream_forms_the_whole_text(server: RunningServer, path: str) -> None:
    client = InferenceClient(server.url + path)
    own = own_output(server, max_new_tokens=16)
    assert "".join(client.text_generation(PROMPT, max_new_tokens=16, stream=True)) == own["text"]
    *events, last = client.text_generation(PROMPT, max_new_tokens=16, stream=True, details=True)
    assert [event.token.id for event in (*events, last)] == [token["id"] for token in own["tokens"]]
    assert {(event.generated_text, event.details) for event in events} == {(None, None)}
    assert last.generated_text == own["text"]
    assert last.details is not None
    assert last.details.generated_tokens == last.index == len(own["tokens"])
    usage = post(server, "/v1/encode", {"inputs": PROMPT})["usage"]
    assert last.details.input_length == usage["input_tokens"]


@pytest.mark.anyio
async def test_the_asynchronous_client_gives_the_same(server: RunningServer) -> None:
    text = own_output(server, max_new_tokens=16)["text"]
    async with AsyncInferenceClient(server.url) as client:
        assert await client.text_generation(PROMPT, max_new_tokens=16) == text
        stream = await client.text_generation(PROMPT, max_new_tokens=16, stream=True)
        assert "".join([piece async for piece in stream]) == text


def test_a_causal_model_continues_the_input_and_full_text_includes_it(shipped: RunningServer) -> None:
    client = InferenceClient(f"{shipped.url}/?model=smalltalk-chat-gatt")
    prompt = "User: Hello!\nBot:"
    text = client.text_generation(prompt)
    assert text.startswith(" ")
    assert client.text_generation(prompt, return_full_text=True) == prompt + text
    assert "".join(client.text_generation(prompt, stream=True)) == text


def test_a_translation_is_the_text_of_a_model_that_translates(server: RunningServer) -> None:
    client = InferenceClient(f"{server.url}/?model=toy")
    assert client.translation(PROMPT).translation_text == own_output(server)["text"]


@pytest.mark.parametrize("method", ["translation", "text_classification", "feature_extraction", "token_classification"])
def test_a_task_that_the_request_does_not_tell_is_an_error_with_the_models(
    client: InferenceClient, method: str
) -> None:
    """The client sends the same body for each of these tasks."""
    with pytest.raises(
        HfHubHTTPError, match=r"\?model=NAME: toy-classifier for text-classification, toy for text2text"
    ):
        getattr(client, method)(PROMPT)


def test_features_are_those_of_encode(server: RunningServer) -> None:
    client = InferenceClient(f"{server.url}/embed")
    own = post(server, "/v1/encode", {"inputs": [PROMPT, *OTHERS], "normalize": True})["embeddings"]
    np.testing.assert_array_equal(client.feature_extraction([PROMPT, *OTHERS]), np.array(own, np.float32))
    np.testing.assert_array_equal(client.feature_extraction(PROMPT), np.array(own[:1], np.float32))
    raw = post(server, "/v1/encode", {"inputs": PROMPT})["embeddings"]
    np.testing.assert_array_equal(client.feature_extraction(PROMPT, normalize=False), np.array(raw, np.float32))
    long = "a girl " * 400
    cut = post(server, "/v1/encode", {"inputs": long, "normalize": True, "truncate": True})["embeddings"]
    options: dict[str, Any] = {"truncation_direction": "right", "dimensions": 32, "encoding_format": "float"}
    found = client.feature_extraction(long, truncate=True, normalize=True, **options)
    np.testing.assert_array_equal(found, np.array(cut, np.float32))
    rows = InferenceClient(f"{server.url}/embed_all").feature_extraction(PROMPT)
    per_token = post(server, "/v1/encode", {"inputs": PROMPT, "pooling": "none"})
    np.testing.assert_array_equal(rows[0].ravel(), np.array(per_token["embeddings"][0], np.float32))
    assert rows.shape == (1, *per_token["shapes"][0])


def test_similarities_are_the_cosines_of_embeddings(server: RunningServer) -> None:
    vectors = post(server, "/v1/encode", {"inputs": [PROMPT, *OTHERS], "normalize": True})["embeddings"]
    found = InferenceClient(f"{server.url}/similarity").sentence_similarity(PROMPT, other_sentences=OTHERS)
    assert found == pytest.approx([float(np.dot(vectors[0], other)) for other in vectors[1:]], abs=1e-6)
    assert found[0] != pytest.approx(found[1], abs=1e-4)


@pytest.mark.parametrize("path", ["/predict", "/"])
def test_labels_are_those_of_classify(server: RunningServer, path: str) -> None:
    client = InferenceClient(f"{server.url}{path}?model=toy-classifier")
    own = post(server, "/v1/classify", {"model": "toy-classifier", "inputs": PROMPT})["outputs"][0]["labels"]
    found = client.text_classification(PROMPT)
    assert [(one.label, one.score) for one in found] == [(one["label"], one["score"]) for one in own]
    assert client.text_classification(PROMPT, top_k=1, function_to_apply="softmax") == found[:1]


def test_health_and_info_are_found(server: RunningServer) -> None:
    client = InferenceClient(server.url, provider="hf-inference")
    assert client.health_check()
    info = client.get_endpoint_info()
    assert (info["model_id"], info["model_type"]) == ("toy", {"embedding": {"pooling": "mean"}})
