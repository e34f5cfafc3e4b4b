"""Hostile clients over raw sockets. These tests decide whether another version of uvicorn may be
used.
"""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from sightline.service import logs
from sightline.service.http import guarded_protocol as http_protocol
from sightline.service.http.guarded_protocol import MAX_PIPELINED, GuardedProtocol
from sightline.service.http.incoming import Exchange
from sightline.service.settings import Settings
from tests.service.conftest import MakeBackend, Serve, Wire, read_all, wait_until

QUICK = {"client_timeout_s": 0.2, "keep_alive_s": 1}
POST = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"inputs":"x"}'


def exchange(wire: Wire, data: bytes) -> bytes:
    """Send data and read until the server closes the connection."""
    with wire.connect() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server stops reading a rejected request
            connection.sendall(data)
        return read_all(connection)


def read_response(connection: socket.socket) -> tuple[http.client.HTTPResponse, bytes]:
    """Read one response, whose head and body may arrive one after the other."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response, response.read()


def check(response: bytes, status: int, code: str) -> None:
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), response[:200]
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert f"x-request-id: {error['request_id']}".encode() in head
    assert b"connection: close" in head


def test_a_connection_without_data_is_closed_without_a_response(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        started = time.monotonic()
        assert exchange(wire, b"") == b""
        assert time.monotonic() - started > 0.15


def test_slow_headers_are_408(serve: Serve) -> None:
    with serve(**QUICK) as wire, wire.connect() as connection:
        for byte in b"GET /health/live HTTP/1.1\r\nHo":
            connection.sendall(bytes([byte]))
            time.sleep(0.002)
        check(read_all(connection), 408, "client_too_slow")
        assert b'request_failure_total{code="client_too_slow",model_name=""} 1.0' in wire.get("/metrics")[1]


def test_single_bytes_do_not_extend_the_timeout(serve: Serve) -> None:
    with serve(**QUICK) as wire, wire.connect() as connection:
        started = time.monotonic()
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        connection.settimeout(0.05)
        response = b""
        while not response and time.monotonic() - started < 20:
            try:
                response = connection.recv(65536)
            except TimeoutError:
                connection.sendall(b"x")
        check(response, 408, "client_too_slow")


def test_a_stalled_body_is_408(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        check(exchange(wire, POST + b"Content-Length: 100\r\n\r\n" + BODY), 408, "client_too_slow")


def test_a_length_with_many_zeros_is_a_number(serve: Serve) -> None:
    with serve(max_body_bytes=len(BODY)) as wire:
        zeros = b"0" * 4400
        head = POST + b"Connection: close\r\nContent-Length: %s%d\r\n\r\n"
        assert exchange(wire, head % (zeros, len(BODY)) + BODY).startswith(b"HTTP/1.1 200")
        assert b"at most 14 bytes, got 999" in exchange(wire, head % (zeros, 999) + BODY.ljust(999))


def unended(num_bytes: int) -> bytes:
    """A head, and all of the body but its end."""
    return POST + b"Content-Length: %d\r\n\r\n" % num_bytes + BODY.ljust(num_bytes - 1)


def test_incomplete_bodies_are_counted_together(serve: Serve) -> None:
    """Regression: incomplete bodies were not limited together; a few hundred connections used all
    memory before admission.
    """
    with serve(max_body_bytes=100_000, max_waiting_bytes=100_000) as wire:
        bodies = wire.server.bodies
        with wire.connect() as first, wire.connect() as second, wire.connect() as third:
            first.sendall(unended(60_000))
            wait_until(lambda: bodies.num_bytes == 59_999)
            second.sendall(unended(30_000))
            wait_until(lambda: bodies.num_bytes == 59_999 + 29_999)
            third.sendall(unended(20_000))
            # The body with the longest pause is rejected with an error in the shape of its route.
            response, content = read_response(first)
            assert (response.status, response.headers["retry-after"]) == (429, "1")
            assert b'"code":"overloaded"' in content and b"exceed 100000 bytes in total" in content
            wait_until(lambda: bodies.num_bytes == 29_999 + 19_999)
            assert b'limit_reached_total{limit="body_bytes"} 1.0' in wire.get("/metrics")[1]
            # What is whole is never held up by what does not end, nor is what goes on.
            assert wire.post("/v1/generate", {"inputs": "x" * 40, "parameters": {"stop": ["y" * 70_000]}})[0] == 422
            assert second.recv(65536).startswith(b"HTTP/1.1 429 ")
            third.sendall(b" ")
            assert third.recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: bodies.num_bytes == 0)


def test_small_incomplete_bodies_are_counted(serve: Serve) -> None:
    """Regression: bodies of up to 64 KiB were not counted; 4,000 of them used 600 MB."""
    with serve(max_body_bytes=70_000, max_waiting_bytes=300_100) as wire, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(wire.connect()) for _ in range(20)]
        for connection in connections:
            connection.sendall(unended(60_000))
        wait_until(lambda: b'limit="body_bytes"} 15.0' in wire.get("/metrics")[1])
        assert wire.server.bodies.num_bytes == 5 * 59_999
        assert sum(connection.recv(65536).startswith(b"HTTP/1.1 429 ") for connection in connections[:15]) == 15
        assert wire.post("/v1/generate", {"inputs": "a dog"})[0] == 200
        # Rejected bodies are not kept in memory, for example by the traceback of an exception.
        protocols: list[Any] = list(wire.server.server_state.connections)
        exchanges: list[Exchange] = [one._exchange for one in protocols if one.cycle]
        assert [one.rejection.__traceback__ for one in exchanges if one.rejection] == [None] * 15


def test_bodies_that_no_route_reads_are_counted_and_released(serve: Serve, make_backend: MakeBackend) -> None:
    """uvicorn buffers at least 64 KiB for a route that reads no body, and for each pipelined
    request.
    """
    with serve(make_backend(step_s=0.02)) as wire, wire.connect() as waiting, wire.connect() as unread:
        bodies = wire.server.bodies
        slow = b'{"inputs":"x","parameters":{"min_new_tokens":60,"max_new_tokens":60}}'
        waiting.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(slow) + slow + unended(50_000))
        wait_until(lambda: wire.backend.engines[0].num_running == 1)
        wait_until(lambda: bodies.num_bytes == 49_999)
        waiting.close()
        wait_until(lambda: bodies.num_bytes == 0)
        unread.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n" + b"x" * 49_999)
        assert unread.recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: bodies.num_bytes == 0)


def test_a_body_that_arrives_after_its_response_is_not_counted(serve: Serve) -> None:
    """Regression: its bytes counted for ever, until every body was rejected."""
    with serve() as wire, wire.connect() as client:
        head = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        for _ in range(2):
            client.sendall(head % 50_000)
            received = b""
            while not received.endswith(b"}"):
                received += client.recv(65536)
            assert b" 415 " in received
            client.sendall(b"x" * 50_000)
        assert wire.get("/health/live")[0] == 200
        assert wire.server.bodies.num_bytes == 0


def test_a_body_after_another_request_is_rejected_in_order(serve: Serve, make_backend: MakeBackend) -> None:
    """The limit also applies to complete bodies, before the previous request has its response."""
    limits = {"max_body_bytes": 60_000, "max_waiting_bytes": 60_000}
    with serve(make_backend(step_s=0.02), keep_alive_s=1, **limits) as wire:
        slow = b'{"inputs":"x","parameters":{"min_new_tokens":40,"max_new_tokens":40}}'
        with wire.connect() as pipelining, wire.connect() as other:
            pipelining.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(slow) + slow + unended(50_000) + b" ")
            wait_until(lambda: wire.server.bodies.num_bytes == 50_000)
            other.sendall(unended(30_000))
            wait_until(lambda: wire.server.bodies.num_bytes == 29_999)
            other.sendall(b" ")
            assert other.recv(65536).startswith(b"HTTP/1.1 200 ")
            responses = read_all(pipelining)
            assert responses.startswith(b"HTTP/1.1 200 ")
            _, _, second = responses.partition(b"HTTP/1.1 429 ")
            assert b"paused for longest" in second


def drip_until_closed(connection: socket.socket, byte: bytes) -> bool:
    """Send a byte every 20 ms for 30 s; return True if the server closes the connection."""
    end = time.monotonic() + 30
    connection.settimeout(0.02)
    while time.monotonic() < end:
        try:
            if connection.recv(65536) == b"":
                return True
        except TimeoutError:
            with contextlib.suppress(OSError):
                connection.sendall(byte)
        except OSError:
            return True
    return False


def test_the_rest_of_an_unread_body_is_subject_to_the_timeout(serve: Serve) -> None:
    """Any byte stops the keep-alive timer of uvicorn, so a slow body would never end."""
    with serve(**QUICK) as wire, wire.connect() as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nx")
        assert b" 404 " in connection.recv(65536).split(b"\r\n")[0]
        assert drip_until_closed(connection, b"x")


def test_a_request_that_has_arrived_is_served_although_the_timer_of_its_connection_ends_first(serve: Serve) -> None:
    """Regression: a late event loop runs timers first, so overload reset connections."""
    with serve() as wire, wire.connect() as connection:
        wait_until(lambda: len(wire.server.server_state.connections) == 1)
        protocol: Any = next(iter(wire.server.server_state.connections))
        is_late, has_sent = threading.Event(), threading.Event()

        def be_late(on_timer: Any) -> None:
            is_late.set()
            has_sent.wait()
            on_timer()

        for on_timer in (protocol._on_late_head, protocol.timeout_keep_alive_handler):
            protocol.loop.call_soon_threadsafe(be_late, on_timer)
            is_late.wait()
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            has_sent.set()
            assert read_response(connection)[0].status == 200
            is_late.clear()
            has_sent.clear()


def test_an_idle_connection_is_closed_after_the_keep_alive_time(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        response = exchange(wire, b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 200 ")


def test_bytes_after_a_response_start_the_timeout_of_the_next_head(serve: Serve) -> None:
    """Any byte, also that of an empty line, stops the keep-alive timer of uvicorn."""
    with serve(**QUICK) as wire, wire.connect() as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert drip_until_closed(connection, b"\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 1_000_000,
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        # Regression: without the separators, these headers of 48 KB were accepted in one piece.
        b"GET /health/live HTTP/1.1\r\nHost: x\r\n" + b"X:x\r\n" * 8_000 + b"\r\n",
    ],
    ids=["endless", "one large header", "many headers", "long path", "separators"],
)
def test_a_head_of_more_than_32_kib_is_431(serve: Serve, head: bytes) -> None:
    with serve() as wire:
        response = exchange(wire, head)
        if response:  # the reset of what was sent too much may overtake it
            check(response, 431, "headers_too_large")
        assert wire.get("/health/live")[0] == 200
        assert b'request_failure_total{code="headers_too_large",model_name=""} 1.0' in wire.get("/metrics")[1]


def test_a_head_just_below_the_limit_is_served(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        head = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: " + b"x" * 32_000 + b"\r\n\r\n"
        response = exchange(wire, head)
        assert response.startswith(b"HTTP/1.1 200 ")


GET = b"GET /health/live HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 14\r\nContent-Length: 15\r\n\r\n" + BODY,
        POST + b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n\r\n" + BODY,
        b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        GET + b"\r\n",
        GET + b"Host: x\r\nHost: x\r\n\r\n",
        GET + b"Host: a b\r\n\r\n",
        b"GET /health/live\r\n\r\n",
        b"GET /health/live HTTP/0.9\r\nHost: x\r\n\r\n",
        b"GET /health/live HTTP/2.0\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n" + GET + b"Host: x\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http:///health/live HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET ftp://x/health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=[
        *("words", "version", "negative length", "two lengths", "length and chunks", "method", "chunk size"),
        *("no Host", "two Hosts", "a Host with a space", "HTTP/0.9 without a version", "HTTP/0.9", "HTTP/2.0"),
        *("the preface of HTTP/2", "CONNECT", "asterisk", "no path", "bytes", "no host", "another scheme"),
    ],
)
def test_an_invalid_head_is_400_and_is_logged_and_counted(
    serve: Serve, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.access_logger.name)
    with serve(**QUICK) as wire:
        check(exchange(wire, data), 400, "malformed_request")
        (line,) = [getattr(record, logs.FIELDS) for record in caplog.records if record.name == "sightline.access"]
        assert (line["status"], line["code"]) == (400, "malformed_request")
        assert wire.get("/health/live")[0] == 200
        assert b'request_failure_total{code="malformed_request",model_name=""} 1.0' in wire.get("/metrics")[1]


def test_a_target_with_a_host_names_the_same_resource(serve: Serve) -> None:
    """Every server must accept them (RFC 9112, 3.2.2)."""
    with serve(**QUICK) as wire:
        for target in (b"http://any_host:80/health/live", b"HTTPS://[::1]/health/live?x"):
            response = exchange(wire, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert response.startswith(b"HTTP/1.1 200 "), target


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize("pause_s", [0, 0.05], ids=["in one packet", "in two packets"])
@pytest.mark.parametrize(
    ("framing", "body"),
    [(b"Content-Length: %d\r\n\r\n" % len(BODY), BODY), (b"Transfer-Encoding: chunked\r\n\r\n", CHUNKED)],
    ids=["length", "chunks"],
)
def test_a_protocol_upgrade_is_ignored(serve: Serve, framing: bytes, body: bytes, pause_s: float) -> None:
    """Regression: the body was lost or parsed as the next request, so that curl --http2 and the
    HttpClient of Java always failed.
    """
    with serve() as wire, wire.connect() as connection:
        for _ in range(2):  # the connection stays open
            connection.sendall(POST + UPGRADE + framing)
            time.sleep(pause_s)
            connection.sendall(body)
            response, content = read_response(connection)
            assert response.status == 200 and b'"outputs"' in content
        last = POST + b"Connection: close\r\n" + framing + body
        connection.sendall(POST + UPGRADE + framing + body + last)
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 2


def test_a_body_is_never_parsed_as_a_request(serve: Serve) -> None:
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    others = (
        b"Connection: close, upgrade\r\nUpgrade: h2c\r\n",
        b"Connection: upgrade\r\nUpgrade: a, b\r\nUpgrade: c\r\n",
    )
    with serve() as wire:
        for extra in (UPGRADE, *others):
            with wire.connect() as connection:
                connection.sendall(POST + extra + b"Content-Length: %d\r\n\r\n" % len(smuggled))
                time.sleep(0.02)
                connection.sendall(smuggled)
                assert b'"code":"malformed_json"' in read_response(connection)[1]
        calls = [line for line in wire.get("/metrics")[1].splitlines() if line.startswith(b"sightline_http_requests_")]
        assert calls == [b'sightline_http_requests_total{route="/v1/generate",status="400"} 3.0']


def test_a_web_socket_is_an_ordinary_get(serve: Serve) -> None:
    with serve(**QUICK) as wire, wire.connect() as connection:
        extra = b"Host: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
        connection.sendall(GET + extra)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize("garbage", [b"\x00\x01\x02", b"zz\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_invalid_data_after_a_valid_request_does_not_prevent_its_response(serve: Serve, garbage: bytes) -> None:
    with serve(**QUICK) as wire:
        first, second = exchange(wire, WHOLE + garbage).split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"200 ") and b'"outputs"' in first
        check(b"HTTP/1.1 " + second, 400, "malformed_request")


@pytest.mark.parametrize(
    ("rest", "status", "code"),
    [
        (b"zz\r\n", 400, "malformed_request"),
        (b"2\r\n{}x\r\n", 400, "malformed_request"),
        (b"2\r\n{}\r\n0\r\nno trailer\r\n\r\n", 400, "malformed_request"),
        (b"2\r\n{}\r\n0\r\nX: " + b"x" * 55_000, 431, "headers_too_large"),
    ],
    ids=["chunk size", "chunk end", "trailer", "long trailer"],
)
@pytest.mark.parametrize("pause_s", [0, 0.05], ids=["in one packet", "in two packets"])
def test_a_body_with_invalid_framing_gets_an_error_of_its_route(
    serve: Serve, rest: bytes, status: int, code: str, pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the connection was closed without a response, a log line or a count."""
    caplog.set_level(logging.INFO, logs.access_logger.name)
    with serve() as wire:
        for path, message in ((b"/v1/generate", "error"), (b"/generate", "error_type")):
            caplog.clear()
            with wire.connect() as connection:
                connection.sendall(POST.replace(b"/v1/generate", path) + b"Transfer-Encoding: chunked\r\n\r\n")
                for start in range(0, len(rest), 15_000):  # whole headers are counted, and what comes piece by piece
                    time.sleep(0.01 if start else pause_s)
                    connection.sendall(rest[start : start + 15_000])
                head, _, body = read_all(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head
            assert message in json.loads(body)
            (line,) = [getattr(record, logs.FIELDS) for record in caplog.records if record.name == "sightline.access"]
            assert (line["status"], line["code"], line["route"]) == (status, code, path.decode())
        assert wire.get("/health/live")[0] == 200


def test_a_hundred_thousand_tiny_chunks_are_one_body(serve: Serve) -> None:
    with serve() as wire, wire.connect() as connection:
        body = BODY + b" " * 100_000
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        connection.sendall(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_a_body_over_the_limit_is_rejected_before_it_arrives(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        response = exchange(wire, POST + b"Content-Length: 1000000000\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_sends_a_whole_large_body_can_read_its_413(serve: Serve) -> None:
    with serve() as wire:
        assert wire.post("/v1/generate", {"inputs": "x" * 3_000_000})[0] == 413


CLOSE = b"Connection: close\r\n"
LONG = b"Content-Length: 3000000\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /nothing HTTP/1.1\r\n" + CLOSE + LONG, 404),
        (b"GET /v1/generate HTTP/1.1\r\n" + CLOSE + LONG, 405),
        (b"POST /v1/generate HTTP/1.0\r\n" + LONG, 415),
        (b"POST /v1/generate HTTP/1.1\r\n" + CLOSE + b"Content-Type: application/json\r\n" + LONG, 413),
        (b"POST /v1/generate HTTP/1.1\r\nContent-Type: application/json\r\n" + LONG, 408),
        (b"POST /v1/generate HTTP/1.1\r\nHost: other\r\n" + LONG, 400),
        (b"POST /v1/generate HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n" + LONG, 431),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_a_client_that_sends_a_whole_body_after_the_response_can_read_it(
    serve: Serve, head: bytes, status: int
) -> None:
    """Regression: the service closed the connection at once, and the kernel reset it because of the
    unread body, so that the client lost the response.
    """
    with serve(client_timeout_s=1, max_body_bytes=4_000_000 if status == 408 else 100_000) as wire:
        with wire.connect() as connection:
            connection.sendall(head + b"Host: x\r\n\r\n")
            wait_until(lambda: connection.recv(1, socket.MSG_PEEK) != b"")  # the response has been sent
            for _ in range(3):
                connection.sendall(b"x" * 1_000_000)
                time.sleep(0.02)  # long enough for a reset to arrive
            response = read_all(connection)
        assert response.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in response
        wait_until(lambda: wire.server.connections.num_open == 0)


def test_responses_to_pipelined_requests_keep_their_order(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        request = POST + b"Content-Length: %d\r\n" % len(BODY)
        ends = [*[b"\r\n"] * 4, b"Connection: close\r\n\r\n"]
        data = b"".join(request + b"X-Request-Id: r%d\r\n" % index + end + BODY for index, end in enumerate(ends))
        response = exchange(wire, data)
        ids = [line for line in response.split(b"\r\n") if line.startswith(b"x-request-id")]
        assert ids == [b"x-request-id: r%d" % index for index in range(5)]


def test_only_a_limited_number_of_pipelined_requests_is_read(serve: Serve) -> None:
    """Regression: all pipelined requests were kept and compared with each other; a megabyte of them
    blocked the event loop for seconds.
    """
    with serve() as wire, wire.connect() as connection:
        started = time.process_time()
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 30_000)
        responses = read_all(connection)
        assert time.process_time() - started < 5
        assert responses.startswith(b"HTTP/1.1 200 ")
        assert wire.get("/health/live")[0] == 200


def test_the_last_response_before_the_limit_announces_the_end_of_the_connection(serve: Serve) -> None:
    with serve() as wire, wire.connect() as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n" * (MAX_PIPELINED + 9))
        heads = read_all(connection).split(b"HTTP/1.1 ")[1:]
        assert len(heads) == 1 + MAX_PIPELINED
        assert [b"connection: close" in head for head in heads] == [False] * MAX_PIPELINED + [True]


@pytest.mark.parametrize("trailers", [b"a:b\r\n" * 100_000, b"X-A: " + b"b" * 1_000_000], ids=["many", "one large"])
def test_endless_trailers_end_the_connection(serve: Serve, trailers: bytes) -> None:
    """Regression: trailers were kept as headers until the body timeout. The parser reports only
    complete headers, so an endless one was kept and copied with each received piece.
    """
    with serve(client_timeout_s=600) as wire:
        exchange(wire, POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + trailers)
        assert wire.get("/health/live")[0] == 200


def test_an_error_after_an_early_response_sends_no_second_response(serve: Serve) -> None:
    with serve(client_timeout_s=30) as wire:
        head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
        with wire.connect() as connection:
            connection.sendall(head)
            first = connection.recv(65536)
            assert first.startswith(b"HTTP/1.1 404 ")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(b"no size\r\n")
            assert b"HTTP/1.1" not in read_all(connection)
        assert b'code="malformed_request",model_name=""} 0.0' in wire.get("/metrics")[1]


def test_a_few_trailers_are_read_and_ignored(serve: Serve) -> None:
    with serve() as wire:
        chunks = b"%x\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(BODY), BODY)
        response = exchange(wire, POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert response.startswith(b"HTTP/1.1 200 ")


def test_a_reader_that_pauses_twice_is_not_disconnected(serve: Serve) -> None:
    """The kernel's own timeout (TCP_USER_TIMEOUT) would end the connection at the second pause: it
    does not count what a reader with a small window has read between them.
    """
    parameters = b'{"max_new_tokens":60,"min_new_tokens":60,"return_attention":true}'
    body = b'{"inputs":["%s"],"parameters":%s}' % (b"x" * 60, parameters)
    with serve(client_timeout_s=1) as wire, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", wire.port))
        client.sendall((POST + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 8)
        for _ in range(2):
            time.sleep(0.5)
            for _ in range(60):
                assert client.recv(4096)
                time.sleep(0.01)


class Clock:
    """Time of the running event loop, which passes only in `sleep`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)

    async def sleep(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            await asyncio.sleep(0)  # runs the timers that are due


class IdleProtocol(GuardedProtocol):
    def _has_arrived(self) -> bool:
        return False  # a Mock has no socket


def made_protocol(transport: Mock, client_timeout_s: float) -> GuardedProtocol:
    config = uvicorn.Config(Mock())
    config.load()
    settings = Settings(client_timeout_s=client_timeout_s)
    protocol = IdleProtocol(
        config,
        ServerState(),
        {},
        settings=settings,
        connections=Mock(),
        bodies=Mock(),
        on_rejection=Mock(),
    )
    protocol.connection_made(transport)
    return protocol


@pytest.mark.anyio
async def test_writing_after_a_pause_does_not_hide_progress_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an equal buffer level one timeout later counted as no progress, so that steady
    readers were disconnected.
    """
    transport, clock = Mock(), Clock(monkeypatch)
    transport.is_closing.return_value = False
    monkeypatch.setattr(http_protocol, "num_unread", lambda transport: 90)
    protocol = made_protocol(transport, client_timeout_s=0.1)
    for _ in range(6):
        protocol.pause_writing()
        await clock.sleep(0.05)
        protocol.resume_writing()
    transport.abort.assert_not_called()
    protocol.pause_writing()
    await clock.sleep(0.3)
    transport.abort.assert_called_once()
    protocol.connection_lost(None)


@pytest.mark.anyio
@pytest.mark.parametrize("reads_s", [0.0, 0.25], ids=["nothing is read", "reading stops"])
async def test_a_closed_connection_waits_for_an_active_reader(monkeypatch: pytest.MonkeyPatch, reads_s: float) -> None:
    """Regression: without paused writing no timer ran for the unread rest of a response."""
    transport, clock = Mock(), Clock(monkeypatch)
    transport.is_closing.side_effect = lambda: transport.close.called
    cut_after: list[float] = []
    transport.abort.side_effect = lambda: cut_after.append(clock.now)
    monkeypatch.setattr(http_protocol, "num_unread", lambda transport: 90 - min(reads_s, clock.now) / 0.005)
    protocol = made_protocol(transport, client_timeout_s=0.1)
    protocol.timeout_keep_alive_handler()
    await clock.sleep(reads_s + 0.3)
    (seconds,) = cut_after
    assert reads_s + 0.09 <= seconds < reads_s + 0.2
    protocol.connection_lost(None)
