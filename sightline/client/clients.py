"""`sightline.connect` and `sightline.load`: clients with the same interface.

The requests of a client run on an event loop in a thread of its own. Therefore a client can be used
in notebooks, which run a loop themselves, by several threads, and by several loops.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from sightline.client import operations
from sightline.client.outputs import library
from sightline.client.transport import Request

if TYPE_CHECKING:
    from sightline.client.local import LocalTransport
    from sightline.client.remote import HttpTransport

P = ParamSpec("P")
T = TypeVar("T")


class Channel:
    """A transport, and the event loop on which all its methods run."""

    def __init__(self, transport: "HttpTransport | LocalTransport") -> None:
        self.transport = transport
        self._closed: Future[None] | None = None  # set once it is closed
        self._process: int | None = os.getpid()  # has the thread of the loop; None from the end of its requests on
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, name="sightline", daemon=True).start()

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run work on the event loop, from any other thread."""
        if self._closed is not None or self._process != os.getpid():  # threads are not forked
            work.close()
            raise RuntimeError("the client is closed, or belongs to the process that forked this one; make another one")
        return asyncio.run_coroutine_threadsafe(self._finish(work), self._loop)

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._process is not None:
                raise
            raise RuntimeError("the client was closed during the call") from None

    def blocking(self, operation: Callable[P, Request[T]]) -> Callable[P, T]:
        @wraps(operation)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return wait(self.run(self.transport.send(operation(*args, **kwargs))))

        return call

    def awaited(self, operation: Callable[P, Request[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @wraps(operation)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return await asyncio.wrap_future(self.run(self.transport.send(operation(*args, **kwargs))))

        return call

    def streamed(self, operation: Callable[P, Request[T]]) -> Callable[P, "Stream[T]"]:
        @wraps(operation)
        def call(*args: P.args, **kwargs: P.kwargs) -> Stream[T]:
            return Stream(self, operation(*args, **kwargs))

        return call

    def close(self) -> Future[None]:
        async def close() -> None:
            self._process, tasks = None, asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.transport.close()
            self._loop.call_soon(self._loop.stop)

        if self._closed is None:
            self._closed = self.run(close())
        return self._closed


def wait(future: Future[T]) -> T:
    """Return the result of a future, or cancel it if the caller is interrupted."""
    try:
        return future.result()
    finally:
        future.cancel()


class Stream(Generic[T]):
    """The parts of a response as they arrive, for `for` and for `async for`."""

    def __init__(self, channel: Channel, request: Request[T]) -> None:
        self._channel, self._events = channel, channel.transport.events(request)

    def __iter__(self) -> Iterator[T]:
        try:
            yield from iter(lambda: wait(self._channel.run(anext(self._events, None))), None)
        finally:
            self._end()

    async def __aiter__(self) -> AsyncGenerator[T]:
        try:
            while (part := await asyncio.wrap_future(self._channel.run(anext(self._events, None)))) is not None:
                yield part
        finally:
            self._end()

    def _end(self) -> None:
        """End the request, without waiting for it: the interpreter may be ending."""
        with contextlib.suppress(RuntimeError):  # the client is closed
            self._channel.run(self._events.aclose())


class AsyncClient(contextlib.AbstractAsyncContextManager["AsyncClient", None]):
    """The operations of a client for `async` code; they can be awaited on any event loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.translate = channel.awaited(operations.translate)
        self.generate = channel.awaited(operations.generate)
        self.stream = channel.streamed(operations.stream)
        self.embed = channel.awaited(operations.embed)
        self.classify = channel.awaited(operations.classify)
        self.attention = channel.awaited(operations.attention)
        self.tag = channel.awaited(operations.tag)
        self.rerank = channel.awaited(operations.rerank)

    async def close(self) -> None:
        """End the client, and cancel those of its requests that are running."""
        await asyncio.wrap_future(self._channel.close())

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(contextlib.AbstractContextManager["Client", None]):
    """The operations of a running service, or of bundles in this process.

    Inputs are a text or several. The functions raise `SightlineError`. `aio` has the same ones for
    `async` code.
    """

    def __init__(self, transport: "HttpTransport | LocalTransport") -> None:
        self._channel = channel = Channel(transport)
        self.aio = AsyncClient(channel)
        self.translate = channel.blocking(operations.translate)
        self.generate = channel.blocking(operations.generate)
        self.stream = channel.streamed(operations.stream)
        self.embed = channel.blocking(operations.embed)
        self.classify = channel.blocking(operations.classify)
        self.attention = channel.blocking(operations.attention)
        self.tag = channel.blocking(operations.tag)
        self.rerank = channel.blocking(operations.rerank)

    def close(self) -> None:
        """End the client, and cancel those of its requests that are running."""
        wait(self._channel.close())

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    url: str = "http://127.0.0.1:8000",
    api_key: str | None = None,
    *,
    timeout_s: float | None = 60.0,
    max_retries: int = 3,
) -> Client:
    """Return a client of a running service.

    Args:
        url: URL of the service; its path is a prefix of all routes.
        api_key: key of a service that needs one.
        timeout_s: seconds for which the service may send nothing; None waits for ever.
        max_retries: tries after a request that the service cannot take now (429 and 503). They
            wait as long as the service asks for.
    """
    remote = library("sightline.client.remote", "connect()")  # loads the HTTP library
    return Client(remote.HttpTransport(url, api_key, timeout_s, max_retries))


def load(bundles: str | Path, *, threads: int = 0) -> Client:
    """Return a client that runs models in this process, but not in those that are forked from it.

    Args:
        bundles: folder of a bundle; or a folder with several, each of which is loaded on its first
            use.
        threads: threads of each graph; 0 measures which number is best.
    """
    local = library("sightline.client.local", "load()")  # loads ONNX Runtime
    return Client(local.LocalTransport(bundles, threads))
