"""Server with scripted responses, including delays between bytes."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Piece = bytes | float  # bytes to send, or seconds to wait before the next piece

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Request:
    path: str
    body: dict[str, Any]
    key: str = ""


@dataclass(frozen=True)
class Reply:
    """Scripted response; `closes` closes the connection after it."""

    pieces: Sequence[Piece]
    closes: bool = False


def whole(status: int, body: object, wait_s: float = 0.0, headers: str = "") -> Reply:
    """Return a JSON response that is sent after `wait_s` seconds."""
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} Fake\r\ncontent-length: {len(data)}\r\n{headers}\r\n"
    return Reply([wait_s, head.encode() + data])


def rejection(code: str, retry_after_s: int | None = 1) -> Reply:
    headers = "" if retry_after_s is None else f"retry-after: {retry_after_s}\r\n"
    return whole(429 if code == "overloaded" else 503, {"error": {"code": code}}, headers=headers)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def translation(input_tokens: int = 7, output_tokens: int = 5, wait_s: float = 0.0) -> Reply:
    return whole(200, {"outputs": [], "usage": {"input_tokens": input_tokens, "output_tokens": output_tokens}}, wait_s)


def token_event(text: str = "Hund") -> bytes:
    return f"data: {json.dumps({'index': 0, 'token': {'id': 4}, 'text': text}, ensure_ascii=False)}\n\n".encode()


def final_event(output_tokens: int, input_tokens: int = 7) -> bytes:
    usage = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    return f"data: {json.dumps({'index': 0, 'finish_reason': 'eos', 'usage': usage})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@dataclass
class FakeService:
    """Server that responds to request number n, counting from 0, with `script(n, request)`.

    `times` has for each request the time when it was read and the times when pieces were written.
    """

    script: Callable[[int, Request], Reply]
    requests: list[Request] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    connections: int = 0
    url: str = ""

    async def __aenter__(self) -> "FakeService":
        self._handlers = set[asyncio.Task[None]]()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        handler = asyncio.create_task(self._serve(reader, writer))
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                times = [time.perf_counter()]
                self.times.append(times)
                reply = self.script(len(self.requests) - 1, request)
                for piece in reply.pieces:
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                    else:
                        writer.write(piece)
                        times.append(time.perf_counter())
                        await writer.drain()
                if reply.closes:
                    return
        except ConnectionError:
            pass  # the client left
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    length = next(int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:"))
    keys = [line[22:] for line in head.split("\r\n") if line.startswith("authorization: Bearer ")]
    return Request(head.split(" ")[1], json.loads(await reader.readexactly(length)), keys[0] if keys else "")
