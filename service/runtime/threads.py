"""Measurement of the number of threads for a graph."""

import logging
import time
from collections.abc import Callable
from typing import Any

# Shorter runs get no more threads, and twice the threads must give at least this speedup
# (docs/adr/0014).
MIN_SECONDS = 0.004
MIN_SPEEDUP = 1.6
MEASURED_S = 0.01  # minimum duration of the measurement for each number of threads
MIN_RUNS = 5

logger = logging.getLogger(__name__)


def tune_threads(name: str, load: Callable[[int], None], seconds_of_run: Callable[[], float], max_threads: int) -> None:
    """Double the number of threads of a graph as long as it speeds up runs enough.

    Args:
        name: name of the graph in the log.
        load: replaces the session, which has one thread at first, by one with a given number.
        seconds_of_run: returns the duration of a run in the current session.
        max_threads: maximum number of threads.
    """
    threads, seconds = 1, seconds_of_run() if max_threads > 1 else 0.0
    while 2 * threads <= max_threads and seconds >= MIN_SECONDS:
        load(2 * threads)
        faster = seconds_of_run()
        logger.debug("%s: %.1f ms per run, %.1f ms with %d threads", name, 1e3 * seconds, 1e3 * faster, 2 * threads)
        if seconds < MIN_SPEEDUP * faster:
            load(threads)
            break
        threads, seconds = 2 * threads, faster


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
