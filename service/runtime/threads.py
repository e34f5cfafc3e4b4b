"""Choice of the number of threads that run a graph, by measurement."""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

# Runs that take less keep their threads, and twice the threads must be this many times as fast (docs/adr/0014).
MIN_SECONDS = 0.004
MIN_SPEEDUP = 1.6
MEASURED_S = 0.01  # of runs with each number of threads
MIN_RUNS = 5

Session = TypeVar("Session")
logger = logging.getLogger(__name__)


def with_paying_threads(
    name: str, session: Session, load: Callable[[int], Session], seconds_of: Callable[[Session], float], most: int
) -> tuple[Session, int]:
    """Double the threads that run a graph as long as that pays.

    Args:
        name: of the graph, for the log.
        session: runs the graph with one thread.
        load: opens a session with a number of threads.
        seconds_of: measures a run.
        most: threads that the process may use.

    Returns:
        The session to use, and its threads: a power of two.
    """
    threads, seconds = 1, seconds_of(session) if most > 1 else 0.0
    while 2 * threads <= most and seconds >= MIN_SECONDS:
        candidate = load(2 * threads)
        faster = seconds_of(candidate)
        logger.debug("%s: %.1f ms a run; %.1f ms with %d threads", name, 1e3 * seconds, 1e3 * faster, 2 * threads)
        if seconds < MIN_SPEEDUP * faster:
            break
        session, threads, seconds = candidate, 2 * threads, faster
    return session, threads


def shortest_run(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of the shortest of several runs, which is the least delayed by other work.

    A run before them is not counted.
    """
    run()
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MEASURED_S:
        started = clock()
        run()
        times.append(clock() - started)
    return min(times)
