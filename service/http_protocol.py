"""uvicorn's HTTP protocol with limits on what a client may cost before its request is whole, and after.

uvicorn alone waits for ever for a head, a body or a reader, and takes heads of any size. This subclasses its internals,
so the tests over raw sockets decide whether another version of it may be used.
"""

import asyncio
import fcntl
import functools
import secrets
import socket
import struct
import termios
from collections import deque
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import ApiError, ErrorCode
from service.middleware import BREAK_OFF, Refuse

MAX_HEAD_BYTES = 32 * 1024  # trailers of a body included
MAX_UNSENT_BYTES = 64 * 1024  # that the kernel holds
MAX_PIPELINED = 32  # requests of a connection that wait for the answer to one before them


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


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    A head that is late is answered with 408 and one that is too large with 431; a connection on which nothing ever came
    is closed without a word. While a route reads the body, the route watches its time (408); the rest of a body that no
    route wants any more has the same time, then the connection is closed. Of requests sent ahead of their turn more
    than `MAX_PIPELINED` are not read: the connection is closed behind the answers to those, which its reset may
    overtake. An answer of which nothing is read for `write_timeout_s` is cut off, also where the connection was closed
    behind it. The client's machine tells in steps that it has read, of some 200 kB and less: who reads less in that
    time may be cut off too.
    """

    def __init__(self, *arguments: Any, limits: ReadLimits, on_refusal: Refuse, **options: Any) -> None:
        """`on_refusal` is told of each request that ends here, before any route."""
        super().__init__(*arguments, **options)
        self._limits = limits
        self._on_refusal = on_refusal
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._is_refused = False
        self._unparsed_bytes = 0  # of a head, or of what stands between the parts of a body, that is not whole yet
        self._head_bytes = 0
        self._earlier: deque[Any] = deque()  # cycles before `self.cycle`, the newest, that may still be answered

    # Reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Else the kernel takes megabytes and long tells nothing of a client that reads slowly.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_write_timer()
        # uvicorn tells the newest request alone that its client has left; with pipelining another one runs.
        for cycle in self._earlier:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._read_timer is None and not self._is_in_body:  # the first bytes after an idle time
            self._arm_head_timer()
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse("headers_too_large")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse("headers_too_large")
        if not self._is_refused and not self._is_in_body:  # trailers are nobody's
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._head_bytes > MAX_HEAD_BYTES:  # by its path
            self._refuse("headers_too_large")
        if self._is_refused:
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
        self._stop_reading_timer()
        self._read_timer = self.loop.call_later(self._limits.body_timeout_s, self._on_late_body)
        super().on_headers_complete()
        # In time: the app's task is made, and begins when this callback has returned.
        self.scope[BREAK_OFF] = functools.partial(self._break_off, self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._unparsed_bytes = 0
        self._stop_reading_timer()
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse("malformed_request")

    def _arm_head_timer(self) -> None:
        self._read_timer = self.loop.call_later(self._limits.header_timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        self._read_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm_head_timer()  # a pipelined head; what is being answered comes first
        elif self._unparsed_bytes:
            self._refuse("client_too_slow")
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

    def _refuse(self, code: ErrorCode) -> None:
        """Answer with an error where no answer is under way or was given, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_reading_timer()
        if not self._is_in_body and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(self._error_answer(ApiError(code)))
        self._close()

    def _error_answer(self, error: ApiError) -> bytes:
        request_id = secrets.token_hex(12)
        body = error.body(request_id)
        headers = {
            **dict(error.headers()),
            b"content-length": str(len(body)).encode(),
            b"x-request-id": request_id.encode(),
            b"connection": b"close",
        }
        self._on_refusal(error, request_id)
        lines = [name + b": " + value + b"\r\n" for name, value in headers.items()]
        return b"".join([STATUS_LINE[error.kind.status], *lines, b"\r\n", body])

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
        self._watch_closing()

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
            unread = num_unread(self.transport)
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self._check_reader, unread)

    def _check_reader(self, unread_before: int) -> None:
        """Cut off a client that has read nothing since the timer was armed."""
        self._write_timer = None
        unread = num_unread(self.transport)
        if unread >= unread_before > 0:
            self.transport.abort()
        elif unread > 0:
            self._watch_reader()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
