"""Functions that run in daemon threads.

Neither the event loop nor the interpreter waits for such a thread when it ends, so that a signal
during a long load can end the process at once.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():  # the caller may have been cancelled
            set_outcome(outcome)

    def run() -> None:
        set_outcome: Callable[[Any], None] = future.set_result
        outcome: Any
        try:
            outcome = work()
        except BaseException as error:
            set_outcome, outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(deliver, set_outcome, outcome)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await future


def run_within(work: Callable[[], T], seconds: float) -> T:
    """Run a function in a daemon thread and return its result.

    Raises `TimeoutError` if it takes longer. The thread goes on, because threads cannot be ended.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="load-one", daemon=True).start()
    return outcome.result(seconds)


def run_in_threads(functions: Sequence[Callable[[], T]], num_threads: int) -> list[T]:
    """Call functions in several threads and return their results in order.

    An exception of a function is raised here. With one thread, or for one function, the calling
    thread runs them.
    """
    if num_threads == 1 or len(functions) <= 1:
        return [function() for function in functions]
    remaining = iter(list(enumerate(functions)))  # `next` of a list's iterator is atomic
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run() -> None:
        for index, function in remaining:
            try:
                results[index] = function()
            except BaseException as error:
                errors[index] = error

    threads = [
        threading.Thread(target=run, name=f"load-{number}", daemon=True)
        for number in range(min(num_threads, len(functions)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(functions))]
