"""Comparison of two runs, with a rule that tells a change from noise.

The requests of a run are not independent: a slow one delays those after it. Therefore, the
comparison divides each run into parts of equal length, draws such parts with replacement (a block
bootstrap, Künsch 1989) and computes the figure from the requests of the drawn parts. The interval
has 99 % of the ratios of two runs that are drawn in this way. A figure has become worse only if its
whole interval exceeds the threshold. The interval covers the noise within the runs; it cannot know
of a difference between them that has another cause, such as another load of the machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sightline.loadtest.load import Measurement
from sightline.loadtest.load_record import LoadRecord
from sightline.loadtest.load_report import TIMES, is_good
from sightline.loadtest.outcome import Success

Floats = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]
NUM_PARTS = 20  # of a run
NUM_DRAWS = 2000
INTERVAL = (0.5, 99.5)  # percentiles of the drawn ratios
PERCENTS = (50, 95, 99)
MIN_ABOVE = 5  # requests above a percentile; with fewer of them, it is not compared
SEED = 8
SMALLEST = 1e-3  # instead of 0, by which a figure cannot be divided; of milliseconds, the resolution
# Arguments of a run that may differ between two runs that are compared.
FREE = {"url", "model", "prompts", "duration", "requests", "warm_up", "max_lag"}


class NotComparableError(Exception):
    """Two runs have different loads, or too few requests."""


@dataclass(frozen=True)
class Change:
    """Change of a figure between two runs; `low` and `high` are the ends of its interval.

    The change is a share of the value before, such as -0.02. The rate of the stage is in requests
    per second; None for a closed loop.
    """

    rate: float | None
    figure: str
    before: float
    after: float
    low: float
    high: float
    is_worse_higher: bool

    def verdict(self, threshold: float) -> Literal["worse", "better", "unclear", ""]:
        """Judge the change by the rule of this module; empty if it is below the threshold."""
        low, high = (self.low, self.high) if self.is_worse_higher else (-self.high, -self.low)
        change = self.after / self.before - 1
        if low > threshold:
            return "worse"
        if high < -threshold:
            return "better"
        return "unclear" if abs(change) > threshold else ""


def compare_records(before: LoadRecord, after: LoadRecord) -> list[Change]:
    """Return the changes of all stages that both runs have.

    Raises `NotComparableError` if the loads differ, or no figure has enough requests.
    """
    for name in sorted((before.arguments.keys() | after.arguments.keys()) - FREE):
        old, new = before.arguments.get(name), after.arguments.get(name)
        if old != new:
            raise NotComparableError(f"{name} differs: {old} and {new}; compare runs of the same load")
    changes: list[Change] = []
    for old, new in zip(before.stages, after.stages, strict=False):
        changes += compare_measurements(old.measurement(), new.measurement(), before.objectives, old.rate)
    if not changes:
        raise NotComparableError("no figure has enough requests in both runs; run longer")
    return changes


def compare_measurements(
    before: Measurement, after: Measurement, objectives: Mapping[str, float], rate: float | None = None
) -> list[Change]:
    """Return the changes of the figures that both measurements have.

    These are the share of good requests, see `is_good`, and percentiles of the times; in a closed
    loop (no rate), also good requests per second, which the schedule determines in an open loop.
    """
    draws = np.random.default_rng(SEED).multinomial(NUM_PARTS, np.full(NUM_PARTS, 1 / NUM_PARTS), (2, NUM_DRAWS))
    runs = [_ResampledRun(measurement, objectives) for measurement in (before, after)]

    def change(figure: str, values: Sequence[tuple[float, Floats]], is_worse_higher: bool) -> Change:
        (old, drawn_old), (new, drawn_new) = values
        low, high = np.percentile(drawn_new / np.maximum(drawn_old, SMALLEST) - 1, INTERVAL)
        return Change(rate, figure, old, new, float(low), float(high), is_worse_higher)

    changes = []
    if runs[0].good.sum() >= MIN_ABOVE and runs[1].sent.sum():
        shares = [run.ratio(draw, run.good, run.sent) for run, draw in zip(runs, draws, strict=True)]
        changes.append(change("share of good requests", shares, is_worse_higher=False))
        if rate is None:
            speeds = [run.ratio(draw, run.good, run.seconds) for run, draw in zip(runs, draws, strict=True)]
            changes.append(change("good requests/s", speeds, is_worse_higher=False))
    for name, (title, _) in TIMES.items():
        for percent in PERCENTS:
            if all(run.times[name].has(percent) for run in runs):
                times = [run.times[name].percentile(draw, percent) for run, draw in zip(runs, draws, strict=True)]
                changes.append(change(f"{title} p{percent}, ms", times, is_worse_higher=True))
    return changes


class _ResampledRun:
    """Figures of a measurement from parts that are drawn with replacement."""

    def __init__(self, measurement: Measurement, objectives: Mapping[str, float]) -> None:
        length_s = max(measurement.due_s, default=0.0) / NUM_PARTS or 1.0
        parts = np.minimum((np.array(measurement.due_s) / length_s).astype(int), NUM_PARTS - 1)
        are_good = np.array([is_good(outcome, objectives) for outcome in measurement.outcomes], dtype=bool)
        self.sent = np.bincount(parts, minlength=NUM_PARTS)
        self.good = np.bincount(parts[are_good], minlength=NUM_PARTS)
        self.seconds = np.full(NUM_PARTS, measurement.elapsed_s / NUM_PARTS)
        self.times = {name: _Times.of(measurement, parts, read) for name, (_, read) in TIMES.items()}

    @staticmethod
    def ratio(draws: Integers, above: NDArray[Any], below: NDArray[Any]) -> tuple[float, Floats]:
        """Return the ratio of two sums over all parts, and over each draw of them."""
        return float(above.sum() / below.sum()), (draws @ above) / np.maximum(draws @ below, SMALLEST)


@dataclass(frozen=True)
class _Times:
    """Times of a measurement in milliseconds, in increasing order.

    `counts` (values, parts) are the numbers of values up to each value, by part.
    """

    values: Floats
    counts: Integers

    @classmethod
    def of(cls, measurement: Measurement, parts: Integers, read: Callable[[Success], float | None]) -> "_Times":
        read_s = [read(outcome) if isinstance(outcome, Success) else None for outcome in measurement.outcomes]
        values = 1000 * np.array([np.nan if value is None else value for value in read_s], dtype=np.float64)
        order = np.argsort(values)[: np.count_nonzero(~np.isnan(values))]  # NaN comes last
        counts = np.cumsum(parts[order, np.newaxis] == np.arange(NUM_PARTS), axis=0, dtype=np.int32)
        return cls(np.maximum(values[order], SMALLEST), counts)

    def has(self, percent: int) -> bool:
        return len(self.values) * (100 - percent) / 100 >= MIN_ABOVE

    def percentile(self, draws: Integers, percent: int) -> tuple[float, Floats]:
        """Return a percentile, see `Distribution`, of all values and of each draw of parts."""
        everything = np.ones((1, NUM_PARTS), dtype=np.int64)
        return float(self._percentiles(everything, percent)[0]), self._percentiles(draws, percent)

    def _percentiles(self, draws: Integers, percent: int) -> Floats:
        """Find the percentile of each draw by bisection."""
        ranks = np.ceil(draws @ self.counts[-1] * percent / 100)
        low, high = np.zeros(len(draws), dtype=int), np.full(len(draws), len(self.values) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            is_reached = (self.counts[middle] * draws).sum(axis=1) >= ranks
            low, high = np.where(is_reached, low, middle + 1), np.where(is_reached, middle, high)
        return self.values[low]


def format_changes(changes: Sequence[Change], threshold: float) -> str:
    """Format changes as a table for a terminal."""
    lines = [f"{'requests/s':<12}{'figure':<36}{'before':>10}{'after':>10}{'change':>9}  {'99 % interval':<24}"]
    for change in changes:
        rate = "" if change.rate is None else f"{change.rate:g}"
        interval = f"{change.low:+.1%} to {change.high:+.1%}"
        cells = f"{change.before:>10.4g}{change.after:>10.4g}{change.after / change.before - 1:>+9.1%}"
        lines.append(f"{rate:<12}{change.figure:<36}{cells}  {interval:<23} {change.verdict(threshold)}".rstrip())
    return "\n".join(lines)
