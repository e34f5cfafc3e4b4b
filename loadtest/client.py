"""HTTP/1.1 client that records the time at which each part of a response arrives.

A load test often runs on the same machine as the service, so that the processor time of the client
limits the load. The following times are microseconds of processor time per request (in brackets:
per streamed request) on uvloop with 16 connections, measured against a server with a fixed response
of 15 tokens: httpx2 470 (760), aiohttp 87 (177), the whole load test with this client 29 (95). At
750 requests per second, httpx2 would use a third to a half of a core. Therefore this module
implements connections itself and parses with `httptools`, a dependency of uvicorn.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

# Servers close idle connections after a few seconds. The client closes them earlier, so that it
# never sends a request while the server closes the connection.
MAX_IDLE_S = 2.0


class IncompleteResponseError(Exception):
    """The connection ended, or the data was not valid HTTP, before the response was complete."""


@dataclass(frozen=True)
class Response:
    """Complete HTTP response.

    `parts` are the parts of the body with their times of arrival, and `ended` is the arrival of the
    end of the response, both in seconds of `time.perf_counter`. Header names are in lower case.
    """

    status: int
    headers: dict[str, str]
    parts: Sequence[tuple[float, bytes]]
    ended: float

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)


class Connection(asyncio.Protocol):
    """Connection that processes one request at a time."""

    def __init__(self) -> None:
        self.is_reusable = False
        self.idle_since = 0.0
        self._response: asyncio.Future[Response] | None = None
        self._lost = asyncio.Event()

    async def exchange(self, request: bytes) -> Response:
        """Send `request` and wait for the complete response. Raises `IncompleteResponseError`."""
        self.is_reusable = False
        self._headers: dict[str, str] = {}
        self._parts: list[tuple[float, bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    async def close(self) -> None:
        self.is_reusable = False
        self._transport.abort()
        await self._lost.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from `asyncio.Transport`.
        self._transport = cast(asyncio.Transport, transport)
        self.is_reusable = True
        self.idle_since = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        if self.is_reusable:  # data without a request
            self.is_reusable = False
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("response is not valid HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._fail("connection closed before the end of the response")
        self._lost.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        self._parts.append((time.perf_counter(), part))

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self.is_reusable = self._parser.should_keep_alive()
        self.idle_since = now
        if self._response is not None and not self._response.done():
            self._response.set_result(Response(self._parser.get_status_code(), self._headers, self._parts, now))

    def _fail(self, reason: str) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(IncompleteResponseError(reason))


class Client:
    """Client of one server that reuses connections, the most recent first.

    Args:
        url: URL of the server, such as `http://127.0.0.1:8000`. Its path is a prefix of every
            request's path. Raises `ValueError` if it is not an HTTP URL.
        timeout_s: timeout of a request in seconds, including the time to connect.
        reuses_connections: False opens a connection for each request, for servers that close them
            after a response without saying so.
        key: API key, sent as a bearer token; empty for none.
    """

    def __init__(self, url: str, timeout_s: float, reuses_connections: bool = True, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must be an HTTP URL such as http://127.0.0.1:8000, got {url!r}")
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._is_secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._head = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        if key:
            self._head += f"authorization: Bearer {key}\r\n"
        self._timeout_s = timeout_s
        self._reuses_connections = reuses_connections
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            await connection.close()

    async def post(self, path: str, body: bytes) -> Response:
        """Post a JSON body and wait for the complete response.

        Raises `OSError`, `TimeoutError` or `IncompleteResponseError`.
        """
        return await self._send(self.request(path, body))

    async def get(self, path: str) -> Response:
        """Get `path` and wait for the complete response; errors are those of `post`."""
        return await self._send(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode("ascii"))

    def request(self, path: str, body: bytes) -> bytes:
        """Return the bytes of a request that posts a JSON body."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode("ascii") + body

    async def _send(self, request: bytes) -> Response:
        async with asyncio.timeout(self._timeout_s):
            connection = await self._take() or await self._connect()
            try:
                response = await connection.exchange(request)
            except BaseException:
                await connection.close()
                raise
        if connection.is_reusable and self._reuses_connections:
            self._idle.append(connection)
        else:
            await connection.close()
        return response

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
