"""Calls between the supervisor and a worker, over a pair of connected sockets.

A message is a line of JSON. Both sides can call the other one.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping
from inspect import isawaitable
from itertools import count
from typing import Any

import orjson

from sightline.service.api_errors import ApiError
from sightline.service.peers import Handler, spawn

ALIVE_S = 1.0  # a worker gives two signs of life in this time
MAX_BYTES = 1 << 30  # of a message; metrics of many models have megabytes
logger = logging.getLogger(__name__)


class ChannelClosedError(Exception):
    """The other side has closed the channel, or its process has ended."""


class Channel:
    """One side of the connection between the supervisor and a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._handlers: Mapping[str, Handler] = {}
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # calls without a response, by their number
        self._tasks: set[asyncio.Task[Any]] = set()  # calls of the other side

    @classmethod
    async def open(cls, sock: socket.socket) -> "Channel":
        """Create a channel over a connected socket."""
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=MAX_BYTES))

    async def run(self, handlers: Mapping[str, Handler]) -> None:
        """Answer the calls of the other side, by names of `handlers`, until it closes the channel.

        An `ApiError` that a handler raises is raised on the other side.
        """
        self._handlers = handlers
        try:
            while (line := await self._reader.readline()).endswith(b"\n"):  # otherwise it was not sent as a whole
                self._receive(orjson.loads(line))
        except OSError:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close the channel. Calls that wait for a response fail with `ChannelClosedError`."""
        self._writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChannelClosedError)
        self._waiting.clear()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the other side, and return its result.

        Raises the function's `ApiError`, or `ChannelClosedError` if the other side has ended.
        """
        if self._writer.is_closing():
            raise ChannelClosedError
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"call": name, "number": number, "arguments": arguments})
            return await future
        finally:
            self._waiting.pop(number, None)

    def notify(self, name: str, *arguments: Any) -> None:
        """Call a function of the other side without waiting; do nothing if it has ended."""
        if not self._writer.is_closing():
            self._send({"call": name, "number": None, "arguments": arguments})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    def _receive(self, message: Mapping[str, Any]) -> None:
        if "call" in message:
            spawn(self._tasks, self._respond(message))
            return
        future = self._waiting.get(message["number"])
        if future is None or future.done():  # the caller was cancelled
            return
        if message["error"] is None:
            future.set_result(message["result"])
        else:
            code, text, field = message["error"]
            future.set_exception(ApiError(code, text, field=field))

    async def _respond(self, message: Mapping[str, Any]) -> None:
        result: Any = None
        error: tuple[str, str | None, str | None] | None = None
        try:
            returned = self._handlers[message["call"]](*message["arguments"])
            result = await returned if isawaitable(returned) else returned
        except ApiError as raised:
            error = (raised.code, raised.text, raised.field)
        except ChannelClosedError:
            error = ("internal", None, None)
        except Exception:
            logger.exception("a call between the processes of the service failed")
            error = ("internal", None, None)
        if message["number"] is not None and not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._send({"number": message["number"], "result": result, "error": error})
