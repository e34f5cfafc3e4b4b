"""Measurement of the number of threads for a graph."""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

# Shorter runs get no more threads, and twice the threads must give at least this speedup
# (docs/adr/0014).
MIN_SECONDS = 0.004
MIN_SPEEDUP = 1.6
MEASURED_S = 0.01  # minimum duration of the measurement for each number of threads
MIN_RUNS = 5

Session = TypeVar("Session")
logger = logging.getLogger(__name__)


def tune_threads(
    name: str,
    session: Session,
    load: Callable[[int], Session],
    seconds_of: Callable[[Session], float],
    max_threads: int,
) -> tuple[Session, int]:
    """Double the number of threads of a graph as long as it speeds up runs enough.

    Args:
        name: name of the graph in the log.
        session: session with one thread.
        load: opens a session with a given number of threads.
        seconds_of: returns the duration of a run in a session.
        max_threads: maximum number of threads.

    Returns:
        The fastest session and its number of threads, a power of two.
    """
    threads, seconds = 1, seconds_of(session) if max_threads > 1 else 0.0
    while 2 * threads <= max_threads and seconds >= MIN_SECONDS:
        candidate = load(2 * threads)
        faster = seconds_of(candidate)
        logger.debug("%s: %.1f ms per run, %.1f ms with %d threads", name, 1e3 * seconds, 1e3 * faster, 2 * threads)
        if seconds < MIN_SPEEDUP * faster:
            break
        session, threads, seconds = candidate, 2 * threads, faster
    return session, threads


def shortest_run(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the duration of the fastest of several runs in seconds, after one warm-up run.

    The fastest run is the one least affected by other work on the machine.
    """
    run()
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MEASURED_S:
        started = clock()
        run()
        times.append(clock() - started)
    return min(times)
