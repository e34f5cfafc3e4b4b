"""Functions that run in daemon threads, and the exceptions that are no failures of a function.

Neither the event loop nor the interpreter waits for such a thread when it ends, so that a signal
during a long load can end the process at once.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")
# They end a task or the process. All others are failures of one call or one bundle, also those that
# are not subclasses of Exception: a panic of a library that is written in Rust is one.
INTERRUPTIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    return await asyncio.wrap_future(start(work))


def start(work: Callable[[], T], name: str = "load-beside") -> Future[T]:
    """Start a function in a daemon thread, which cannot be ended, and return its outcome."""
    outcome = Future[T]()

    def run() -> None:
        if outcome.set_running_or_notify_cancel():
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def run_in_threads(functions: Sequence[Callable[[], T]], num_threads: int) -> list[T]:
    """Call functions, a number of them at a time, and return their results in order.

    An exception of a function is raised here. With one thread, or for one function, the calling
    thread runs them.
    """
    if num_threads == 1 or len(functions) <= 1:
        return [function() for function in functions]
    slots = threading.Semaphore(num_threads)

    def run(function: Callable[[], T]) -> T:
        with slots:
            return function()

    outcomes = [start(partial(run, function), f"load-{number}") for number, function in enumerate(functions)]
    return [outcome.result() for outcome in outcomes]
