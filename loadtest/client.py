"""An HTTP/1.1 client that stamps each piece of an answer as it arrives. It knows nothing of the service.

A load test shares its machine with what it measures, so the client's own cost decides how much it can see. Measured
against a server with a fixed answer of 15 tokens, 16 connections, all on uvloop, in microseconds of the client's
processor time a request (streamed in brackets): httpx2 470 (760), aiohttp 87 (177), this file and all that the load
test does around it 29 (95). At 750 requests a second httpx2 would fill a third to a half of a core. So the connections
are ours and the parsing is `httptools`, which the service's own uvicorn brings along.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

# Servers drop idle connections after a few seconds. One that has been idle for this long is not used again, so that a
# request never meets a connection that is just being closed.
MAX_IDLE_S = 2.0


class BrokenAnswerError(Exception):
    """The connection ended, or the bytes made no sense, before the answer was whole."""


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    `parts` are the pieces of the body with their time of arrival, `ended` the arrival of the answer's end; both by
    `time.perf_counter`. Names of headers are in lower case.
    """

    status: int
    headers: dict[str, str]
    parts: Sequence[tuple[float, bytes]]
    ended: float

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)


class Connection(asyncio.Protocol):
    """One connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self.is_reusable = False
        self.idle_since = 0.0
        self._answer: asyncio.Future[Answer] | None = None
        self._lost = asyncio.Event()

    async def exchange(self, request: bytes) -> Answer:
        """Send `request` and wait for the whole answer.

        Raises:
            BrokenAnswerError: when there is no whole answer.
        """
        self.is_reusable = False
        self._headers: dict[str, str] = {}
        self._parts: list[tuple[float, bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    async def close(self) -> None:
        self.is_reusable = False
        self._transport.abort()
        await self._lost.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        self.is_reusable = True
        self.idle_since = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        if self.is_reusable:  # bytes that nobody asked for
            self.is_reusable = False
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._break("the answer is not HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._break("the connection ended before the answer did")
        self._lost.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        self._parts.append((time.perf_counter(), part))

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self.is_reusable = self._parser.should_keep_alive()
        self.idle_since = now
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(self._parser.get_status_code(), self._headers, self._parts, now))

    def _break(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(BrokenAnswerError(reason))


class Client:
    """Posts JSON to one server over connections that are kept and used again, the youngest first.

    Args:
        url: where the server is, such as `http://127.0.0.1:8000`; a path in it goes before every request's path.
        timeout_s: the longest that a request may take, connecting included.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not a URL of a server: {url!r}; it looks like http://127.0.0.1:8000")
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._is_secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._authority = parts.netloc.rpartition("@")[2]
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            await connection.close()

    async def post(self, path: str, body: bytes) -> Answer:
        """Post `body`, which is JSON, and wait for the whole answer.

        Raises:
            OSError: when no connection can be made.
            TimeoutError: when the answer is not whole in time.
            BrokenAnswerError: when there is no whole answer.
        """
        return await self._send(self.request(path, body))

    async def get(self, path: str) -> Answer:
        """Get `path`; raises as `post` does."""
        return await self._send(f"GET {self._prefix}{path} HTTP/1.1\r\nhost: {self._authority}\r\n\r\n".encode("ascii"))

    def request(self, path: str, body: bytes) -> bytes:
        """Return the bytes of the request that posts `body`, which is JSON."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\nhost: {self._authority}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode("ascii") + body

    async def _send(self, request: bytes) -> Answer:
        async with asyncio.timeout(self._timeout_s):
            connection = await self._take() or await self._connect()
            try:
                answer = await connection.exchange(request)
            except BaseException:
                await connection.close()
                raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            await connection.close()
        return answer

    async def _take(self) -> Connection | None:
        oldest = time.perf_counter() - MAX_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            await connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self._host, self._port, ssl=True if self._is_secure else None
        )
        return connection
