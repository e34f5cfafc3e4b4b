"""Number of threads of a graph: its measurement, and the choice while other processes are idle."""

import logging
import math
import mmap
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from struct import calcsize
from typing import Any

# Shorter runs get no more threads, and twice the threads must give at least this speedup
# (docs/adr/0014).
MIN_SECONDS = 0.004
MIN_SPEEDUP = 1.4
# While the other workers are idle, a model runs with one thread for each of these bytes of its
# memory. The runs of smaller models are too short. Larger models would need too much memory for a
# second session.
BYTES_OF_THREAD = 25_000_000
MAX_BYTES_ALONE = 200_000_000
IDLE_S = 0.05  # time without work after which a worker is idle
TRIES = 3  # measurements before twice the threads count as too slow
PAUSE_S = 0.05  # between two of them, so that a short disturbance ends
MEASURED_S = 0.01  # minimum duration of the measurement for each number of threads
MIN_RUNS = 5

logger = logging.getLogger(__name__)


class Activity:
    """Tells the workers of a service which of them have work; by default, others always have."""

    def set_busy(self, is_busy: bool) -> None:
        """Tell the other workers whether this one has work."""

    def is_alone(self) -> bool:
        """Return True if no other worker has work."""
        return False


class SharedActivity(Activity):
    """`Activity` of one worker, in memory that is shared with processes that are forked later.

    For each worker, the memory has the time since which it has had no work: infinity while it has.
    A worker that has just become idle still counts as busy, because it is probably sending a
    response, and its client the next request.
    """

    def __init__(self, num_workers: int) -> None:
        self._idle_since = memoryview(mmap.mmap(-1, num_workers * calcsize("d"))).cast("d")
        self._slot = 0
        self._is_busy = False

    def of(self, slot: int) -> "SharedActivity":
        """Return the view of the worker with an index."""
        view = copy(self)
        view._slot = slot
        return view

    def set_busy(self, is_busy: bool) -> None:
        if is_busy is not self._is_busy:
            self._is_busy = is_busy
            self._idle_since[self._slot] = math.inf if is_busy else time.monotonic()

    def clear(self, slot: int) -> None:
        """Note that a worker has ended, perhaps while it was busy."""
        self._idle_since[slot] = 0.0

    def is_alone(self) -> bool:
        limit = time.monotonic() - IDLE_S
        return all(since < limit for slot, since in enumerate(self._idle_since) if slot != self._slot)


@dataclass(frozen=True)
class ThreadPlan:
    """The number of threads of the graphs in one process."""

    max_threads: int
    max_threads_of_large: int = 0  # the same for models larger than `MAX_BYTES_ALONE`, if it is more
    cores: int = 1  # while the other workers are idle
    # Measured numbers by model and graph. Other graphs are measured when they are loaded.
    known: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    activity: Activity = field(default_factory=Activity)

    def most(self, num_bytes: int) -> int:
        """Return the maximum number of threads of a graph of a model of this size."""
        is_large = num_bytes > MAX_BYTES_ALONE
        return max(self.max_threads, self.max_threads_of_large) if is_large else self.max_threads


def threads_alone(num_bytes: int, cores: int) -> int:
    """Return the number of threads of a model's graphs while the other workers are idle.

    It is a power of two; 1 if a model of `num_bytes` is too small or too large for more threads.
    """
    most = min(cores, num_bytes // BYTES_OF_THREAD) if num_bytes <= MAX_BYTES_ALONE else 1
    return 1 << max(0, most.bit_length() - 1)


def waits_of_threads() -> dict[str, float]:
    """Return the time in seconds that each thread of this process has waited for a processor.

    It is empty on a system without these times.
    """
    waits: dict[str, float] = {}
    for path in glob("/proc/self/task/*/schedstat"):
        with suppress(OSError):  # the thread has ended
            waits[path] = int(Path(path).read_bytes().split()[1]) / 1e9
    return waits


def tune_threads(
    name: str,
    load: Callable[[int], None],
    seconds_of_run: Callable[[], float],
    max_threads: int,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Double the number of threads of a graph as long as it speeds up runs enough, and return it.

    Other work on the machine slows down several threads more than one. Therefore the measurement is
    repeated before it decides against more threads, and the fastest one counts. `load` replaces the
    session, which has one thread at first, by one with a given number.
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
    return threads


def shortest_run(
    run: Callable[[], Any],
    clock: Callable[[], float] = time.perf_counter,
    waits: Callable[[], Mapping[str, float]] = waits_of_threads,
) -> float:
    """Return the duration of the fastest of several runs in seconds, after one warm-up run.

    The fastest run is the one least affected by other work on the machine. A program that uses a
    processor all the time affects each of them, so the longest time that a thread of this process
    waited for a processor does not count. It is at most half of the run: the time of a thread that
    began to wait earlier says nothing about the run.
    """
    run()
    times: list[float] = []
    seconds = 0.0
    while len(times) < MIN_RUNS or seconds < MEASURED_S:
        before, started = waits(), clock()
        run()
        elapsed = clock() - started
        waited = max((after - before.get(thread, after) for thread, after in waits().items()), default=0.0)
        times.append(elapsed - min(waited, elapsed / 2))
        seconds += elapsed
    return min(times)
