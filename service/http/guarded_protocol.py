"""HTTP protocol of uvicorn with limits on time, size and pipelining of each connection.

uvicorn alone has no timeouts for heads, bodies and readers, and no size limit for heads. This class
overrides internals of uvicorn; the tests over raw sockets show if a new version is compatible.
"""

import asyncio
import fcntl
import re
import secrets
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sightline.service.api.endpoint import NATIVE_ERRORS
from sightline.service.api_errors import CLIENT_GONE, ApiError
from sightline.service.http.connections import ConnectionLimits
from sightline.service.http.dispatch import OnRejection
from sightline.service.http.incoming import EXCHANGE, Exchange, IncomingBodies
from sightline.service.settings import Settings

MAX_HEAD_BYTES = 32 * 1024  # includes the trailers of a body
MAX_UNSENT_BYTES = 64 * 1024  # unsent bytes that the kernel buffers
MAX_UNCOUNTED_BYTES = 16 * 1024  # a body that arrives at once is read in the next loop iteration
LINGER_S = 1.0  # a client that gets an error reads it, or sends more, within this time
READER_CHECKS = 50  # checks of a reader's progress within its timeout
MAX_PIPELINED = 32  # requests of a connection that wait for earlier responses

# Stricter than the HTTP parser, as RFC 9110 and 9112 require.
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
PATH = rb"[!-\"$-~]*"  # includes the query; clients send no fragments
ORIGIN_FORM = re.compile(rb"/" + PATH)
ABSOLUTE_FORM = re.compile(rb"(?i:https?)://(?!:)([^/?#]+)([/?]" + PATH + rb")?")


def num_unread(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the client has not acknowledged, also those in the kernel."""
    unwritten = transport.get_write_buffer_size()
    if not unwritten:
        return 0
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return unwritten + int(struct.unpack("i", queued)[0])


def error_response(error: ApiError, request_id: str) -> bytes:
    """Return the bytes of a complete error response that closes the connection."""
    body = NATIVE_ERRORS.write(error, error.message({}), None, request_id)
    headers = {
        **dict(error.headers()),
        b"content-length": str(len(body)).encode(),
        b"x-request-id": request_id.encode(),
        b"x-content-type-options": b"nosniff",
        b"connection": b"close",
    }
    lines = [name + b": " + value + b"\r\n" for name, value in headers.items()]
    return b"".join([STATUS_LINE[error.kind.status], *lines, b"\r\n", body])


def check_head(method: bytes, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the request's target in origin form: a path with its query.

    The method is in capitals, the names of headers in lower case.
    """
    size, hosts = len(target), []
    for name, value in headers:
        size += len(name) + len(value) + len(b": \r\n")
        if name == b"host":
            hosts.append(value)
    if size > MAX_HEAD_BYTES:
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
        message = "The request target must be a path or an http URL; CONNECT and proxying are not supported."
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

    - Head: 408 if it is late, 431 if it is too large, 400 if it is not valid HTTP. A connection
      that sends nothing is closed without a response.
    - Body: its route applies the timeout (408). After the response, the rest of the body has the
      same timeout; then the connection is closed. If a body has invalid framing, or is rejected
      because too many arrive at once, `receive_body` raises the error in its route.
    - Errors are sent after the responses to earlier requests; then the connection is closed.
    - Pipelining: at most `MAX_PIPELINED` requests are read. The connection is closed after their
      responses.
    - Close: if a request is still arriving, the rest of it is read and discarded (see `_linger`).
    - Response: if the client reads nothing for `client_timeout_s`, the connection is aborted, even
      if it was already closed. Clients acknowledge in steps of up to 200 kB, so a client that
      reads less than this within the timeout may be cut off too.
    """

    def __init__(
        self,
        *arguments: Any,
        settings: Settings,
        connections: ConnectionLimits,
        bodies: IncomingBodies,
        on_rejection: OnRejection,
        on_end: Callable[[], None] | None = None,
        elsewhere: tuple[int, int] = (0, 0),
        **options: Any,
    ) -> None:
        """Create the protocol of one connection; for `elsewhere`, see `ConnectionLimits.admit`.

        `on_rejection` is called for each request that fails before it reaches an endpoint, `on_end`
        when the connection is no longer counted, or was rejected.
        """
        super().__init__(*arguments, **options)
        self._on_end = on_end
        self._elsewhere = elsewhere
        self._settings = settings
        self._connections = connections
        self._bodies = bodies
        self._on_rejection = on_rejection
        self._unsent = b""  # error of a connection beyond a limit, until its client sends something
        self._address: str | None = None  # client address while the connection is counted
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._is_rejected = False  # further data is ignored
        self._is_lingering = False
        self._linger_until = 0.0  # latest end, on the loop's clock
        self._rejection: ApiError | None = None  # sent after the responses to earlier requests
        self._unparsed_bytes = 0  # bytes of an incomplete head or chunk header
        self._cycle_transport: Any = None  # transport of the cycles
        self._exchange: Any = None  # exchange of the newest request
        self._earlier: deque[Any] = deque()  # earlier cycles that may still be running
        self._unread = 0  # last value of `num_unread`
        self._last_progress = 0.0  # time of the client's last read, on the loop's clock
        self._lost_code = CLIENT_GONE  # reason if the connection is lost

    # Reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        address = self.client[0] if self.client else ""
        try:
            self._connections.admit(address, sock.fileno(), self._elsewhere)
        except ApiError as error:
            self._is_rejected = True
            if self._on_end is not None:
                self._on_end()
            self._unsent = error_response(error, secrets.token_hex(12))
            if self._connections.may_linger(sock.fileno()):
                self._is_lingering = True
                self._connections.num_lingering += 1
                self._read_timer = self.loop.call_later(LINGER_S, self._answer_rejected)
            else:
                self.transport.write(self._unsent)
                self._close()
            return
        self._address = address
        # Otherwise the kernel buffers megabytes, which hides a slow reader for a long time.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        # A cycle closes its transport after the last response, even if a body is still arriving.
        self._cycle_transport = SimpleNamespace(
            write=transport.write, is_closing=transport.is_closing, close=self._close_after_response
        )
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_write_timer()
        if self._address is not None:
            self._connections.release(self._address)
            if self._on_end is not None:
                self._on_end()
        if self._is_lingering:
            self._connections.num_lingering -= 1
        # uvicorn notifies only the newest request of the disconnect; with pipelining another one
        # runs.
        for cycle in filter(None, (*self._earlier, self.cycle)):
            if not cycle.response_complete:
                if EXCHANGE in cycle.scope:  # otherwise the application has ended
                    cycle.scope[EXCHANGE].lose(self._lost_code)
                cycle.disconnected = True
                cycle.message_event.set()
        if self._cycle_transport is not None:
            self._cycle_transport.close = self.transport.close  # no reference to this object
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_rejected:
            if self._unsent:
                self._answer_rejected()
            elif self._is_lingering:
                self._linger_longer()
            return
        self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        self._parse(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            self._reject(ApiError("headers_too_large"))
        # A complete request needs no timer, and a small complete body is not counted.
        if self._is_in_body:
            self._wait_for_body()
        elif self._unparsed_bytes and self._read_timer is None and not self._is_rejected:
            self._arm_head_timer()

    def _answer_rejected(self) -> None:
        """Send the error of a connection beyond a limit; no client expects it before it sends."""
        self.transport.write(self._unsent)
        self._unsent = b""
        self._linger()

    def _wait_for_body(self) -> None:
        if self._is_rejected:
            return
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self._settings.client_timeout_s, self._on_late_body)
        if self._exchange.rejection is None and not self.cycle.response_complete:
            self._bodies.count(self._exchange)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._reject(ApiError("malformed_request"))

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Ignore a request to change the protocol (RFC 9110, 7.8) and parse the rest as HTTP/1.1.

        The parser stops after a head with `Upgrade`. A new parser therefore gets the same head
        without this header, then the body.
        """
        if self._is_rejected:
            return
        lines = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        request_line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # same setting as in uvicorn
        self._parse(b"".join([request_line, *lines, b"\r\n", rest]))  # `rest` may have another one with `Upgrade`

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._is_rejected:
            return
        parser = self.parser
        try:
            target = check_head(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        except ApiError as error:
            self._reject(error)
            return
        if parser.should_upgrade():  # `_parse_without_upgrade` parses this head again
            return
        if self.cycle is not None:
            self._earlier.append(self.cycle)
        while self._earlier and self._earlier[0].response_complete:  # responses are sent in order
            self._earlier.popleft()
        if len(self._earlier) > MAX_PIPELINED:
            self._is_rejected = True
            self.cycle.keep_alive = False
            return
        self._is_in_body = True
        self._stop_reading_timer()
        self.url = target
        super().on_headers_complete()
        self.headers = []  # will hold the trailers, which are not used
        # The application's task exists, but starts only after this callback has returned.
        self.cycle.transport = self._cycle_transport
        self._exchange = Exchange(self._bodies, self.cycle, self._break_off, has_turn=not self._earlier)
        scope: Any = self.cycle.scope
        scope[EXCHANGE] = self._exchange

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if not self._is_rejected and self._exchange.rejection is None:
            self._exchange.num_received += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self.headers and sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._reject(ApiError("headers_too_large"))
        self._is_in_body = False
        self._unparsed_bytes = 0
        if self._is_rejected:
            return
        self._stop_reading_timer()
        super().on_message_complete()
        exchange = self._exchange
        exchange.is_complete = True
        is_counted = exchange.num_counted or self._earlier or exchange.num_received > MAX_UNCOUNTED_BYTES
        # After the response nothing would release the bytes.
        if is_counted and exchange.rejection is None and not self.cycle.response_complete:
            self._bodies.count(exchange)

    def _arm_head_timer(self) -> None:
        self._read_timer = self.loop.call_later(self._settings.client_timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        self._read_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm_head_timer()  # a pipelined head waits for the response in progress
        elif self._unparsed_bytes:
            self._reject(ApiError("client_too_slow"))
        elif not self._has_arrived():
            self._close()

    def _has_arrived(self) -> bool:
        """Return True if a request waits to be read: a late event loop runs timers first."""
        descriptor = self.transport.get_extra_info("socket").fileno()
        return fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)) != bytes(4)

    def _on_late_body(self) -> None:
        self._read_timer = None
        if self.cycle.response_complete:
            self._linger()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _reject(self, error: ApiError) -> None:
        """Stop reading, send the error unless the request has a response already, and close."""
        if self._is_rejected:
            return
        self._is_rejected = True
        self._stop_reading_timer()
        if not self._is_in_body:
            self._rejection = error
            self._send_rejection()
        elif self.cycle.response_complete:
            self._linger()
        else:
            self.cycle.keep_alive = False
            self._exchange.reject(error)

    def _send_rejection(self) -> None:
        """Send the pending error, if any, once all earlier requests have their responses."""
        if self._rejection is None or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            request_id = secrets.token_hex(12)
            self._on_rejection(self._rejection, request_id)
            self.transport.write(error_response(self._rejection, request_id))
            self._rejection = None
            self._linger()

    def _close_after_response(self) -> None:
        """Close the connection after the last response, once the client can read it."""
        if self._is_in_body or self._is_rejected or self.pipeline:
            self._linger()
        else:
            self._close()

    def _linger(self) -> None:
        """Close the connection once its client closes it or pauses, so that it gets the response.

        If received data is unread at close, the kernel resets the connection, and the reset can
        overtake the response.
        """
        self._connections.num_lingering += not self._is_lingering
        self._is_rejected = self._is_lingering = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._unset_keepalive_if_required()
        most_s = LINGER_S if self._address is None else self._settings.client_timeout_s
        self._linger_until = self.loop.time() + most_s
        self._linger_longer()

    def _linger_longer(self) -> None:
        self._stop_reading_timer()
        delay = min(LINGER_S, self._linger_until - self.loop.time())
        self._read_timer = self.loop.call_later(max(0.0, delay), self._close)

    # Writing

    def pause_writing(self) -> None:
        """Watch the reader while the transport's buffer is full."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        # New writes would hide the reader's progress.
        self._stop_write_timer()
        super().resume_writing()
        self._watch_closing()

    def on_response_complete(self) -> None:
        if self._is_lingering:  # no further request is read
            return
        super().on_response_complete()
        if self._rejection is not None:
            self._send_rejection()
        if self.transport.is_closing():
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        if not self._has_arrived():
            super().timeout_keep_alive_handler()
            self._watch_closing()

    def shutdown(self) -> None:
        if self._is_in_body and self.cycle.response_complete:
            self._linger()
        elif not self._is_lingering:
            super().shutdown()
            self._watch_closing()

    def _break_off(self, cycle: Any) -> None:
        """Close the connection after an incomplete response, which uvicorn does not log."""
        cycle.disconnected = True
        cycle.message_event.set()
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """Watch the reader of a closing connection, which stays open until all data is read."""
        if self.transport.is_closing():
            self._watch_reader()

    def _watch_reader(self) -> None:
        if self._write_timer is None:
            self._unread = num_unread(self.transport)
            self._last_progress = self.loop.time()
            self._arm_write_timer()

    def _arm_write_timer(self) -> None:
        self._write_timer = self.loop.call_later(self._settings.client_timeout_s / READER_CHECKS, self._check_reader)

    def _check_reader(self) -> None:
        """Cut off a client that has read nothing for `client_timeout_s`."""
        self._write_timer = None
        unread = num_unread(self.transport)
        if unread < self._unread:
            self._last_progress = self.loop.time()
        self._unread = unread
        if self.loop.time() - self._last_progress >= self._settings.client_timeout_s:
            self._lost_code = "client_too_slow"
            self.transport.abort()
        elif unread > 0:
            self._arm_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
