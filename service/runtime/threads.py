"""Measurement of the number of threads for a graph."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Shorter runs get no more threads, and twice the threads must give at least this speedup
# (docs/adr/0014).
MIN_SECONDS = 0.004
MIN_SPEEDUP = 1.4
TRIES = 3  # measurements before twice the threads count as too slow
PAUSE_S = 0.05  # between two of them, so that a short disturbance ends
MEASURED_S = 0.01  # minimum duration of the measurement for each number of threads
MIN_RUNS = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ThreadPlan:
    """The number of threads of the graphs in one process."""

    max_threads: int
    # Measured numbers by model and graph. Other graphs are measured when they are loaded.
    known: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def tune_threads(
    name: str,
    load: Callable[[int], None],
    seconds_of_run: Callable[[], float],
    max_threads: int,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Double the number of threads of a graph as long as it speeds up runs enough.

    Other work on the machine slows down several threads more than one. Therefore the measurement is
    repeated before it decides against more threads, and the fastest one counts.

    Args:
        name: name of the graph in the log.
        load: replaces the session, which has one thread at first, by one with a given number.
        seconds_of_run: returns the duration of a run in the current session.
        max_threads: maximum number of threads.
        pause: waits for a number of seconds.
    """
    threads, seconds = 1, seconds_of_run() if max_threads > 1 else 0.0
    while 2 * threads <= max_threads and seconds >= MIN_SECONDS:
        load(2 * threads)
        faster = seconds_of_run()
        for _ in range(TRIES - 1):
            if seconds < MIN_SPEEDUP * faster:
                pause(PAUSE_S)
                faster = min(faster, seconds_of_run())
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
