"""The comparison on simulated queues, whose requests depend on one another."""

import random

import pytest

from sightline.loadtest.compare import Change, compare_measurements
from sightline.loadtest.load import Measurement
from sightline.loadtest.outcome import Failure, Success
from tests.support.tables import read_table

THRESHOLD = 0.05


def queue(seed: int, service_s: float = 0.005, rate: float = 100.0, num_requests: int = 2000) -> Measurement:
    """Simulate one server whose service times have an exponential distribution."""
    draws = random.Random(seed)
    due_s = free_s = 0.0
    measurement = Measurement()
    for _ in range(num_requests):
        due_s += draws.expovariate(rate)
        free_s = max(due_s, free_s) + draws.expovariate(1 / service_s)
        measurement.outcomes.append(Success(free_s - due_s, None, 1, 0))
        measurement.due_s.append(due_s)
    measurement.elapsed_s = due_s
    return measurement


def verdicts(before: Measurement, after: Measurement, objectives: dict[str, float] | None = None) -> dict[str, str]:
    changes = compare_measurements(before, after, objectives or {}, rate=100.0)
    return {change.figure: change.verdict(THRESHOLD) for change in changes}


def test_equal_services_are_rarely_found_to_differ() -> None:
    """Two of 100 pairs are; 17 would be with one part for each request, as if independent."""
    found = [verdicts(queue(2 * pair), queue(2 * pair + 1)) for pair in range(12)]
    assert sum("worse" in one.values() or "better" in one.values() for one in found) <= 1


def test_a_slower_service_is_found() -> None:
    found = verdicts(queue(1), queue(2, service_s=0.007))
    assert found["latency p50, ms"] == found["latency p95, ms"] == "worse"
    assert verdicts(queue(2, service_s=0.007), queue(1))["latency p50, ms"] == "better"


def test_the_interval_contains_the_true_change() -> None:
    """The mean latency is 1 / (1 / service time - rate), and its median is ln 2 times that."""
    true_change = (1 / (1 / 0.006 - 100)) / (1 / (1 / 0.005 - 100)) - 1
    inside = 0
    for pair in range(12):
        changes = compare_measurements(queue(2 * pair), queue(2 * pair + 1, service_s=0.006), {}, rate=100.0)
        (median,) = (change for change in changes if change.figure == "latency p50, ms")
        inside += median.low <= true_change <= median.high
    assert inside >= 11


def test_failures_lower_the_share_of_good_requests() -> None:
    before, after = queue(1), queue(1)
    after.outcomes[::5] = [Failure("timeout")] * len(after.outcomes[::5])
    assert verdicts(before, after)["share of good requests"] == "worse"
    assert verdicts(before, queue(2, service_s=0.007), {"latency": 0.02})["share of good requests"] == "worse"
    after.outcomes[:] = [Failure("timeout")] * len(after.outcomes)
    assert verdicts(before, after) == {"share of good requests": "worse"}


def test_a_percentile_needs_requests_above_it() -> None:
    few, many = queue(1, num_requests=100), queue(2, num_requests=500)
    assert "latency p95, ms" in verdicts(few, few) and "latency p99, ms" not in verdicts(few, many)
    assert "latency p99, ms" in verdicts(many, many)
    assert verdicts(Measurement(), Measurement()) == {}


@pytest.mark.parametrize(("low", "high", "is_worse_higher", "verdict"), read_table(__file__))
def test_a_figure_is_worse_if_its_whole_interval_exceeds_the_threshold(
    low: float, high: float, is_worse_higher: bool, verdict: str
) -> None:
    change = Change(None, "figure", 100.0, 100.0 * (1 + (low + high) / 2), low, high, is_worse_higher)
    assert change.verdict(THRESHOLD) == verdict
    assert Change(None, "figure", 100.0, 104.0, -0.1, 0.18, is_worse_higher).verdict(THRESHOLD) == ""
