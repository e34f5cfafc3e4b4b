"""Limits on connections: each is named in the response, in the metric and in the log."""

import contextlib
import json
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from sightline.service import logs
from sightline.service.api_errors import ApiError, Limit
from sightline.service.http import connections
from sightline.service.http.connections import ConnectionLimits, network_of
from tests.service.conftest import Serve, Wire, read_all, wait_until
from tests.support.tables import read_table

GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def rejection(wire: Wire) -> bytes:
    """Return the response to a new connection, whether or not it sends a request first."""
    with wire.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(GET)
        return read_all(connection)


def check(response: bytes, message: str) -> None:
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1" in head and b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "overloaded"
    assert message in error["message"]


def is_served(connection: socket.socket) -> bool:
    connection.sendall(GET)
    return connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def count(wire: Wire, connection: socket.socket, limit: Limit) -> float:
    """The metric, over a connection that is open already."""
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while b"build_info{" not in received or not received.endswith(b"\n"):
        received += connection.recv(65536)
    (line,) = (
        row
        for row in received.splitlines()
        if row.startswith(b'sightline_limit_reached_total{limit="%s"}' % limit.encode())
    )
    return float(line.split()[-1])


@pytest.mark.parametrize(
    ("settings", "limit", "message"),
    [
        (
            {"max_connections": 3, "max_connections_per_address": 9},
            "connections",
            "has 3 open connections, which is the limit",
        ),
        ({"max_connections_per_address": 3}, "connections_per_address", "This address has 3 open connections"),
    ],
)
def test_connections_beyond_a_limit_are_429_and_others_continue(
    serve: Serve, settings: dict[str, int], limit: Limit, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(**settings) as wire, contextlib.ExitStack() as stack:
        open_ones = [stack.enter_context(wire.connect()) for _ in range(3)]
        assert all(is_served(connection) for connection in open_ones)
        for _ in range(20):
            check(rejection(wire), message)
        assert all(is_served(connection) for connection in open_ones)
        assert count(wire, open_ones[0], limit) == 20
        # Once for all of them, until ten seconds are over.
        (line,) = [record for record in caplog.records if record.name == "sightline.service.http.connections"]
        assert getattr(line, logs.FIELDS) == {"limit": limit, "rejected": 1, "open": 3}
        open_ones[0].close()
        wait_until(lambda: wire.server.connections.num_open == 2)
        with wire.connect() as connection:
            assert is_served(connection)
    assert (wire.server.connections.num_open, wire.server.connections.num_lingering) == (0, 0)


def test_a_rejected_client_that_continues_to_send_can_read_the_error(serve: Serve) -> None:
    """Closing a connection with unread data resets it, and the client may lose the response.

    Regression: the response was sent before the request, and clients closed the connection.
    """
    with serve(max_connections=1) as wire, wire.connect() as first:
        assert is_served(first)
        for _ in range(20):
            with wire.connect() as connection:
                connection.settimeout(0.01)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(60)
                connection.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n")
                connection.sendall(b"x" * 50_000)
                check(read_all(connection), "1 open connections")


def test_another_address_has_connections_of_its_own(serve: Serve) -> None:
    with serve(max_connections_per_address=1) as wire, wire.connect() as first:
        assert is_served(first)
        with socket.create_connection(("127.0.0.1", wire.port), 10, source_address=("127.0.0.9", 0)) as other:
            assert is_served(other)
        check(rejection(wire), "This address has 1 open connections")


@pytest.mark.parametrize(("address", "network"), read_table(__file__))
def test_an_ipv6_network_counts_as_one_client(address: str, network: str) -> None:
    assert network_of(address) == network


def test_addresses_of_one_ipv6_network_share_a_limit() -> None:
    limits = ConnectionLimits(max_total=10, max_per_address=2, on_limit=lambda _: None)
    limits.admit("2001:db8::1", 10)
    limits.admit("2001:db8::2", 10)
    with pytest.raises(ApiError, match="The network 2001:db8::/64 has 2 open connections"):
        limits.admit("2001:db8::3", 10)
    limits.admit("2001:db8:0:1::3", 10)
    limits.release("2001:db8::1")
    limits.admit("2001:db8::3", 10)


@contextlib.contextmanager
def descriptor_limit(num_free: int) -> Iterator[None]:
    """Limit the number of additional files that the process can open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    while fillers[-1] < highest:
        fillers.append(os.dup(fillers[0]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + num_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fillers:
            os.close(descriptor)


def test_clients_get_an_error_at_the_descriptor_limit(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the event loop reset connections that it could not accept, without a log line or
    a count.
    """
    with serve() as wire, wire.connect() as first, contextlib.ExitStack() as stack:
        assert is_served(first)
        # Of two descriptors for each connection the client's end is one, in this test.
        with descriptor_limit(connections.DESCRIPTOR_RESERVE + 20):
            responses = []
            for _ in range(18):
                connection = stack.enter_context(wire.connect())
                connection.sendall(GET)
                responses.append(connection.recv(65536))
            assert all(responses)
            num_rejected = sum(response.startswith(b"HTTP/1.1 429 ") for response in responses)
            assert 5 <= num_rejected <= 10
            check(responses[-1], "The service has no file descriptor left for another connection")
            assert is_served(first)
        assert count(wire, first, "descriptors") == num_rejected
        (line,) = [record for record in caplog.records if record.name == "sightline.service.http.connections"]
        assert line.levelno == logging.WARNING and getattr(line, logs.FIELDS)["limit"] == "descriptors"


def test_only_a_limited_number_of_rejected_connections_stay_open() -> None:
    limits = ConnectionLimits(1, 1, lambda limit: None)
    limits.num_lingering = connections.MAX_LINGERING
    assert not limits.may_linger(5)
    limits.num_lingering -= 1
    assert limits.may_linger(5)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not limits.may_linger(soft - 2)


def test_the_log_reports_rejected_connections_once_in_ten_seconds_with_their_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reported: list[Limit] = []
    limits = ConnectionLimits(1, 1, reported.append)
    limits.admit("a", 5)
    for step in range(21):
        now = 100.0 + step
        with pytest.raises(ApiError, match="overloaded"):
            limits.admit("b", 6)
    assert reported == ["connections"] * 21
    assert [getattr(record, logs.FIELDS)["rejected"] for record in caplog.records] == [1, 10, 10]
    limits.release("a")
    limits.admit("b", 6)
