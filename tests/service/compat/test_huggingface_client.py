"""The huggingface_hub package, unmodified, over real sockets: results, errors, full queues and
broken streams.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient, close_session
from huggingface_hub.errors import (
    GenerationError,
    HfHubHTTPError,
    OverloadedError,
    TextGenerationError,
    ValidationError,
)

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import MakeBackend, Serve, Wire, causal_backend, classifying, wait_until, with_languages
from tests.support.fake_runner import Faults

PROMPT = "a dog"
OTHERS = ["Hund", "x"]


@pytest.fixture(scope="module")
def translating(serve: Serve, make_backend: MakeBackend) -> Iterator[Wire]:
    """A service with the translator `fake` and the classifier `judge`."""
    with serve(classifying(with_languages(make_backend(), fake="en-de")), default_model="fake") as wire:
        yield wire


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    """The package keeps connections for the process."""
    yield
    close_session()


def client_of(wire: Wire, path: str = "") -> InferenceClient:
    return InferenceClient(f"http://127.0.0.1:{wire.port}{path}", timeout=20)


def response_of(caught: pytest.ExceptionInfo[TextGenerationError]) -> tuple[int, str | None]:
    cause = caught.value.__cause__
    assert isinstance(cause, HfHubHTTPError)
    return cause.response.status_code, cause.response.headers.get("retry-after")


def own_output(wire: Wire, **parameters: Any) -> Any:
    return wire.result("/v1/generate", {"inputs": PROMPT, "parameters": parameters})["outputs"][0]


@pytest.mark.parametrize("path", ["", "/", "/generate", "/?model=fake"])
def test_a_text_equals_that_of_generate(translating: Wire, path: str) -> None:
    text = client_of(translating, path).text_generation(PROMPT, max_new_tokens=16)
    assert text == own_output(translating, max_new_tokens=16)["text"]


def test_details_have_the_tokens(translating: Wire) -> None:
    response = client_of(translating).text_generation(
        PROMPT, details=True, max_new_tokens=12, top_n_tokens=2, return_full_text=False
    )
    own = own_output(translating, max_new_tokens=12, top_logprobs=2)
    assert response.generated_text == own["text"]
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


def test_parameters_are_those_of_generate(translating: Wire) -> None:
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 50, "top_p": 0.9, "seed": 7}
    drawn = client_of(translating).text_generation(PROMPT, details=True, **sampling)
    assert drawn.details is not None
    assert (drawn.generated_text, drawn.details.seed) == (own_output(translating, **sampling)["text"], 7)
    whole = own_output(translating, repetition_penalty=1.4, max_new_tokens=20)["text"]
    stop = whole[1:3]
    cut = client_of(translating).text_generation(PROMPT, repetition_penalty=1.4, max_new_tokens=20, stop=[stop])
    assert cut == whole[: whole.index(stop)]


@pytest.mark.parametrize("path", ["", "/generate", "/generate_stream"])
def test_a_stream_forms_the_whole_text(translating: Wire, path: str) -> None:
    client = client_of(translating, path)
    own = own_output(translating, max_new_tokens=16)
    assert "".join(client.text_generation(PROMPT, max_new_tokens=16, stream=True)) == own["text"]
    *events, last = client.text_generation(PROMPT, max_new_tokens=16, stream=True, details=True)
    assert [event.token.id for event in (*events, last)] == [token["id"] for token in own["tokens"]]
    assert {(event.generated_text, event.details) for event in events} == {(None, None)}
    assert last.generated_text == own["text"]
    assert last.details is not None
    assert last.details.generated_tokens == last.index == len(own["tokens"])
    assert last.details.input_length == translating.result("/v1/encode", {"inputs": PROMPT})["usage"]["input_tokens"]


@pytest.mark.anyio
async def test_the_asynchronous_client_gives_the_same(translating: Wire) -> None:
    text = own_output(translating, max_new_tokens=16)["text"]
    async with AsyncInferenceClient(f"http://127.0.0.1:{translating.port}") as client:
        assert await client.text_generation(PROMPT, max_new_tokens=16) == text
        stream = await client.text_generation(PROMPT, max_new_tokens=16, stream=True)
        assert "".join([piece async for piece in stream]) == text


def test_a_causal_model_continues_the_input_and_full_text_includes_it(serve: Serve, tokenizer: TextTokenizer) -> None:
    with serve(causal_backend(tokenizer)) as wire:
        client = client_of(wire)
        text = client.text_generation(PROMPT)
        assert client.text_generation(PROMPT, return_full_text=True) == PROMPT + text
        assert "".join(client.text_generation(PROMPT, stream=True)) == text


def test_a_translation_is_the_text_of_a_model_that_translates(translating: Wire) -> None:
    text = client_of(translating, "/?model=fake").translation(PROMPT).translation_text
    assert text == own_output(translating)["text"]


@pytest.mark.parametrize("method", ["translation", "text_classification", "feature_extraction", "token_classification"])
def test_a_task_that_the_request_does_not_tell_is_an_error_with_the_models(translating: Wire, method: str) -> None:
    """The client sends the same body for each of these tasks."""
    with pytest.raises(HfHubHTTPError, match=r"\?model=NAME: judge for text-classification, fake for text2"):
        getattr(client_of(translating), method)(PROMPT)


def test_features_are_those_of_encode(translating: Wire) -> None:
    def own(inputs: Any, **options: Any) -> Any:
        return np.array(translating.result("/v1/encode", {"inputs": inputs, **options})["embeddings"], np.float32)

    client = client_of(translating, "/embed")
    texts = [PROMPT, *OTHERS]
    np.testing.assert_array_equal(client.feature_extraction(texts), own(texts, normalize=True))
    np.testing.assert_array_equal(client.feature_extraction(PROMPT), own(PROMPT, normalize=True))
    np.testing.assert_array_equal(client.feature_extraction(PROMPT, normalize=False), own(PROMPT))
    options: dict[str, Any] = {"truncation_direction": "right", "dimensions": 4, "encoding_format": "float"}
    found = client.feature_extraction("a dog " * 400, truncate=True, normalize=True, **options)
    np.testing.assert_array_equal(found, own("a dog " * 400, truncate=True, normalize=True))
    rows = client_of(translating, "/embed_all").feature_extraction(PROMPT)
    np.testing.assert_array_equal(rows, own(PROMPT, pooling="none").reshape(1, -1, 4))


def test_similarities_are_the_cosines_of_embeddings(translating: Wire) -> None:
    vectors = translating.result("/v1/encode", {"inputs": [PROMPT, *OTHERS], "normalize": True})["embeddings"]
    found = client_of(translating, "/similarity").sentence_similarity(PROMPT, other_sentences=OTHERS)
    assert found == pytest.approx([float(np.dot(vectors[0], other)) for other in vectors[1:]], abs=1e-6)


@pytest.mark.parametrize("path", ["/predict", "/"])
def test_labels_are_those_of_classify(translating: Wire, path: str) -> None:
    client = client_of(translating, f"{path}?model=judge")
    own = translating.result("/v1/classify", {"model": "judge", "inputs": PROMPT})["outputs"][0]["labels"]
    found = client.text_classification(PROMPT)
    assert [(one.label, one.score) for one in found] == [(one["label"], one["score"]) for one in own]
    assert client.text_classification(PROMPT, top_k=1, function_to_apply="softmax") == found[:1]


def test_health_and_info_are_found(translating: Wire) -> None:
    client = InferenceClient(f"http://127.0.0.1:{translating.port}", provider="hf-inference")
    assert client.health_check()
    info = client.get_endpoint_info()
    assert (info["model_id"], info["model_type"]) == ("fake", {"embedding": {"pooling": "mean"}})


def test_an_invalid_request_raises_a_validation_error_that_names_the_field(serve: Serve) -> None:
    with serve() as wire:
        with pytest.raises(ValidationError, match=r"^parameters\.best_of must be 1 or null") as caught:
            client_of(wire).text_generation("a dog", best_of=2)
        assert response_of(caught) == (422, None)
        with pytest.raises(ValidationError, match=r"^parameters\.max_new_tokens must be at most 64"):
            client_of(wire).text_generation("a dog", max_new_tokens=65, stream=True)
        with pytest.raises(ValidationError, match=r"^There is no model of this name"):
            client_of(wire, "/?model=gpt").text_generation("a dog")
        with pytest.raises(
            HfHubHTTPError, match="inputs must have at most 64 tokens for this model, got 71"
        ) as too_long:
            client_of(wire, "/embed").feature_extraction("x" * 69)
        assert too_long.value.response.status_code == 422
        with pytest.raises(HfHubHTTPError, match=r"No model of this service can do the task classify"):
            client_of(wire, "/predict").text_classification("a dog")


def test_a_full_queue_and_a_loading_service_raise_overloaded(serve: Serve, make_backend: MakeBackend) -> None:
    loading, hang = threading.Event(), threading.Event()
    with serve(make_backend(wait_for=loading)) as wire:
        with pytest.raises(OverloadedError, match="The models are being loaded") as caught:
            client_of(wire).text_generation("a dog")
        assert response_of(caught) == (503, "1")
        health = InferenceClient(f"http://127.0.0.1:{wire.port}", provider="hf-inference")
        assert not health.health_check()
        loading.set()
        wait_until(health.health_check)
    backend = make_backend(faults=Faults(hang=hang))
    with serve(backend, max_rows=1, max_waiting_sequences=1) as wire:
        others = [threading.Thread(target=wire.post, args=("/v1/generate", {"inputs": "x"})) for _ in range(2)]
        for other in others:
            other.start()
        wait_until(lambda: backend.num_busy == 2)
        for stream in (False, True):
            with pytest.raises(OverloadedError, match="The queue is full") as caught:
                client_of(wire).text_generation("a dog", stream=stream)
            assert response_of(caught) == (429, "1")
        with pytest.raises(HfHubHTTPError) as full:
            client_of(wire, "/embed").feature_extraction("a dog")
        assert (full.value.response.status_code, full.value.response.headers["retry-after"]) == (429, "1")
        hang.set()
        for other in others:
            other.join()


def test_a_broken_stream_raises_after_the_received_events(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(make_backend(faults=Faults(step_calls=frozenset({4})))) as wire:
        client = client_of(wire)  # which closes its streams when it goes
        stream = client.text_generation("two men", stream=True, repetition_penalty=1.5)
        assert next(iter(stream))
        with pytest.raises(GenerationError, match="Internal error; the log has the details"):
            list(stream)
