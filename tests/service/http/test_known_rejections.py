"""Calls whose heads are known get the response that they would get from admission."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sightline.service.http import dispatch
from sightline.service.http.known_rejections import PATHS, KnownRejections
from sightline.service.inference.service import Service
from tests.service.conftest import MakeBackend, Serve, Wire, changed, classifying, read_all, wait_until
from tests.service.http.test_access import KEYS, USE
from tests.service.http.test_protocol import read_response
from tests.support.dialogues import LINES
from tests.support.fake_runner import LABELS

INPUTS, RERANK = {"inputs": "a dog"}, {"query": "a", "documents": ["a dog"]}
BODIES: dict[str, Any] = {
    **dict.fromkeys(("/v1/generate", "/v1/encode", "/embed", "/generate", "/generate_stream"), INPUTS),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank"), RERANK),
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a dog"}], "stream": True},
    "/v1/responses": {"input": "a dog", "stream": True},
    "/v1/completions": {"prompt": "a dog", "model": "fake"},
    "/v1/embeddings": {"input": "a dog", "model": "fake"},
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request that arrived while the queue was full, whether its rejection was known."""
    find, results = KnownRejections.find, list[bool]()

    def noted(*arguments: Any) -> Any:
        result = find(*arguments)
        results.append(result is not None)
        return result

    monkeypatch.setattr(KnownRejections, "find", noted)
    monkeypatch.setattr(dispatch, "FULL_S", 1000)
    return results


@contextlib.contextmanager
def full(serve: Serve, backend: Any = None, **settings: Any) -> Iterator[tuple[Wire, Service]]:
    """Serve models without a place for another sequence."""
    with serve(backend, max_waiting_sequences=1, max_rows=1, **settings) as wire:
        service: Service = wire.app.state.service
        service.full_until = float("inf")
        for model in service.models.values():
            for _ in range(2):
                model.admission.reserve(1, 1)
        yield wire, service


def request(path: str, body: Any, *headers: str) -> bytes:
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content


def ask(wire: Wire, data: bytes) -> tuple[int, dict[str, str], str]:
    """Return the status, the headers and the body of a response, without its id and its date."""
    with wire.connect() as connection:
        connection.sendall(data)
        response, content = read_response(connection)
    headers = {name.lower(): value for name, value in response.getheaders() if name.lower() != "date"}
    request_id = headers.pop("x-request-id")
    return response.status, headers, content.decode().replace(request_id, "ID")


def test_a_repeated_rejection_equals_that_of_admission(
    serve: Serve, make_backend: MakeBackend, found: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Each API has its own form of errors, and each task its own default model."""
    caplog.set_level("INFO", "sightline.access")
    backend = changed(make_backend("fake", "other"), chat=LINES)
    with full(serve, classifying(backend, "ranker", "score", LABELS[:1]), default_model="other,ranker") as both:
        wire, _ = both
        assert BODIES.keys() == PATHS
        for path, body in BODIES.items():
            found.clear()
            caplog.clear()
            first, second = (ask(wire, request(path, body, "Connection: keep-alive")) for _ in range(2))
            assert (found, first[0]) == ([False, True], 429), path
            assert first == second
            wait_until(lambda: len(caplog.records) == 2)
            lines = [vars(record)["fields"] | {"total_ms": 0} for record in caplog.records]
            assert lines[0].pop("request_id") != lines[1].pop("request_id")
            assert lines[0] == lines[1]
            assert lines[0]["model"] == body.get("model", "ranker" if "rerank" in path else "other")
        metrics = wire.get("/metrics")[1].decode()
        assert f'limit_reached_total{{limit="waiting_sequences"}} {2 * len(BODIES)}.0' in metrics


@pytest.mark.parametrize(
    ("path", "body", "header", "status"),
    [
        ("/v1/generate", INPUTS | {"model": "free"}, "", 200),
        ("/v1/generate", INPUTS | {"model": "none"}, "", 404),
        ("/v1/generate", INPUTS | {"model": [1, 2]}, "", 422),
        ("/v1/generate", INPUTS | {"parameters": {"target_language": "de"}}, "", 422),
        ("/v1/generate", {"inputs": "a dog" + 20_000 * " "}, "", 429),
        ("/v1/generate", INPUTS, "Origin: http://page", 429),
        ("/v1/generate", INPUTS, "Connection: close", 429),
        ("/v1/tokenize", INPUTS, "", 429),
    ],
)
def test_requests_that_may_be_accepted_or_need_another_response_are_read(
    serve: Serve, make_backend: MakeBackend, found: list[bool], path: str, body: Any, header: str, status: int
) -> None:
    """A request for the full model, with the same head, is known before."""
    size, headers = len(json.dumps(body)), [header] if header else []
    with full(serve, make_backend("fake", "free"), default_model="fake") as (wire, service):
        admission = service.models["free"].admission
        admission.release(next(iter(admission._open)))
        assert ask(wire, request(path, json.dumps(INPUTS).ljust(size), *headers))[0] == 429
        assert ask(wire, request(path, body, *headers))[0] == status
        assert not any(found)


def test_only_the_same_key_and_only_while_the_queue_is_full(
    serve: Serve, found: list[bool], make_backend: MakeBackend
) -> None:
    data = [
        request("/v1/generate", {"inputs": "a dog"}, f"X-API-Key: {secret}")
        for secret in (USE["x-api-key"], "sl-nobody")
    ]
    with full(serve, keys=KEYS) as (wire, service):
        assert [ask(wire, data[index])[0] for index in (0, 0, 1, 1)] == [429, 429, 401, 401]
        assert found == [False, True, False, False]
        admission = next(iter(service.models.values())).admission
        for reservation in list(admission._open):
            admission.release(reservation)
        assert ask(wire, data[0])[0] == 200
        assert found[-1] is False


def test_a_connection_goes_on_after_a_repeated_rejection(serve: Serve, found: list[bool]) -> None:
    health = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    data = request("/v1/generate", INPUTS)
    with full(serve) as (wire, _), wire.connect() as connection:
        for requests, last, is_known in (
            (b"", data, False),
            (b"", data, True),
            (data, health, False),
            (b"", data, True),
        ):
            found.clear()
            for part in (requests + last[:-5], last[-5:]) if requests else (last,):
                connection.sendall(part)
                wait_until(lambda: bool(found))
            statuses = [b"429", b"200"] if requests else [b"429"]
            received = b""
            while len(seen := re.findall(rb"HTTP/1.1 (\d+)", received)) < len(statuses):
                received += connection.recv(65536)
            assert (seen, found[0]) == (statuses, is_known)
        assert wire.server.bodies.num_bytes == 0


def test_many_rejections_are_delayed_and_sent_in_order(serve: Serve, found: list[bool]) -> None:
    rejected = request("/v1/generate", INPUTS)
    with full(serve) as (wire, service), wire.connect() as connection:
        ask(wire, rejected)
        service.rejection_pacer._next = time.monotonic() + 0.2  # as after many rejections
        started = time.monotonic()
        connection.sendall(rejected)
        wait_until(lambda: found[1:] == [True])
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert re.findall(rb"HTTP/1.1 (\d+)", read_all(connection)) == [b"429", b"200"]
        assert time.monotonic() - started > 0.15
        with wire.connect() as gone:
            gone.sendall(rejected)
            wait_until(lambda: found[1:] == [True, True])
        wait_until(lambda: service.rejection_pacer._num_delayed == wire.server.connections.num_open == 0)
