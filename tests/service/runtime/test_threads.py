"""Number of threads of a graph, with given durations and with real graphs."""

import threading
from pathlib import Path

import numpy as np
import pytest

from sightline.base.bundle_files import read_bundle
from sightline.service.runtime import thread_counts
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.runtime.thread_counts import (
    SharedActivity,
    ThreadPlan,
    shortest_run,
    threads_alone,
    tune_threads,
    waits_of_threads,
)
from tests.equality.neighbours import assert_same_bits, draw, run_rows


@pytest.mark.parametrize(
    ("milliseconds", "most", "expected"),
    [
        ({1: 10.0, 2: 6.0, 4: 3.7, 8: 2.3}, 16, 4),  # 3.7 ms are short enough
        ({1: 10.0, 2: 6.0, 4: 5.0}, 4, 2),  # the second doubling pays less
        ({1: 10.0, 2: 7.2}, 4, 1),
        ({1: 10.0, 2: 7.1}, 2, 2),
        ({1: 10.0, 2: 20.0}, 2, 1),
        ({1: 3.0}, 4, 1),  # nothing is loaded for a short run
        ({1: 100.0, 2: 51.0}, 3, 2),
        ({}, 1, 1),  # nothing is measured where there is no choice
    ],
)
def test_threads_are_doubled_while_that_increases_the_speed(
    milliseconds: dict[int, float], most: int, expected: int
) -> None:
    loaded = [1]
    tune_threads("graph", loaded.append, lambda: milliseconds[loaded[-1]] / 1000, most, lambda seconds: None)
    assert loaded[-1] == expected


def test_a_disturbance_of_some_measurements_does_not_change_the_choice() -> None:
    threads_of_runs = iter([20.0, 30.0, 19.0, 11.0])  # one thread, then three times two: the first two are disturbed
    loaded, pauses = [1], list[float]()
    tune_threads("graph", loaded.append, lambda: next(threads_of_runs) / 1000, 2, pauses.append)
    assert loaded == [1, 2]
    assert len(pauses) == 2


def test_the_shortest_of_several_runs_counts_and_the_first_does_not() -> None:
    times = iter([0.0, 0.007, 1.0, 1.003, 2.0, 2.001, 3.0, 3.004, 4.0, 4.1])
    runs: list[None] = []
    assert shortest_run(lambda: runs.append(None), lambda: next(times), dict) == pytest.approx(0.001)
    assert len(runs) == 6


@pytest.mark.parametrize(("waited", "expected"), [(0.04, 0.06), (9.0, 0.05)])  # at most half of the run
def test_the_longest_time_that_a_thread_waited_does_not_count(waited: float, expected: float) -> None:
    """Regression: a program that kept one of two processors busy made two threads look slow."""
    times = (clock for run in range(5) for clock in (run, run + 0.1))
    waits = iter([{"a": 7.0, "b": 0.0}, {"a": 7.01, "b": waited, "new": 5.0}] * 5)
    assert shortest_run(lambda: None, lambda: next(times), lambda: next(waits)) == pytest.approx(expected)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not measure it")
def test_the_time_that_a_thread_waits_is_read() -> None:
    assert waits_of_threads()[f"/proc/self/task/{threading.get_native_id()}/schedstat"] >= 0.0


def test_a_runner_has_the_same_bits_after_it_has_chosen_its_threads(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_bundle(bundle)
    one, more = (OnnxRunner(bundle, manifest, num_threads=1, max_rows=6) for _ in range(2))
    assert one.threads == {"encoder": 1, "decoder": 1}
    one.choose_threads(bundle, ThreadPlan(1))
    assert one.threads == {"encoder": 1, "decoder": 1}
    monkeypatch.setattr(thread_counts, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(thread_counts, "MIN_SPEEDUP", 0.0)
    more.choose_threads(bundle, ThreadPlan(4, known={manifest.name: {"encoder": 2}}))
    assert more.threads == {"encoder": 2, "decoder": 4}  # a known number is not measured again
    random = np.random.default_rng(3)
    sequences = [(draw(random, manifest, length), draw(random, manifest, 3)) for length in (5, 1, 17, 9, 30, 2)]
    for row in range(6):
        assert_same_bits(run_rows(more, sequences, row), run_rows(one, sequences, row), f"row {row}")


@pytest.mark.parametrize(
    ("megabytes", "cores", "expected"),
    [(49, 64, 1), (50, 64, 2), (50, 1, 1), (99, 64, 2), (100, 64, 4), (200, 64, 8), (200, 6, 4), (201, 64, 1)],
)
def test_a_model_of_medium_size_gets_more_threads_while_the_others_are_idle(
    megabytes: int, cores: int, expected: int
) -> None:
    assert threads_alone(megabytes * 1_000_000, cores) == expected


@pytest.mark.parametrize(("megabytes", "expected"), [(200, 3), (201, 8)])
def test_a_large_model_may_get_more_threads_than_the_share_of_a_worker(megabytes: int, expected: int) -> None:
    assert ThreadPlan(3, 8).most(megabytes * 1_000_000) == expected


def test_a_worker_is_alone_once_the_others_have_been_idle_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("sightline.service.runtime.thread_counts.time.monotonic", lambda: now)
    shared = SharedActivity(3)
    first, second, third = map(shared.of, range(3))

    def alone() -> list[bool]:
        return [one.is_alone() for one in (first, second, third)]

    assert alone() == [True, True, True]
    second.set_busy(True)
    assert alone() == [False, True, False]
    third.set_busy(True)
    assert alone() == [False, False, False]
    now = 200.0
    second.set_busy(False)
    assert alone() == [False, False, False]  # the second worker has just become idle
    now += thread_counts.IDLE_S + 0.001
    assert alone() == [False, False, True]
    shared.clear(2)  # the process has ended
    assert alone() == [True, True, True]


def test_a_runner_has_the_same_bits_while_the_others_are_idle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_counts, "BYTES_OF_THREAD", 1_000_000)
    manifest = read_bundle(bundle)
    shared = SharedActivity(2)
    one, more = (OnnxRunner(bundle, manifest, num_threads=1, max_rows=6) for _ in range(2))
    more.choose_threads(bundle, ThreadPlan(1, cores=4, activity=shared.of(0)))
    assert (more.threads, more.threads_alone) == ({"encoder": 1, "decoder": 1}, 4)
    ran = set[str]()
    for session in (more._alone["encoder"], more._alone["decoder"]):
        assert session.get_session_options().intra_op_num_threads == 4
    random, other = np.random.default_rng(3), shared.of(1)
    sequences = [(draw(random, manifest, length), draw(random, manifest, 3)) for length in (5, 1, 17, 9, 30, 2)]
    for row in range(6):
        other.set_busy(row % 2 == 0)
        monkeypatch.setattr(thread_counts, "IDLE_S", -1.0)  # idle at once
        ran.add("not alone" if more._session("decoder") is more._decoder else "alone")
        assert_same_bits(run_rows(more, sequences, row), run_rows(one, sequences, row), f"row {row}")
    assert ran == {"alone", "not alone"}
