"""Results of a measurement, as plain data for JSON and as a table for a terminal."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sightline.loadtest.load import Measurement
from sightline.loadtest.outcome import Failure, Outcome, Rejection, Success

# Times of a success by the names of their objectives: title and function.
TIMES: Mapping[str, tuple[str, Callable[[Success], float | None]]] = {
    "latency": ("latency", lambda success: success.latency_s),
    "ttft": ("time to first token", lambda success: success.first_token_s),
    "tpot": ("time per output token", lambda success: success.per_output_token_s),
    "gap": ("longest gap", lambda success: success.longest_gap_s),
}
DEFINITIONS = """\
latency                 from sending a request (open loop: from the time when it was due) to the end of the response
time to first token     from the same time to the first event with a token of a streamed response
time per output token   (latency - time to first token) / (output tokens - 1)
longest gap             longest time between two events with tokens of one response
throughput              successes, and their tokens, over the time from the first request to the last response
good                    successes that meet all objectives; without objectives, all successes
rejected                responses with status 503 or 429, by code; they are not failures and not part of the times above
lag                     delay of the load test itself: of a timer, and (open loop) of requests behind their schedule"""


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
    good: int
    rejected: Mapping[str, int]
    failed: Mapping[str, int]
    requests_per_s: float
    good_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    latency_ms: Distribution | None
    time_to_first_token_ms: Distribution | None
    time_per_output_token_ms: Distribution | None
    longest_gap_ms: Distribution | None
    lag_ms: Distribution | None

    @property
    def good_share(self) -> float:
        """Number of good requests over that of all requests; 0 without requests."""
        return self.good / self.sent if self.sent else 0.0

    @property
    def times(self) -> Mapping[str, Distribution | None]:
        """Distributions in milliseconds by the names of `TIMES`."""
        return {
            "latency": self.latency_ms,
            "ttft": self.time_to_first_token_ms,
            "tpot": self.time_per_output_token_ms,
            "gap": self.longest_gap_ms,
        }


def is_good(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    """Return True for a success that exceeds no objective: largest seconds by the names of `TIMES`.

    A response without the time of an objective, such as one token without a time per output token,
    meets that objective.
    """
    if not isinstance(outcome, Success):
        return False
    values = ((TIMES[name][1](outcome), limit) for name, limit in objectives.items())
    return all(value is None or value <= limit for value, limit in values)


def summarize(measurement: Measurement, objectives: Mapping[str, float] | None = None) -> Summary:
    """Summarize a measurement; `objectives` are those of `is_good`."""
    outcomes, elapsed_s = measurement.outcomes, measurement.elapsed_s
    successes = [outcome for outcome in outcomes if isinstance(outcome, Success)]
    good = sum(is_good(success, objectives or {}) for success in successes)
    times = {name: Distribution.of_seconds(map(read, successes)) for name, (_, read) in TIMES.items()}
    return Summary(
        elapsed_s=elapsed_s,
        sent=len(outcomes),
        succeeded=len(successes),
        good=good,
        rejected=Counter(outcome.code for outcome in outcomes if isinstance(outcome, Rejection)),
        failed=Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Failure)),
        requests_per_s=len(successes) / elapsed_s,
        good_per_s=good / elapsed_s,
        output_tokens_per_s=sum(success.output_tokens for success in successes) / elapsed_s,
        input_tokens_per_s=sum(success.input_tokens for success in successes) / elapsed_s,
        latency_ms=times["latency"],
        time_to_first_token_ms=times["ttft"],
        time_per_output_token_ms=times["tpot"],
        longest_gap_ms=times["gap"],
        lag_ms=Distribution.of_seconds(measurement.lags_s),
    )


def format_table(summary: Summary) -> str:
    """Format the results of one load for a terminal."""
    rows = [(TIMES[name][0], distribution) for name, distribution in summary.times.items()]
    rows.append(("lag of the load test", summary.lag_ms))
    lines = [
        f"{summary.sent} sent in {summary.elapsed_s:.2f} s: {summary.succeeded} succeeded, "
        f"{sum(summary.rejected.values())} rejected, {sum(summary.failed.values())} failed",
        *_counts("rejected", summary.rejected),
        *_counts("failed", summary.failed),
        f"{summary.good} good ({summary.good_share:.1%})",
        "",
        f"requests/s       {summary.requests_per_s:10.1f}",
        f"good requests/s  {summary.good_per_s:10.1f}",
        f"output tokens/s  {summary.output_tokens_per_s:10.1f}",
        f"input tokens/s   {summary.input_tokens_per_s:10.1f}",
        "",
        _row("ms", ("mean", "p50", "p95", "p99", "max")),
        *(_row(name, _cells(distribution)) for name, distribution in rows if distribution is not None),
    ]
    return "\n".join(lines)


def format_rates(rates: Sequence[float | None], summaries: Sequence[Summary]) -> str:
    """Format the results of several rates for a terminal, one row each; times are milliseconds."""
    has_tokens = any(summary.time_to_first_token_ms for summary in summaries)
    titles = ["sent", "rejected", "failed", "good", "good/s", "p50", "p95", "p99"]
    lines = [_row("requests/s", titles + (["ttft p50", "ttft p95"] if has_tokens else []))]
    for rate, summary in zip(rates, summaries, strict=True):
        counts = (summary.sent, sum(summary.rejected.values()), sum(summary.failed.values()))
        cells = [*map(str, counts), f"{summary.good_share:.1%}", f"{summary.good_per_s:.1f}"]
        latency, first = summary.latency_ms, summary.time_to_first_token_ms
        cells += _cells(latency)[1:4] if latency else ["-"] * 3
        if has_tokens:
            cells += _cells(first)[1:3] if first else ["-"] * 2
        lines.append(_row(f"{rate:g}", cells))
    return "\n".join(lines)


def _counts(kind: str, counts: Mapping[str, int]) -> Iterable[str]:
    return (f"  {kind}: {count} x {name}" for name, count in sorted(counts.items()))


def _cells(times: Distribution) -> Sequence[str]:
    return [f"{value:.2f}" for value in (times.mean, times.p50, times.p95, times.p99, times.max)]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<22}" + "".join(f"{cell:>10}" for cell in cells)
