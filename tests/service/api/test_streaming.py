"""Streams over a real socket: events, their times, errors and disconnections."""

import contextlib
import gc
import http.client
import json
import logging
import re
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from sightline.service import logs
from tests.service.conftest import MakeBackend, Serve, Wire, read_all, wait_until, with_heads
from tests.support.fake_runner import Faults
from tests.support.tables import read_table

LONG = {"min_new_tokens": 60, "max_new_tokens": 60}


def open_stream(wire: Wire, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = wire.http()
    content = orjson.dumps({"stream": True, **body})
    connection.request("POST", "/v1/generate", content, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def events(wire: Wire, body: dict[str, Any]) -> list[str]:
    connection, response = open_stream(wire, body)
    with contextlib.closing(connection):
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        frames = response.read().decode().split("\n\n")
        assert frames[-1] == ""
        return frames[:-1]


def parsed(frames: list[str]) -> list[Any]:
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@pytest.mark.parametrize("parameters", read_table(__file__))
def test_a_stream_equals_the_whole_response(serve: Serve, parameters: dict[str, Any]) -> None:
    with serve() as wire:
        inputs = ["a dog", "Hund", "naïve 🙂"]
        _, whole = wire.post("/v1/generate", {"inputs": inputs, "parameters": parameters})
        frames = events(wire, {"inputs": inputs, "parameters": parameters})
        assert frames[-1] == "data: [DONE]"
        sent = parsed(frames[:-1])
        for output in whole["outputs"]:
            mine = [event for event in sent if event["index"] == output["index"]]
            *tokens, end = mine
            assert [event["token"] for event in tokens] == output["tokens"]
            assert "".join(event["text"] for event in tokens) == end["text"] == output["text"]
            assert (end["finish_reason"], end["score"]) == (output["finish_reason"], output["score"])
            assert end["usage"]["output_tokens"] == len(output["tokens"])
            assert (end.get("seed"), end.get("attention")) == (output.get("seed"), output.get("attention"))
            assert set(end["timings_ms"]) == {"tokenize", "queue", "encode", "decode", "total"}
        assert (
            sum(event["usage"]["input_tokens"] for event in sent if "usage" in event) == whole["usage"]["input_tokens"]
        )


def test_the_first_piece_contains_the_prefix(serve: Serve) -> None:
    with serve() as wire:
        body = {"inputs": ["x", "y"], "parameters": {"target_prefix": ["a dog", "Hund"], "max_new_tokens": 3}}
        sent = parsed(events(wire, body)[:-1])
        for index, prefix in enumerate(("a dog", "Hund")):
            pieces = [event["text"] for event in sent if event["index"] == index and "token" in event]
            assert pieces[0].startswith(prefix)
            assert not any(prefix in piece for piece in pieces[1:])


def test_too_many_maps_end_the_stream_with_an_error(serve: Serve, make_backend: MakeBackend) -> None:
    """Regression: tokens of the step that failed were lost."""
    with serve(with_heads(make_backend(), 200)) as wire:
        parameters = {"return_attention": {"kinds": ["cross"]}, "stop": "never comes", **LONG}
        frames = events(wire, {"inputs": "x" * 62, "parameters": parameters})
        # Every token came of which the maps still fitted: a row has 2 * 200 * 64 numbers.
        assert len(parsed(frames[:-1])) == 1_000_000 // (2 * 200 * 64)
        assert json.loads(frames[-1].split("data: ")[1])["error"]["code"] == "response_too_large"
        wire.wait_idle()


def test_tokens_are_sent_as_they_are_generated(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(make_backend(step_s=0.02)) as wire:
        connection, response = open_stream(wire, {"inputs": "x", "parameters": {"min_new_tokens": 10}})
        with contextlib.closing(connection):
            arrivals = []
            while line := response.readline():
                if line.startswith(b"data:"):
                    arrivals.append(time.monotonic())
        assert arrivals[9] - arrivals[0] > 5 * 0.02


def test_an_error_before_the_first_token_has_its_own_status(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(make_backend(faults=Faults(step_calls=frozenset({1})))) as wire:
        assert wire.post("/v1/generate", {"inputs": "x", "stream": True})[0] == 500


def test_an_error_after_the_first_token_is_an_event_and_ends_the_stream(
    serve: Serve, make_backend: MakeBackend
) -> None:
    with serve(make_backend(faults=Faults(step_calls=frozenset(range(4, 100))))) as wire:
        frames = events(wire, {"inputs": ["x", "y"], "parameters": LONG})
        assert frames[-1].startswith("event: error\ndata: ")
        error = json.loads(frames[-1].split("data: ")[1])["error"]
        assert (error["code"], error["type"]) == ("internal", "server_error")
        assert not any("[DONE]" in frame for frame in frames)
        wire.wait_idle()
        assert b'sightline_request_failure_total{code="internal",model_name="fake"} 1.0' in wire.get("/metrics")[1]


def test_a_deadline_that_passes_during_a_stream_is_an_event(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(make_backend(step_s=0.02)) as wire:
        connection = wire.http()
        headers = {"Content-Type": "application/json", "X-Request-Timeout-Ms": "500"}
        connection.request(
            "POST", "/v1/generate", orjson.dumps({"inputs": "x", "stream": True, "parameters": LONG}), headers
        )
        with contextlib.closing(connection):
            assert b'event: error\ndata: {"error":{"code":"deadline_exceeded"' in connection.getresponse().read()
        wire.wait_idle()


def leave(connection: http.client.HTTPConnection) -> None:
    """Close as a process that is killed does."""
    assert connection.sock is not None
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_disconnects_frees_its_rows_within_a_step(
    serve: Serve, make_backend: MakeBackend, is_streaming: bool
) -> None:
    step_s = 0.02
    with serve(make_backend(step_s=step_s)) as wire:
        body = orjson.dumps({"inputs": ["x", "y"], "stream": is_streaming, "parameters": LONG})
        connection = wire.http()
        connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json"})
        runner, engine = wire.backend.runners[0], wire.backend.engines[0]
        wait_until(lambda: engine.num_running == 2)
        response = connection.getresponse() if is_streaming else None
        steps = runner.num_steps
        leave(connection)
        if response is not None:
            response.close()
        wire.wait_idle()
        # One step is under way when the client leaves; the news may need some more on a busy
        # machine, of 60.
        assert runner.num_steps - steps <= 5
        service = wire.server._service
        wait_until(lambda: service.models["fake"].admission.num_sequences == 0)
        assert (
            b'sightline_request_failure_total{code="client_closed_request",model_name="fake"} 1.0'
            in wire.get("/metrics")[1]
        )


def test_a_client_that_disconnects_is_not_logged_as_an_error(
    serve: Serve, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: asyncio logged an error with a traceback for each client that disconnected."""
    with serve(make_backend(step_s=0.02)) as wire:
        connection = wire.http()
        body = orjson.dumps({"inputs": ["x", "y"], "parameters": LONG})
        connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json"})
        wait_until(lambda: wire.backend.engines[0].num_running == 2)
        leave(connection)
        wire.wait_idle()
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.ERROR]


def test_a_client_that_disconnects_from_the_queue_needs_no_step(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(make_backend(step_s=0.02), max_rows=1) as wire:
        first, response = open_stream(wire, {"inputs": "x", "parameters": LONG})
        waiting = wire.http()
        waiting.request("POST", "/v1/generate", b'{"inputs":"y"}', {"Content-Type": "application/json"})
        engine = wire.backend.engines[0]
        wait_until(lambda: engine.num_waiting == 1)
        leave(waiting)
        wait_until(lambda: engine.num_waiting == 0)
        assert wire.backend.runners[0].num_encodes == 1
        response.read()
        first.close()


def test_a_client_that_stops_reading_is_disconnected_and_affects_no_other(
    serve: Serve, make_backend: MakeBackend
) -> None:
    with serve(make_backend(), client_timeout_s=0.2) as wire:
        stuck = wire.connect()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Pipelined responses of half a megabyte each fill every buffer on the way.
        body = orjson.dumps({"inputs": "x" * 60, "targets": "y" * 60})
        head = b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        stuck.sendall((head + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 40)
        assert wire.post("/v1/generate", {"inputs": "a dog"})[0] == 200
        wait_until(lambda: not wire.server.server_state.connections)
        wire.wait_idle()
        stuck.close()


def test_a_pipelining_client_that_disconnects_cancels_its_running_request(
    serve: Serve, make_backend: MakeBackend
) -> None:
    with serve(make_backend(step_s=0.02)) as wire:
        client = wire.connect()
        body = orjson.dumps({"inputs": "x", "parameters": LONG})
        head = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall((head + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 3)
        wait_until(lambda: wire.backend.engines[0].num_running == 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        wire.wait_idle()
        assert wire.backend.runners[0].num_steps < 40
        assert wire.backend.runners[0].num_encodes == 1  # those behind it never began


@contextlib.contextmanager
def large_response(wire: Wire) -> Iterator[socket.socket]:
    """To a client whose machine takes little of it at a time."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", wire.port))
        client.sendall(large_request())
        yield client


def large_request() -> bytes:
    body = orjson.dumps({"inputs": ["x" * 60] * 8, "parameters": {**LONG, "return_attention": True}})
    head = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def assert_is_whole(response: bytes) -> None:
    head, _, content = response.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(content) in head and len(content) > 1_000_000
    assert len(orjson.loads(content)["outputs"]) == 8


def test_a_large_response_keeps_its_reservation_until_it_is_read(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(make_backend(), client_timeout_s=30) as wire, large_response(wire) as client:
        service = wire.server._service
        admission = service.models["fake"].admission
        wait_until(lambda: wire.backend.runners[0].num_steps >= 60)
        wire.wait_idle()
        time.sleep(0.3)
        assert admission.num_sequences == 8
        assert_is_whole(read_all(client))
        wait_until(lambda: admission.num_sequences == 0)


def test_a_slow_reader_gets_a_large_response_completely(serve: Serve, make_backend: MakeBackend) -> None:
    """Regression: the timeout of one piece applied to the whole response."""
    with serve(make_backend(), client_timeout_s=0.6) as wire, large_response(wire) as client:
        response, started = b"", time.monotonic()
        while data := client.recv(20_000):
            response += data
            time.sleep(0.002)
        assert time.monotonic() - started > 2 * 0.6
        assert_is_whole(response)


def logged_call(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The access log's line of the one call."""

    def lines() -> list[dict[str, Any]]:
        return [getattr(record, logs.FIELDS) for record in caplog.records if record.name == logs.access_logger.name]

    wait_until(lambda: bool(lines()))
    (line,) = lines()
    return line


def test_a_client_that_reads_nothing_is_disconnected_after_the_timeout(
    serve: Serve, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: bytes in kernel buffers counted as read, which doubled the timeout, and the log
    line had no error code.
    """
    caplog.set_level(logging.INFO, logs.access_logger.name)
    with serve(make_backend(), client_timeout_s=2) as wire, large_response(wire) as client:
        assert client.recv(1).startswith(b"H")  # the response has begun
        started = time.monotonic()
        wait_until(lambda: not wire.server.server_state.connections)
        assert 1.6 < time.monotonic() - started < 3.8
        line = logged_call(caplog)
        assert (line["status"], line["code"]) == (200, "client_too_slow")
        assert b'request_failure_total{code="client_too_slow",model_name="fake"} 1.0' in wire.get("/metrics")[1]


def test_a_client_that_leaves_a_large_response_unread_is_logged_as_disconnected(
    serve: Serve, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.access_logger.name)
    with serve(make_backend(), client_timeout_s=30) as wire:
        with large_response(wire) as client:
            client.recv(1)
        line = logged_call(caplog)
        assert (line["status"], line["code"]) == (200, "client_closed_request")


def test_a_client_that_disconnects_after_the_whole_response_has_no_error_code(
    serve: Serve, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.access_logger.name)
    with serve(make_backend()) as wire:
        for _ in range(5):
            caplog.clear()
            with wire.connect() as client:
                client.sendall(large_request())
                received = client.recv(65536)
                head, _, content = received.partition(b"\r\n\r\n")
                missing = int(re.findall(rb"content-length: (\d+)", head)[0]) - len(content)
                while missing:
                    missing -= len(client.recv(missing))
            assert logged_call(caplog)["code"] is None


def test_bytes_in_kernel_buffers_count_as_unread(serve: Serve, make_backend: MakeBackend) -> None:
    """Regression: the buffer of the server shrinks in steps of at least 100 kB, which looked like
    no progress.
    """
    with serve(make_backend(), client_timeout_s=0.5) as wire, large_response(wire) as client:
        response, end = b"", time.monotonic() + 2.5
        while time.monotonic() < end:  # 50 kB a second
            response += client.recv(1000)
            time.sleep(0.02)
        assert_is_whole(response + read_all(client))


def test_the_service_responds_after_two_hundred_clients_disconnect(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(make_backend(step_s=0.005), max_rows=4) as wire:
        for _ in range(200):
            connection = wire.http()
            connection.request(
                "POST",
                "/v1/generate",
                orjson.dumps({"inputs": "x", "parameters": LONG}),
                {"Content-Type": "application/json"},
            )
            leave(connection)
        assert wire.post("/v1/generate", {"inputs": "a dog"})[0] == 200
        wire.wait_idle()
