"""Functions that run in daemon threads.

Neither the event loop nor the interpreter waits for such a thread when it ends, so that a signal
during a long load can end the process at once.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    return await asyncio.wrap_future(_start([work], "load-async")[0])


def start(work: Callable[[], T]) -> Future[T]:
    """Start a function in a daemon thread and return its outcome."""
    return _start([work], "load-beside")[0]


def run_within(work: Callable[[], T], seconds: float) -> T:
    """Run a function in a daemon thread and return its result.

    Raises `TimeoutError` if it takes longer. The thread goes on, because threads cannot be ended.
    """
    return _start([work], "load-one")[0].result(seconds)


def run_in_threads(functions: Sequence[Callable[[], T]], num_threads: int) -> list[T]:
    """Call functions in several threads and return their results in order.

    An exception of a function is raised here. With one thread, or for one function, the calling
    thread runs them.
    """
    if num_threads == 1 or len(functions) <= 1:
        return [function() for function in functions]
    return [outcome.result() for outcome in _start(functions, "load", num_threads)]


def _start(functions: Sequence[Callable[[], T]], name: str, num_threads: int = 1) -> list[Future[T]]:
    """Call functions in daemon threads, and return their outcomes in order."""
    outcomes = [Future[T]() for _ in functions]
    remaining = iter(list(zip(outcomes, functions, strict=True)))  # `next` of a list's iterator is atomic

    def run() -> None:
        for outcome, function in remaining:
            if outcome.set_running_or_notify_cancel():
                try:
                    outcome.set_result(function())
                except BaseException as error:
                    outcome.set_exception(error)

    for number in range(min(num_threads, len(functions))):
        threading.Thread(target=run, name=f"{name}-{number}", daemon=True).start()
    return outcomes
