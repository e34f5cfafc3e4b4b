"""The huggingface_hub package over real sockets: errors, full queues and broken streams."""

import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import InferenceClient, close_session
from huggingface_hub.errors import (
    GenerationError,
    HfHubHTTPError,
    OverloadedError,
    TextGenerationError,
    ValidationError,
)

from tests.service.conftest import MakeBackend, Serve, Wire, wait_until
from tests.support.fake_runner import Faults


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
