"""The openai package over real sockets: retries, classes of errors and broken streams."""

import threading
import time

import pytest
from openai import APIError, BadRequestError, InternalServerError, NotFoundError, OpenAI

from tests.service.conftest import MakeBackend, Serve, Wire, wait_until
from tests.support.fake_runner import Faults


def client_of(wire: Wire, max_retries: int = 2) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{wire.port}/v1", api_key="none", max_retries=max_retries, timeout=20)


def num_rejected_calls(wire: Wire) -> int:
    """Return the number of completions that got 429."""
    _, text = wire.get("/metrics")
    prefix = b'sightline_http_requests_total{route="/v1/completions",status="429"} '
    return sum(int(float(line.removeprefix(prefix))) for line in text.splitlines() if line.startswith(prefix))


def test_a_full_queue_is_retried_after_the_time_of_retry_after(serve: Serve, make_backend: MakeBackend) -> None:
    hang = threading.Event()
    backend = make_backend(faults=Faults(hang=hang))
    with serve(backend, max_rows=1, max_waiting_sequences=1) as wire, client_of(wire) as client:
        others = [threading.Thread(target=wire.post, args=("/v1/generate", {"inputs": "x"})) for _ in range(2)]
        for other in others:
            other.start()
        wait_until(lambda: backend.num_busy == 2)

        def release() -> None:
            wait_until(lambda: num_rejected_calls(wire) == 1)
            hang.set()

        releasing = threading.Thread(target=release)
        releasing.start()
        started = time.monotonic()
        completion = client.completions.create(model="fake", prompt="a dog")
        assert completion.choices[0].text
        assert time.monotonic() - started >= 1  # Retry-After; without it the package waits half a second at the most
        for thread in (*others, releasing):
            thread.join()


def test_a_loading_service_is_retried(serve: Serve, make_backend: MakeBackend) -> None:
    loading = threading.Event()
    with serve(make_backend(wait_for=loading)) as wire:
        with client_of(wire, max_retries=0) as impatient, pytest.raises(InternalServerError) as caught:
            impatient.completions.create(model="fake", prompt="a dog")
        assert (caught.value.status_code, caught.value.code) == (503, "loading")
        assert caught.value.response.headers["retry-after"] == "1"
        loading.set()
        with client_of(wire) as client:
            assert client.completions.create(model="fake", prompt="a dog").choices[0].finish_reason == "stop"


def test_warnings_are_extra_fields_of_a_completion(serve: Serve, make_backend: MakeBackend) -> None:
    backend = make_backend()
    backend.manifests = tuple(one.model_copy(update={"training_unit": "sentence"}) for one in backend.manifests)
    with serve(backend) as wire, client_of(wire) as client:
        whole = client.completions.create(model="fake", prompt="A dog. A man.")
        assert whole.model_extra is not None
        assert [one["param"] for one in whole.model_extra["warnings"]] == ["prompt"]
        events = list(client.completions.create(model="fake", prompt="A dog. A man.", stream=True))
        found = [event.model_extra["warnings"] for event in events if event.model_extra]
        assert found == [whole.model_extra["warnings"]]
        assert not client.completions.create(model="fake", prompt="A dog.").model_extra


def test_an_invalid_request_raises_its_own_class_of_error_that_names_the_field(serve: Serve) -> None:
    with serve() as wire, client_of(wire) as client:
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="fake", prompt="a dog", best_of=2)
        assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")
        assert caught.value.type == "invalid_request_error"
        assert caught.value.request_id == caught.value.response.headers["x-request-id"]
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="fake", prompt="a dog", max_tokens=10_000)
        assert (caught.value.param, caught.value.code) == ("max_tokens", "invalid_parameter")
        assert "max_tokens must be at most 64 for fake, got 10000." in caught.value.message
        with pytest.raises(NotFoundError) as missing:
            client.completions.create(model="gpt", prompt="a dog")
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
        with pytest.raises(BadRequestError) as malformed:
            client.post(
                "/completions", content=b"{", options={"headers": {"content-type": "application/json"}}, cast_to=object
            )
        assert malformed.value.code == "malformed_json"


def test_a_broken_stream_raises_after_the_received_events(serve: Serve, make_backend: MakeBackend) -> None:
    with (
        serve(make_backend(faults=Faults(step_calls=frozenset({4})))) as wire,
        client_of(wire) as client,
        client.completions.create(model="fake", prompt="a dog", stream=True, extra_body={"min_tokens": 20}) as stream,
    ):
        assert next(stream).choices[0].finish_reason is None
        with pytest.raises(APIError) as caught:
            list(stream)
        assert caught.value.code == "internal"
