"""uvicorn's HTTP protocol with limits on what a client may cost before its request is whole, and after.

uvicorn alone waits for ever for a head, a body or a reader, and takes heads of any size. This subclasses its internals,
so the tests over raw sockets decide whether another version of it may be used.
"""

import asyncio
import fcntl
import re
import secrets
import socket
import struct
import termios
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.api.endpoint import NATIVE_ERRORS
from service.errors import CLIENT_GONE, ApiError
from service.http.connections import ConnectionLimits
from service.http.dispatch import OnRefusal
from service.http.incoming import EXCHANGE, Exchange, IncomingBodies

MAX_HEAD_BYTES = 32 * 1024  # trailers of a body included
MAX_UNSENT_BYTES = 64 * 1024  # that the kernel holds
MAX_UNCOUNTED_BYTES = 16 * 1024  # of a body that comes at once: its endpoint reads it in the next turn of the loop
LINGER_S = 1.0
READER_CHECKS = 50  # of a reader's progress, in the time that it has
MAX_PIPELINED = 32  # requests of a connection that wait for the answer to one before them

# What the HTTP parser accepts and RFC 9110 and 9112 forbid.
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
PATH = rb"[!-\"$-~]*"  # with a query; nobody sends fragments
ORIGIN_FORM = re.compile(rb"/" + PATH)
ABSOLUTE_FORM = re.compile(rb"(?i:https?)://(?!:)([^/?#]+)([/?]" + PATH + rb")?")


@dataclass(frozen=True)
class ReadLimits:
    """Seconds for each part of an exchange."""

    header_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float


def num_unread(transport: asyncio.Transport) -> int:
    """Bytes that the client's machine has not taken yet, those in our kernel included; 0 where all are there."""
    unwritten = transport.get_write_buffer_size()
    if not unwritten:
        return 0
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return unwritten + int(struct.unpack("i", queued)[0])


def error_response(error: ApiError, request_id: str) -> bytes:
    """Return a whole response, after which the connection is closed."""
    body = NATIVE_ERRORS.write(error, error.message({}), None, request_id)
    headers = {
        **dict(error.headers()),
        b"content-length": str(len(body)).encode(),
        b"x-request-id": request_id.encode(),
        b"connection": b"close",
    }
    lines = [name + b": " + value + b"\r\n" for name, value in headers.items()]
    return b"".join([STATUS_LINE[error.kind.status], *lines, b"\r\n", body])


def check_head(
    method: bytes, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]], max_bytes: int = MAX_HEAD_BYTES
) -> bytes:
    """Return the request's target in origin form, a path with its query.

    Args:
        method: in capitals.
        target: as it was sent.
        version: of HTTP, such as `1.1`.
        headers: with their names in small letters.
        max_bytes: largest size of the target and the headers.

    Raises:
        ApiError: `malformed_request`, `headers_too_large`.
    """
    size, hosts = len(target), []
    for name, value in headers:
        size += len(name) + len(value) + len(b": \r\n")
        if name == b"host":
            hosts.append(value)
    if size > max_bytes:
        raise ApiError("headers_too_large")
    if version not in ("1.0", "1.1"):
        raise ApiError("malformed_request", "The HTTP version must be 1.1 or 1.0.")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise ApiError("malformed_request", f"The request must have one Host header, got {len(hosts)}.")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise ApiError(
            "malformed_request", "The Host header must be a host name or address, and its port if it has one."
        )
    if method != b"CONNECT" and ORIGIN_FORM.fullmatch(target):
        return target
    if method == b"OPTIONS" and target == b"*":
        return target
    path = None if method == b"CONNECT" else path_of_url(target)
    if path is None:
        message = "The request's target must be a path or an http URL; the service is no proxy and has no CONNECT."
        raise ApiError("malformed_request", message)
    return path


def path_of_url(target: bytes) -> bytes | None:
    """Return the path and query of a target in absolute form; None if it is in another form."""
    absolute = ABSOLUTE_FORM.fullmatch(target)
    if absolute and HOST.fullmatch(absolute[1]):
        path = absolute[2] or b""
        return path if path.startswith(b"/") else b"/" + path
    return None


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    A head that is late is answered with 408, one that is too large with 431, and one that is not valid HTTP with 400; a
    connection on which nothing ever came is closed without a word. While a route reads the body, the route watches its
    time (408); the rest of a body that no route wants any more has the same time, then the connection is closed. A
    body that breaks HTTP's framing, or that is refused because too many arrive at once, is reported to its route as an
    exception of `receive`. Every error is answered after the answers to earlier requests, and then the connection is
    closed. Of requests sent ahead of their turn more than `MAX_PIPELINED` are not read: the connection is closed behind
    the answers to those, which its reset may overtake. An answer of which nothing is read for `write_timeout_s` is cut
    off, also where the connection was closed behind it. The client's machine tells in steps that it has read, of some
    200 kB and less: who reads less in that time may be cut off too.
    """

    def __init__(
        self,
        *arguments: Any,
        limits: ReadLimits,
        connections: ConnectionLimits,
        bodies: IncomingBodies,
        on_refusal: OnRefusal,
        **options: Any,
    ) -> None:
        """`on_refusal` is called with each request that ends here, before any endpoint."""
        super().__init__(*arguments, **options)
        self._limits = limits
        self._connections = connections
        self._bodies = bodies
        self._on_refusal = on_refusal
        self._address: str | None = None  # of the client, while the connection is counted
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._is_refused = False  # nothing is read any more
        self._is_lingering = False
        self._refusal: ApiError | None = None  # to be answered after the requests before it
        self._unparsed_bytes = 0  # of a head, or of what stands between the parts of a body, that is not whole yet
        self._exchange: Any = None  # of the newest request
        self._earlier: deque[Any] = deque()  # cycles before `self.cycle`, the newest, that may still be answered
        self._unread = 0  # as `num_unread` said last
        self._last_progress = 0.0  # when the client last read, on the loop's clock
        self._lost_code = CLIENT_GONE  # why the connection is lost, where it is

    # Reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        address = self.client[0] if self.client else ""
        try:
            self._connections.admit(address, sock.fileno())
        except ApiError as error:
            self._is_refused = True
            self.transport.write(error_response(error, secrets.token_hex(12)))
            if self._connections.may_linger(sock.fileno()):
                self._linger()
            else:
                self._close()
            return
        self._address = address
        # Otherwise the kernel takes megabytes and for a long time says nothing of a client that reads slowly.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_write_timer()
        if self._address is not None:
            self._connections.release(self._address)
        if self._is_lingering:
            self._connections.num_lingering -= 1
        # uvicorn tells the newest request alone that its client has left; with pipelining another one runs.
        for cycle in filter(None, (*self._earlier, self.cycle)):
            if not cycle.response_complete:
                if EXCHANGE in cycle.scope:  # else the application has ended
                    cycle.scope[EXCHANGE].lose(self._lost_code)
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(ApiError("malformed_request"))
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError("headers_too_large"))
        # A request that came whole needs no timer, and its body need not be counted if it is small.
        if self._is_in_body:
            self._wait_for_body()
        elif self._unparsed_bytes and self._read_timer is None and not self._is_refused:
            self._arm_head_timer()

    def _wait_for_body(self) -> None:
        if self._is_refused:
            return
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self._limits.body_timeout_s, self._on_late_body)
        if self._exchange.refusal is None and not self.cycle.response_complete:
            self._bodies.count(self._exchange)

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Ignore a request to change the protocol (RFC 9110, 7.8), and parse what follows its head.

        After a head that asks for it the parser takes the body for another protocol's and stops. So a new parser is
        given the same head without `Upgrade`, and then the body.
        """
        if self._is_refused:
            return
        lines = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        request_line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        data = b"".join([request_line, *lines, b"\r\n", rest])
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # of the next request
            self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(ApiError("malformed_request"))

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._is_refused:
            return
        parser = self.parser
        try:
            target = check_head(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        except ApiError as error:
            self._refuse(error)
            return
        if parser.should_upgrade():  # `_parse_without_upgrade` gives the head to another parser
            return
        if self.cycle is not None:
            self._earlier.append(self.cycle)
        while self._earlier and self._earlier[0].response_complete:  # they are answered in their order
            self._earlier.popleft()
        if len(self._earlier) > MAX_PIPELINED:
            self._is_refused = True
            self.cycle.keep_alive = False
            return
        self._is_in_body = True
        if self._read_timer is not None:
            self._stop_reading_timer()
        self.url = target
        super().on_headers_complete()
        self.headers = []  # of trailers, which nobody reads
        # In time: the application's task is made, and begins when this callback has returned.
        self._exchange = Exchange(self._bodies, self.cycle, self._break_off, has_turn=not self._earlier)
        scope: Any = self.cycle.scope
        scope[EXCHANGE] = self._exchange

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if not self._is_refused and self._exchange.refusal is None:
            self._exchange.num_received += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self.headers and sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse(ApiError("headers_too_large"))
        self._is_in_body = False
        self._unparsed_bytes = 0
        if self._read_timer is not None:
            self._stop_reading_timer()
        if self._is_refused:
            return
        super().on_message_complete()
        exchange = self._exchange
        exchange.is_complete = True
        is_counted = exchange.num_counted or self._earlier or exchange.num_received > MAX_UNCOUNTED_BYTES
        if is_counted and exchange.refusal is None:
            self._bodies.count(exchange)

    def _arm_head_timer(self) -> None:
        self._read_timer = self.loop.call_later(self._limits.header_timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        self._read_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm_head_timer()  # a pipelined head; what is being answered comes first
        elif self._unparsed_bytes:
            self._refuse(ApiError("client_too_slow"))
        else:
            self._close()

    def _on_late_body(self) -> None:
        self._read_timer = None
        if self.cycle.response_complete:
            self._close()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Read no more, answer with the error unless the request has an answer already, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_reading_timer()
        if not self._is_in_body:
            self._refusal = error
            self._answer_refusal()
        elif self.cycle.response_complete:
            self._close()
        else:
            self.cycle.keep_alive = False
            self._exchange.refuse(error)

    def _answer_refusal(self) -> None:
        """Answer with the error, if there is one, as soon as all requests before it are answered."""
        if self._refusal is None or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            request_id = secrets.token_hex(12)
            self._on_refusal(self._refusal, request_id)
            self.transport.write(error_response(self._refusal, request_id))
            self._refusal = None
            self._linger()

    def _linger(self) -> None:
        """Close, a moment after the client could read what was written.

        Unread data makes the kernel reset a connection that is closed, and the reset can overtake the answer.
        """
        self._is_lingering = True
        self._connections.num_lingering += 1
        self.transport.write_eof()
        self.flow.resume_reading()
        self._unset_keepalive_if_required()
        self._read_timer = self.loop.call_later(LINGER_S, self._close)

    # Writing

    def pause_writing(self) -> None:
        """More waits to be read by the client than the transport likes to hold; until it has, no more is written."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        # What is written from now on would hide what is read.
        self._stop_write_timer()
        super().resume_writing()
        self._watch_closing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None:
            self._answer_refusal()
        if self.transport.is_closing():
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def shutdown(self) -> None:
        super().shutdown()
        self._watch_closing()

    def _break_off(self, cycle: Any) -> None:
        """Close behind an answer that does not become whole; uvicorn takes the client for gone, and logs nothing."""
        cycle.disconnected = True
        cycle.message_event.set()
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """A connection that is closed waits until all that was written is read."""
        if self.transport.is_closing():
            self._watch_reader()

    def _watch_reader(self) -> None:
        if self._write_timer is None:
            self._unread = num_unread(self.transport)
            self._last_progress = self.loop.time()
            self._arm_write_timer()

    def _arm_write_timer(self) -> None:
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s / READER_CHECKS, self._check_reader)

    def _check_reader(self) -> None:
        """Cut off a client that has read nothing for `write_timeout_s`."""
        self._write_timer = None
        unread = num_unread(self.transport)
        if unread < self._unread:
            self._last_progress = self.loop.time()
        self._unread = unread
        if self.loop.time() - self._last_progress >= self._limits.write_timeout_s:
            self._lost_code = "client_too_slow"
            self.transport.abort()
        elif unread > 0:
            self._arm_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
