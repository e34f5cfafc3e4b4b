"""Results of a measurement, as plain data for JSON and as a table for a terminal."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.load import Measurement
from loadtest.outcome import Failure, Rejection, Success

DEFINITIONS = """\
latency                 from sending a request (open loop: from the time when it was due) to the end of the response
time to first token     from the same time to the first event of a streamed response
time per output token   (latency - time to first token) / (output tokens - 1)
throughput              successes, and their tokens, over the time from the first request to the last response
rejected                responses with status 503, by code; they are not failures and not part of the times above"""


@dataclass(frozen=True)
class Distribution:
    """Distribution of times in milliseconds.

    A percentile is the smallest value that this percentage of all values does not exceed.
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, seconds: Iterable[float | None]) -> "Distribution | None":
        """Return the distribution of the values that are not None; None without values."""
        values = sorted(1000 * value for value in seconds if value is not None)
        if not values:
            return None
        p50, p95, p99 = (values[math.ceil(len(values) * percent / 100) - 1] for percent in (50, 95, 99))
        return cls(len(values), sum(values) / len(values), p50, p95, p99, values[-1])


@dataclass(frozen=True)
class Summary:
    """Results of a measurement; `rejected` counts by error code, `failed` by reason."""

    elapsed_s: float
    sent: int
    succeeded: int
    rejected: Mapping[str, int]
    failed: Mapping[str, int]
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    latency_ms: Distribution | None
    time_to_first_token_ms: Distribution | None
    time_per_output_token_ms: Distribution | None


def summarize(measurement: Measurement) -> Summary:
    outcomes, elapsed_s = measurement.outcomes, measurement.elapsed_s
    successes = [outcome for outcome in outcomes if isinstance(outcome, Success)]
    return Summary(
        elapsed_s=elapsed_s,
        sent=len(outcomes),
        succeeded=len(successes),
        rejected=Counter(outcome.code for outcome in outcomes if isinstance(outcome, Rejection)),
        failed=Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Failure)),
        requests_per_s=len(successes) / elapsed_s,
        output_tokens_per_s=sum(success.output_tokens for success in successes) / elapsed_s,
        input_tokens_per_s=sum(success.input_tokens for success in successes) / elapsed_s,
        latency_ms=Distribution.of_seconds(success.latency_s for success in successes),
        time_to_first_token_ms=Distribution.of_seconds(success.first_token_s for success in successes),
        time_per_output_token_ms=Distribution.of_seconds(success.per_output_token_s for success in successes),
    )


def format_table(summary: Summary) -> str:
    """Format the results for a terminal, after definitions of the terms."""
    times = (
        ("latency", summary.latency_ms),
        ("time to first token", summary.time_to_first_token_ms),
        ("time per output token", summary.time_per_output_token_ms),
    )
    lines = [
        DEFINITIONS,
        "",
        f"{summary.sent} sent in {summary.elapsed_s:.2f} s: {summary.succeeded} succeeded, "
        f"{sum(summary.rejected.values())} rejected, {sum(summary.failed.values())} failed",
        *_counts("rejected", summary.rejected),
        *_counts("failed", summary.failed),
        "",
        f"requests/s       {summary.requests_per_s:10.1f}",
        f"output tokens/s  {summary.output_tokens_per_s:10.1f}",
        f"input tokens/s   {summary.input_tokens_per_s:10.1f}",
        "",
        _row("ms", ("mean", "p50", "p95", "p99", "max")),
        *(_row(name, _cells(distribution)) for name, distribution in times if distribution is not None),
    ]
    return "\n".join(lines)


def _counts(kind: str, counts: Mapping[str, int]) -> Iterable[str]:
    return (f"  {kind}: {count} x {name}" for name, count in sorted(counts.items()))


def _cells(times: Distribution) -> Sequence[str]:
    return [f"{value:.2f}" for value in (times.mean, times.p50, times.p95, times.p99, times.max)]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<22}" + "".join(f"{cell:>10}" for cell in cells)
