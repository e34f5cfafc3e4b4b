import pytest

from sightline.loadtest.load import Measurement
from sightline.loadtest.load_report import Distribution, format_rates, format_table, is_good, summarize
from sightline.loadtest.outcome import Failure, Outcome, Rejection, Success
from tests.support.tables import read_table


def test_a_percentile_is_the_smallest_value_that_the_given_share_does_not_exceed() -> None:
    distribution = Distribution.of_seconds(value / 1000 for value in range(100, 0, -1))
    assert distribution is not None
    assert (distribution.p50, distribution.p95, distribution.p99, distribution.max) == (50, 95, 99, 100)
    assert distribution.count == 100
    assert distribution.mean == pytest.approx(50.5)


def test_one_value_is_every_percentile_and_no_values_have_no_distribution() -> None:
    assert Distribution.of_seconds([0.25]) == Distribution(1, 250, 250, 250, 250, 250)
    assert Distribution.of_seconds([None]) is None


OUTCOMES: list[Outcome] = [
    Success(0.4, 0.1, 7, 4),  # 0.1 s per output token
    Success(0.8, 0.2, 8, 3),  # 0.3 s per output token
    Rejection("overloaded", 1),
    Rejection("overloaded", 1),
    Rejection("draining", 1),
    Failure("500 internal"),
]


def test_throughput_counts_successes_alone() -> None:
    summary = summarize(Measurement(OUTCOMES, elapsed_s=2.0))
    assert (summary.sent, summary.succeeded) == (6, 2)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.input_tokens_per_s) == (1.0, 3.5, 7.5)


def test_rejections_are_counted_by_code_apart_from_failures() -> None:
    summary = summarize(Measurement(OUTCOMES, elapsed_s=2.0))
    assert summary.rejected == {"overloaded": 2, "draining": 1}
    assert summary.failed == {"500 internal": 1}


def test_times_are_those_of_successes() -> None:
    summary = summarize(Measurement(OUTCOMES, elapsed_s=2.0))
    assert summary.latency_ms is not None
    assert summary.time_to_first_token_ms is not None
    assert summary.time_per_output_token_ms is not None
    assert (summary.latency_ms.count, summary.latency_ms.p50, summary.latency_ms.max) == (2, 400, 800)
    assert summary.time_to_first_token_ms.mean == pytest.approx(150)
    assert summary.time_per_output_token_ms.mean == pytest.approx(200)


def test_the_table_names_every_rejection_and_failure() -> None:
    table = format_table(summarize(Measurement(OUTCOMES, elapsed_s=2.0)))
    assert "6 sent in 2.00 s: 2 succeeded, 3 rejected, 1 failed" in table
    assert "rejected: 2 x overloaded" in table
    assert "failed: 1 x 500 internal" in table
    assert "time to first token       150.00    100.00    200.00" in table


def test_the_table_has_no_row_for_missing_measurements() -> None:
    table = format_table(summarize(Measurement([Success(0.4, None, 7, 4)], elapsed_s=1.0)))
    rows = table[table.index("requests/s") :]
    assert "latency" in rows
    assert "time to first token" not in rows
    assert "longest gap" not in rows and "lag of the load test" not in rows


@pytest.mark.parametrize(("objectives", "expected"), read_table(__file__))
def test_a_good_request_exceeds_no_objective(objectives: dict[str, float], expected: bool) -> None:
    assert is_good(Success(0.4, 0.1, 7, 4, 0.2), objectives) is expected
    assert not is_good(Rejection("overloaded", 1), objectives)
    assert not is_good(Failure("timeout"), objectives)


def test_a_response_without_the_time_of_an_objective_meets_it() -> None:
    assert is_good(Success(0.4, 0.1, 7, 1), {"tpot": 0.001, "gap": 0.001})


def test_goodput_counts_good_requests_among_all() -> None:
    summary = summarize(Measurement(OUTCOMES, elapsed_s=2.0), {"ttft": 0.1})
    assert (summary.good, summary.good_share, summary.good_per_s) == (1, 1 / 6, 0.5)
    assert summarize(Measurement([], elapsed_s=2.0)).good_share == 0


def test_the_table_of_rates_has_a_row_for_each() -> None:
    summaries = [summarize(Measurement(OUTCOMES, 2.0)), summarize(Measurement([Failure("timeout")], 2.0))]
    _, first, second = format_rates([10, 20.5], summaries).splitlines()
    assert first.split() == ["10", "6", "3", "1", "33.3%", "1.0", "400.00", "800.00", "800.00", "100.00", "200.00"]
    assert second.split() == ["20.5", "1", "0", "1", "0.0%", "0.0", "-", "-", "-", "-", "-"]
