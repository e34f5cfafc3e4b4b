"""Number of threads of a graph, with given durations and with real graphs."""

from pathlib import Path

import numpy as np
import pytest

from service.bundle import read_bundle
from service.runtime import threads
from service.runtime.ort import OnnxRunner
from service.runtime.threads import ThreadPlan, shortest_run, tune_threads
from tests.equality.company import assert_same_bits, draw, run_rows


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
    assert shortest_run(lambda: runs.append(None), lambda: next(times)) == pytest.approx(0.001)
    assert len(runs) == 6


def test_a_runner_has_the_same_bits_after_it_has_chosen_its_threads(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_bundle(bundle)
    one, more = (OnnxRunner(bundle, manifest, num_threads=1, max_rows=6) for _ in range(2))
    assert one.threads == {"encoder": 1, "decoder": 1}
    one.choose_threads(bundle, ThreadPlan(1))
    assert one.threads == {"encoder": 1, "decoder": 1}
    monkeypatch.setattr(threads, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(threads, "MIN_SPEEDUP", 0.0)
    more.choose_threads(bundle, ThreadPlan(4, {manifest.name: {"encoder": 2}}))
    assert more.threads == {"encoder": 2, "decoder": 4}  # a known number is not measured again
    random = np.random.default_rng(3)
    sequences = [(draw(random, manifest, length), draw(random, manifest, 3)) for length in (5, 1, 17, 9, 30, 2)]
    for row in range(6):
        assert_same_bits(run_rows(more, sequences, row), run_rows(one, sequences, row), f"row {row}")
