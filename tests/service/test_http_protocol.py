"""Hostile clients over raw sockets. These tests decide whether another version of uvicorn may be used."""

import asyncio
import contextlib
import json
import socket
import time
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from service import http_protocol
from service.http_protocol import MAX_PIPELINED, GuardedProtocol, ReadLimits
from tests.service.conftest import Serve, Wire, read_all, wait_until

QUICK = {"header_timeout_s": 0.2, "body_timeout_s": 0.2, "keep_alive_s": 1}
POST = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"inputs":"x"}'


def exchange(wire: Wire, data: bytes) -> bytes:
    """Send, and read until the server closes."""
    with wire.connect() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it has refused it does not read on
            connection.sendall(data)
        return read_all(connection)


def check(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert f"x-request-id: {error['request_id']}".encode() in head
    assert b"connection: close" in head


def test_a_connection_on_which_nothing_comes_is_closed_in_silence(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        started = time.monotonic()
        assert exchange(wire, b"") == b""
        assert 0.15 < time.monotonic() - started < 2


def test_slow_headers_are_408(serve: Serve) -> None:
    with serve(**QUICK) as wire, wire.connect() as connection:
        for byte in b"GET /health/live HTTP/1.1\r\nHo":
            connection.sendall(bytes([byte]))
            time.sleep(0.002)
        check(read_all(connection), 408, "client_too_slow")
        assert b'request_failure_total{code="client_too_slow"} 1.0' in wire.get("/metrics")[1]


def test_bytes_that_drip_do_not_extend_the_time(serve: Serve) -> None:
    with serve(**QUICK) as wire, wire.connect() as connection:
        started = time.monotonic()
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        connection.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() - started < 2:
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                connection.sendall(b"x")
        check(answer, 408, "client_too_slow")


def test_a_stalled_body_is_408(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        check(exchange(wire, POST + b"Content-Length: 100\r\n\r\n" + BODY), 408, "client_too_slow")


def unended(num_bytes: int) -> bytes:
    """A head, and all of the body but its end."""
    return POST + b"Content-Length: %d\r\n\r\n" % num_bytes + BODY.ljust(num_bytes - 1)


def test_bodies_that_do_not_end_are_counted_together(serve: Serve) -> None:
    """Each had the largest size for ten seconds: a few hundred connections took all memory before any door."""
    with serve(max_body_bytes=100_000, max_waiting_bytes=100_000) as wire:
        service = wire.server._service
        with wire.connect() as first, wire.connect() as second, wire.connect() as third:
            first.sendall(unended(100_000))
            wait_until(lambda: service.num_body_bytes == 99_999)
            second.sendall(unended(100_000))
            assert second.recv(65536).startswith(b"HTTP/1.1 503 ")
            # They do not keep out what is whole, nor what is small.
            assert wire.post("/v1/generate", {"inputs": "x"})[0] == 200
            third.sendall(unended(1000))
            wait_until(lambda: service.num_body_bytes == 99_999 + 999)
            third.sendall(b" ")
            assert third.recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: service.num_body_bytes == 0)


def drip_until_closed(connection: socket.socket, byte: bytes, timeout_s: float = 3.0) -> bool:
    """Send a byte every 20 ms; whether the server closed."""
    end = time.monotonic() + timeout_s
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


def test_the_rest_of_a_body_that_no_route_wants_has_its_time_and_no_more(serve: Serve) -> None:
    """Any byte stops uvicorn's keep-alive timer, so a body that drips would go on for ever."""
    with serve(**QUICK) as wire, wire.connect() as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nx")
        assert b" 404 " in connection.recv(65536).split(b"\r\n")[0]
        assert drip_until_closed(connection, b"x")


def test_an_idle_connection_is_closed_after_the_keep_alive_time(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        answer = exchange(wire, b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")


def test_bytes_after_an_answer_start_the_time_of_the_next_head(serve: Serve) -> None:
    """Any byte stops uvicorn's keep-alive timer, those of an empty line too."""
    with serve(**QUICK) as wire, wire.connect() as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert drip_until_closed(connection, b"\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nX: " + b"x" * 1_000_000,
        b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["endless", "one large header", "many headers", "long path"],
)
def test_a_head_of_more_than_32_kib_is_431(serve: Serve, head: bytes) -> None:
    with serve() as wire:
        answer = exchange(wire, head)
        if answer:  # the reset of what was sent too much may overtake it
            check(answer, 431, "headers_too_large")
        assert wire.get("/health/live")[0] == 200
        assert b'request_failure_total{code="headers_too_large"} 1.0' in wire.get("/metrics")[1]


def test_separators_of_headers_count_as_well(serve: Serve) -> None:
    """Only names and values were counted: 48 KB of headers of two bytes each passed where they came in one piece."""
    with serve() as wire:
        answer = exchange(wire, b"GET /health/live HTTP/1.1\r\n" + b"X:x\r\n" * 8_000 + b"\r\n")
        if answer:  # the reset of what was sent too much may overtake it
            check(answer, 431, "headers_too_large")
        assert b'request_failure_total{code="headers_too_large"} 1.0' in wire.get("/metrics")[1]


def test_a_head_just_below_the_limit_is_served(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        answer = exchange(wire, b"GET /health/live HTTP/1.1\r\nX: " + b"x" * 32_000 + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 14\r\nContent-Length: 15\r\n\r\n" + BODY,
        POST + b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n\r\n" + BODY,
        b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["words", "version", "negative length", "two lengths", "length and chunks", "method", "chunk size"],
)
def test_what_is_not_http_is_400_or_closed(serve: Serve, data: bytes) -> None:
    with serve(**QUICK) as wire:
        answer = exchange(wire, data)
        if b"Transfer-Encoding: chunked\r\n\r\nzz" not in data:  # there the route was already waiting for the body
            check(answer, 400, "malformed_request")
        assert wire.get("/health/live")[0] == 200


def test_a_hundred_thousand_tiny_chunks_are_one_body(serve: Serve) -> None:
    with serve() as wire, wire.connect() as connection:
        body = BODY + b" " * 100_000
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        connection.sendall(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_a_body_over_the_limit_is_refused_before_it_has_come(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        answer = exchange(wire, POST + b"Content-Length: 1000000000\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_sends_a_whole_large_body_can_read_its_413(serve: Serve) -> None:
    with serve() as wire:
        assert wire.post("/v1/generate", {"inputs": "x" * 3_000_000})[0] == 413


def test_pipelined_requests_are_answered_in_order(serve: Serve) -> None:
    with serve(**QUICK) as wire:
        request = POST + b"Content-Length: %d\r\n" % len(BODY)
        data = b"".join(request + b"X-Request-Id: r%d\r\n\r\n" % place + BODY for place in range(5))
        answer = exchange(wire, data)
        ids = [line for line in answer.split(b"\r\n") if line.startswith(b"x-request-id")]
        assert ids == [b"x-request-id: r%d" % place for place in range(5)]


def test_of_requests_sent_ahead_of_their_turn_no_more_than_some_are_read(serve: Serve) -> None:
    """Each was compared with all before it, and kept: a megabyte of them held up the event loop for seconds."""
    with serve() as wire, wire.connect() as connection:
        started = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"GET /health/live HTTP/1.1\r\n\r\n" * 30_000)
        answers = read_all(connection)
        assert time.monotonic() - started < 5
        if answers:  # the reset of what was sent too much may overtake them
            assert answers.startswith(b"HTTP/1.1 200 ")
        assert wire.get("/health/live")[0] == 200


def test_the_last_answer_before_the_limit_says_that_the_connection_ends(serve: Serve) -> None:
    with serve() as wire, wire.connect() as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\n\r\n" * (MAX_PIPELINED + 9))
        heads = read_all(connection).split(b"HTTP/1.1 ")[1:]
        assert len(heads) == 1 + MAX_PIPELINED
        assert [b"connection: close" in head for head in heads] == [False] * MAX_PIPELINED + [True]


def test_trailers_without_end_are_cut_off(serve: Serve) -> None:
    """They were kept as headers, for as long as a body may take."""
    with serve(body_timeout_s=30) as wire:
        started = time.monotonic()
        trailers = b"a:b\r\n" * 100_000
        exchange(wire, POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + trailers)
        assert time.monotonic() - started < 5
        assert wire.get("/health/live")[0] == 200


def test_a_trailer_without_end_is_cut_off(serve: Serve) -> None:
    """A header is told when it is whole, so one that never is was kept, and copied with each piece that came."""
    with serve(body_timeout_s=30) as wire:
        started = time.monotonic()
        exchange(wire, POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-A: " + b"b" * 1_000_000)
        assert time.monotonic() - started < 5


def test_what_goes_wrong_behind_an_early_answer_is_no_second_answer(serve: Serve) -> None:
    with serve(body_timeout_s=30) as wire:
        head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
        with wire.connect() as connection:
            connection.sendall(head)
            first = connection.recv(65536)
            assert first.startswith(b"HTTP/1.1 404 ")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(b"no size\r\n")
            assert b"HTTP/1.1" not in read_all(connection)
        assert b'code="malformed_request"' not in wire.get("/metrics")[1]


def test_a_few_trailers_are_read_and_forgotten(serve: Serve) -> None:
    with serve() as wire:
        chunks = b"%x\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(BODY), BODY)
        answer = exchange(wire, POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert answer.startswith(b"HTTP/1.1 200 ")


def made_protocol(transport: Mock, write_timeout_s: float) -> GuardedProtocol:
    config = uvicorn.Config(Mock())
    config.load()
    limits = ReadLimits(header_timeout_s=9, body_timeout_s=9, write_timeout_s=write_timeout_s)
    protocol = GuardedProtocol(config, ServerState(), {}, limits=limits, on_refusal=Mock())
    protocol.connection_made(transport)
    return protocol


@pytest.mark.anyio
async def test_what_is_written_after_a_pause_does_not_hide_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that was as high as one timeout before counted as nothing read: whoever read steadily was cut off."""
    transport = Mock()
    transport.is_closing.return_value = False
    monkeypatch.setattr(http_protocol, "num_unread", lambda transport: 90)
    protocol = made_protocol(transport, write_timeout_s=0.1)
    for _ in range(6):
        protocol.pause_writing()
        await asyncio.sleep(0.05)
        protocol.resume_writing()
    transport.abort.assert_not_called()
    protocol.pause_writing()
    await asyncio.sleep(0.3)
    transport.abort.assert_called_once()
    protocol.connection_lost(None)


@pytest.mark.anyio
@pytest.mark.parametrize("unread", [[90, 90], [90, 50, 20, 20]], ids=["nothing is read", "reading stops"])
async def test_a_closed_connection_waits_for_a_reader_that_reads(
    monkeypatch: pytest.MonkeyPatch, unread: list[int]
) -> None:
    """What is left unread may be too little to pause writing, and then no timer ran."""
    transport = Mock()
    transport.is_closing.side_effect = lambda: transport.close.called
    middle = [size for size in unread[1:-1] for _ in range(2)]  # seen when one timer ends and when the next begins
    num_unread = Mock(side_effect=[unread[0], *middle, unread[-1]])
    monkeypatch.setattr(http_protocol, "num_unread", num_unread)
    protocol = made_protocol(transport, write_timeout_s=0.01)
    protocol.timeout_keep_alive_handler()
    transport.abort.assert_not_called()
    await asyncio.sleep(0.2)
    transport.abort.assert_called_once()
    assert num_unread.call_count == 2 + len(middle)
    protocol.connection_lost(None)
