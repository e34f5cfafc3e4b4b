"""Functions that concern all processes of a service together, called by their names.

`metrics()` returns the metrics of all processes, `load(name, only_if_lazy)` loads or replaces a
model in all of them or in none, `unload(name)` unloads it in all; see `inference.changes` for their
errors. `QuotaStore.handlers` has the functions of quotas.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from inspect import isawaitable
from typing import Any, Protocol

Handler = Callable[..., Any]  # takes values of JSON, and returns one or a coroutine with it


class Peers(Protocol):
    """Calls the functions; in a worker, it is the channel to the supervisor."""

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call a function, and return its result. Raises the function's `ApiError`."""
        ...

    def notify(self, name: str, *arguments: Any) -> None:
        """Call a function without waiting."""
        ...


def spawn(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any]) -> None:
    """Run work in a task of `tasks`; the event loop itself keeps only a weak reference to it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


class NoPeers:
    """`Peers` of a service that is one process."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call(self, name: str, *arguments: Any) -> Any:
        result = self._handlers[name](*arguments)
        return await result if isawaitable(result) else result

    def notify(self, name: str, *arguments: Any) -> None:
        spawn(self._tasks, self.call(name, *arguments))
