"""Profiles of a load: one rate after another, with pauses (a sweep) or without (steps)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sightline.loadtest.client import Client
from sightline.loadtest.load import Load, Measurement, run_load
from sightline.loadtest.load_report import Summary, summarize

FALLEN = 0.95  # a sweep stops after a rate whose goodput is below this share of the highest one


@dataclass(frozen=True)
class Stage:
    """A part of a profile, which begins `start_s` after the first stage.

    The rate is in requests per second, or None for a closed loop. Times of the measurement are from
    the start of this stage.
    """

    rate: float | None
    start_s: float
    measurement: Measurement


async def sweep(
    client: Client, load: Load, objectives: Mapping[str, float], on_summary: Callable[[float, Summary], None]
) -> list[Stage]:
    """Run a load for each rate and wait for all responses before the next one.

    The sweep stops after the first rate at which the service has fallen behind: the good requests
    per second, see `is_good`, are fewer than 95 % of those of an earlier rate.
    """
    stages: list[Stage] = []
    start_s, highest = 0.0, 0.0
    for rate in load.rates:
        measurement = await run_load(client, replace(load, rates=(rate,)))
        stages.append(Stage(rate, start_s, measurement))
        start_s += measurement.elapsed_s
        summary = summarize(measurement, objectives)
        on_summary(rate, summary)
        if summary.good_per_s < FALLEN * highest:
            break
        highest = max(highest, summary.good_per_s)
    return stages


def window(measurement: Measurement, start_s: float, end_s: float) -> Measurement:
    """Return the requests of a measurement that were due in [start_s, end_s), and all lags."""
    pairs = zip(measurement.due_s, measurement.outcomes, strict=True)
    requests = [(due_s - start_s, outcome) for due_s, outcome in pairs if start_s <= due_s < end_s]
    return Measurement(
        outcomes=[outcome for _, outcome in requests],
        elapsed_s=end_s - start_s,
        due_s=[due_s for due_s, _ in requests],
        lags_s=measurement.lags_s,
    )


def split(measurement: Measurement, rates: Sequence[float], duration_s: float) -> list[Stage]:
    """Return the parts of a load with several rates, each with the requests that were due in it."""
    starts = [index * duration_s for index in range(len(rates))]
    return [
        Stage(rate, start_s, window(measurement, start_s, start_s + duration_s))
        for rate, start_s in zip(rates, starts, strict=True)
    ]
