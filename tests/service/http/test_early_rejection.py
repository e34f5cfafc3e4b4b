"""Calls that are rejected from their heads get the response that they would get later."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sightline.service.http.early_rejection import ENDPOINTS, EarlyRejection
from sightline.service.inference.service import Service
from tests.service.conftest import MakeBackend, Serve, Wire, changed, classifying, read_all, wait_until
from tests.service.http.test_access import KEYS
from tests.service.http.test_protocol import read_response
from tests.support.dialogues import LINES
from tests.support.fake_runner import LABELS

BODIES: dict[str, Any] = {
    "/v1/generate": {"inputs": "a dog"},
    "/v1/encode": {"inputs": "a dog"},
    "/v1/rerank": {"query": "a", "documents": ["a dog"]},
    "/v2/rerank": {"query": "a", "documents": ["a dog"]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a dog"}], "stream": True},
    "/v1/completions": {"prompt": "a dog", "model": "fake"},
    "/v1/embeddings": {"input": "a dog", "model": "fake"},
    "/embed": {"inputs": "a dog"},
    "/generate": {"inputs": "a dog"},
    "/generate_stream": {"inputs": "a dog"},
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request for which an early rejection was tried, whether it was rejected."""
    find, results = EarlyRejection.find, list[bool]()

    def noted(*arguments: Any) -> Any:
        result = find(*arguments)
        results.append(result is not None)
        return result

    monkeypatch.setattr(EarlyRejection, "find", noted)
    return results


@contextlib.contextmanager
def full(serve: Serve, backend: Any = None, **settings: Any) -> Iterator[tuple[Wire, Service]]:
    """Serve models without a place for another sequence."""
    with serve(backend, max_waiting_sequences=1, max_rows=1, **settings) as wire:
        service: Service = wire.app.state.service
        for model in service.models.values():
            for _ in range(2):
                model.admission.reserve(1, 1)
        yield wire, service


def request(path: str, body: Any, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content


def ask(wire: Wire, data: bytes) -> tuple[int, dict[str, str], Any]:
    with wire.connect() as connection:
        connection.sendall(data)
        response, content = read_response(connection)
    return response.status, {name.lower(): value for name, value in response.getheaders()}, json.loads(content)


def test_an_early_rejection_equals_that_of_admission(
    serve: Serve, make_backend: MakeBackend, found: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Each API has its own form of errors, and each task its own default model."""
    caplog.set_level("INFO", "sightline.access")
    backend = changed(make_backend("fake", "other"), chat=LINES)
    with full(serve, classifying(backend, "ranker", "score", LABELS[:1]), default_model="other,ranker") as both:
        wire, service = both
        assert ENDPOINTS.keys() == BODIES.keys()
        for path, body in BODIES.items():
            responses, lines = [], []
            for full_until in (0.0, float("inf")):  # first by admission
                service.full_until = full_until
                found.clear()
                caplog.clear()
                status, headers, content = ask(wire, request(path, body, "X-Request-Id: same"))
                assert (found, status) == ([True] if full_until else [], 429), path
                responses.append((headers | {"date": ""}, content))
                wait_until(lambda: bool(caplog.records))
                lines.append(vars(caplog.records[0])["fields"] | {"total_ms": 0})
            assert responses[0] == responses[1]
            assert lines[0] == lines[1]
            assert lines[0]["model"] == body.get("model", "ranker" if "rerank" in path else "other")
        metrics = wire.get("/metrics")[1].decode()
        assert f'limit_reached_total{{limit="waiting_sequences"}} {2 * len(BODIES)}.0' in metrics


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/generate", {"inputs": "a dog", "model": "free"}, [], 200),
        ("/v1/generate", {"inputs": "a dog", "model": "unknown"}, [], 404),
        ("/v1/generate", {"inputs": "a dog", "model": []}, [], 422),
        ("/v1/generate", ["a dog"], [], 422),
        ("/v1/generate", {"inputs": "a dog" + 20_000 * " "}, [], 429),
        ("/v1/generate", {"inputs": "a dog"}, ["Origin: http://page"], 429),
        ("/v1/generate", {"inputs": "a dog"}, ["Authorization: Bearer sl-nobody"], 401),
        ("/v1/generate", {"inputs": "a dog", "parameters": {"target_language": "de"}}, [], 422),
        ("/v1/tokenize", {"inputs": "a dog"}, [], 429),
    ],
)
def test_requests_that_may_be_accepted_or_need_another_error_are_read(
    serve: Serve, make_backend: MakeBackend, found: list[bool], path: str, body: Any, headers: list[str], status: int
) -> None:
    keys = {"keys": KEYS} if status == 401 else {}
    with full(serve, make_backend("fake", "free"), default_model="fake", **keys) as (wire, service):
        admission = service.models["free"].admission
        admission.release(next(iter(admission._open)))
        service.full_until = float("inf")
        assert ask(wire, request(path, body, *headers))[0] == status
        assert found == [False]


def test_the_rest_of_a_rejected_body_is_read_and_the_connection_goes_on(serve: Serve, found: list[bool]) -> None:
    with full(serve) as (wire, service), wire.connect() as connection:
        service.full_until = float("inf")
        data = request("/v1/generate", {"inputs": "a dog"}, "X: 1")
        for _ in range(2):
            connection.sendall(data[:-5])  # with one model, the body is not needed
            assert read_response(connection)[0].status == 429
            connection.sendall(data[-5:] + b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_response(connection)[0].status == 200
        assert found == [True, False] * 2
        assert wire.server.bodies.num_bytes == 0


@pytest.mark.parametrize("header", ["Connection: close", "Expect: 100-continue"])
def test_the_last_rejection_of_a_connection_is_read_completely(serve: Serve, header: str) -> None:
    with full(serve) as (wire, service), wire.connect() as connection:
        service.full_until = float("inf")
        data = request("/v1/generate", {"inputs": "a dog" * 100_000}, header)
        connection.sendall(data[:200])
        assert connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 429"
        for start in range(200, len(data), 100_000):
            connection.sendall(data[start : start + 100_000])
        response = read_all(connection)
        assert b"connection: close" in response
        assert response.count(b"HTTP/1.1") == 1


def test_many_rejections_are_delayed_and_sent_in_order(serve: Serve, found: list[bool]) -> None:
    with full(serve) as (wire, service), wire.connect() as connection:
        service.full_until = float("inf")
        service.rejection_pacer._next = time.monotonic() + 0.2  # as after many rejections
        rejected = request("/v1/generate", {"inputs": "a dog"})
        started = time.monotonic()
        connection.sendall(rejected + b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert re.findall(rb"HTTP/1.1 (\d+)", read_all(connection)) == [b"429", b"200"]
        assert time.monotonic() - started > 0.15
        with wire.connect() as gone:
            gone.sendall(rejected)
            wait_until(lambda: len(found) == 2)
        wait_until(lambda: service.rejection_pacer._num_delayed == wire.server.connections.num_open == 0)
