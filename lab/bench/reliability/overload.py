"""Measure overload: goodput, a small client beside large ones, and health checks while clients
retry.

The clients have the last core of the machine and the service has the others, so that clients that
send many requests do not slow down the service. On a machine with one core, they share it. Goodput
is the number of inputs per second in calls with a 200 response.
"""

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench.load import GENERATE, TIMEOUT_S, bodies_of, with_client
from lab.bench.options import Options
from lab.bench.record import Figure, Result
from lab.bench.server import RunningServer, serving
from sightline.loadtest.client import Client
from sightline.loadtest.load import Load, Measurement, run_load
from sightline.loadtest.load_report import Distribution
from sightline.loadtest.outcome import Success
from sightline.service.keys import add_key

INPUTS, BEAMS = 32, 4  # for a large call
PEAK_CLIENTS = {"large": (1, 2, 3, 4), "single": (16, 64, 128)}
OVERLOADS = {3: 60.0, 10: 6.0}  # multiples of the capacity, with the seconds of each load
LARGE_CLIENTS = 12
RETRYING_CLIENTS = 600
PROBE_PAUSE_S = 0.02
HEAD_START_S = 1.0  # of large calls before small ones
SECONDS = 2.4  # duration of a load, as a multiple of that of the other sections: few large calls succeed in a second


def run(options: Options) -> Result:
    options = replace(options, seconds=SECONDS * options.seconds)
    with _serving_apart(options) as server:
        rows: list[dict[str, Any]] = []
        figures: dict[str, Figure] = {}
        _run(server, _warm_up_load(options))
        for name, bodies, inputs in (
            ("large", _large_bodies(options.sentences), INPUTS),
            ("single", bodies_of(options.sentences), 1),
        ):
            figures |= _goodput(server, options, name, Load(GENERATE, bodies), inputs, PEAK_CLIENTS[name], rows)
        figures |= _small_among_large(server, options, rows)
        figures |= _retries(server, options, rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.json"
        keys = add_key(path, "small", "use"), add_key(path, "large", "use")
        with _serving_apart(options, keys=path) as server:
            _run(server, _warm_up_load(options), keys[0])
            figures |= _small_among_large(server, options, rows, keys)
    return Result(figures, rows)


@contextlib.contextmanager
def _serving_apart(options: Options, **settings: Path) -> Iterator[RunningServer]:
    """Serve on all cores but the last one, and keep this process on that one."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[:-1] or cores)  # the service inherits it
        with serving(options.bundles, log_level="info", default_model=options.default_model, **settings) as server:
            os.sched_setaffinity(0, cores[-1:])
            yield server
    finally:
        os.sched_setaffinity(0, cores)


def _large_bodies(sentences: Sequence[str]) -> list[bytes]:
    turns = itertools.cycle(sentences)
    return bodies_of((list(itertools.islice(turns, INPUTS)) for _ in sentences), num_beams=BEAMS)


def _warm_up_load(options: Options) -> Load:
    return Load(GENERATE, bodies_of(options.sentences), clients=8, requests=200)


def _run(server: RunningServer, load: Load, key: str = "") -> Measurement:
    return with_client(server.url, lambda client: run_load(client, load), key=key)


def _goodput(
    server: RunningServer,
    options: Options,
    name: str,
    load: Load,
    inputs: int,
    clients: Sequence[int],
    rows: list[dict[str, Any]],
) -> dict[str, Figure]:
    """Measure the peak goodput of a closed loop, then the goodput at multiples of that rate. The
    best number of clients is found beforehand, because the maximum of several noisy figures would
    be biased.
    """

    def measure(**changes: Any) -> tuple[Measurement, float]:
        """Run the load, changed; return its results, and the CPU milliseconds of the service."""
        before = server.process.cpu_seconds()
        measured = _run(server, replace(load, **changes))
        return measured, 1000 * (server.process.cpu_seconds() - before)

    best = max(
        clients,
        key=lambda count: _inputs_per_s(measure(clients=count, duration_s=options.seconds / 2)[0], inputs),
    )
    ratios: dict[int, list[float]] = {factor: [] for factor in OVERLOADS}
    recoveries: list[float] = []
    slowest: list[float] = []
    lags: list[float] = []
    resident: list[float] = []
    for _ in range(options.rounds):
        closed, cpu_ms = measure(clients=best, duration_s=options.seconds)
        peak, success_ms = _inputs_per_s(closed, inputs), cpu_ms / _num_successes(closed)
        rows.append(
            {
                "load": f"{name}: {best} clients, the best of {', '.join(map(str, clients))}",
                "goodput": round(peak, 1),
                "CPU ms a success": round(success_ms, 2),
            }
        )
        for factor, seconds in OVERLOADS.items():
            measured, cpu_ms = measure(rates=(factor * peak / inputs,), duration_s=seconds)
            successes, sent = _num_successes(measured), len(measured.outcomes)
            goodput = _inputs_per_s(measured, inputs)
            ratios[factor].append(goodput / peak)
            times, lag = _latencies(measured), _distribution(measured.lags_s)
            if factor == min(OVERLOADS):
                # From the last request to the last response: then the service has nothing to do.
                recoveries.append(measured.elapsed_s - seconds)
                slowest.append(times.p99 / 1000)
                lags.append(lag.p99)
            rows.append(
                {
                    "load": f"{name}: {factor} times as much",
                    "goodput": round(goodput, 1),
                    # The rest of the time, if a success costs as much as without overload.
                    "CPU ms a rejection": round((cpu_ms - success_ms * successes) / max(1, sent - successes), 2),
                    "succeeded": successes,
                    "sent": sent,
                    "p50 ms": round(times.p50, 1),
                    "p99 ms": round(times.p99, 1),
                    "client lag p99 ms": round(lag.p99, 1),
                }
            )
        resident.append(server.memory_mb("VmRSS"))
    return {
        **{f"overload.{name}.{factor}": Figure.of(ratios[factor]) for factor in OVERLOADS},
        f"overload.{name}.recovery": Figure.of([max(recoveries)], "s"),
        f"overload.{name}.p99": Figure.of(slowest, "s"),
        f"overload.{name}.lag": Figure.of(lags, "ms"),
        f"overload.{name}.growth": Figure.of([resident[-1] - resident[0]], "MB"),
    }


def _inputs_per_s(measured: Measurement, inputs: int) -> float:
    return inputs * _num_successes(measured) / measured.elapsed_s


def _num_successes(measured: Measurement) -> int:
    return sum(isinstance(outcome, Success) for outcome in measured.outcomes)


def _latencies(measured: Measurement) -> Distribution:
    return _distribution([outcome.latency_s for outcome in measured.outcomes if isinstance(outcome, Success)])


def _distribution(seconds: Sequence[float]) -> Distribution:
    distribution = Distribution.of_seconds(seconds)
    assert distribution is not None, "no call succeeded"
    return distribution


def _small_among_large(
    server: RunningServer, options: Options, rows: list[dict[str, Any]], keys: tuple[str, str] = ("", "")
) -> dict[str, Figure]:
    """Measure a client with single inputs, alone and beside clients with large calls. `keys` are
    the API keys of the first client and of the others; empty if the server needs none.
    """
    small = Load(GENERATE, bodies_of(options.sentences), clients=1, duration_s=2 * options.seconds)
    large = Load(
        GENERATE, _large_bodies(options.sentences), clients=LARGE_CLIENTS, duration_s=2 * options.seconds + HEAD_START_S
    )

    async def run_beside(client: Client) -> Measurement:
        async with Client(server.url, TIMEOUT_S, key=keys[1]) as other, asyncio.TaskGroup() as group:
            group.create_task(run_load(other, large))
            await asyncio.sleep(HEAD_START_S)
            return await run_load(client, small)

    success: list[float] = []
    slowdown: list[float] = []
    for _ in range(options.rounds):
        p99 = []
        for load, measured in (
            ("alone", _run(server, small, keys[0])),
            ("beside large", with_client(server.url, run_beside, key=keys[0])),
        ):
            times = _latencies(measured)
            p99.append(times.p99)
            succeeded = _num_successes(measured)
            rows.append(
                {
                    "load": f"one client with single inputs, {load}{' of another API key' if any(keys) else ''}",
                    "succeeded": succeeded,
                    "sent": len(measured.outcomes),
                    "p50 ms": round(times.p50, 1),
                    "p99 ms": round(times.p99, 1),
                }
            )
        success.append(100 * succeeded / len(measured.outcomes))
        slowdown.append(p99[1] / p99[0])
    name = "key" if any(keys) else "small"
    return {f"overload.{name}.success": Figure.of(success, "%"), f"overload.{name}.p99": Figure.of(slowdown)}


def _retries(server: RunningServer, options: Options, rows: list[dict[str, Any]]) -> dict[str, Figure]:
    """Measure health checks while clients repeat rejected calls, with and without `Retry-After`."""
    figures = {}
    for name, honors in (("Retry-After", True), ("at once", False)):
        load = Load(
            GENERATE,
            _large_bodies(options.sentences),
            clients=min(RETRYING_CLIENTS, 10 * options.max_clients),
            duration_s=2 * options.seconds,
            honors_retry_after=honors,
        )

        async def run_with_probes(client: Client, load: Load = load) -> tuple[Measurement, list[float]]:
            times: list[float] = []
            async with asyncio.TaskGroup() as group:
                loading = group.create_task(run_load(client, load))
                await asyncio.sleep(0.5)
                while not loading.done():
                    times.append(await _health_seconds(server.port))
                    await asyncio.sleep(PROBE_PAUSE_S)
            return loading.result(), times

        measured, times = with_client(server.url, run_with_probes)
        health = _distribution(times)
        rows.append(
            {
                "load": f"{load.clients} clients with large calls, retrying: {name}",
                "succeeded": _num_successes(measured),
                "sent": len(measured.outcomes),
                "health p50 ms": round(health.p50, 1),
                "health p99 ms": round(health.p99, 1),
            }
        )
        figures[f"overload.health.{name}"] = Figure.of([health.p99], "ms")
    return figures


async def _health_seconds(port: int) -> float:
    """Return the seconds that `GET /health/live` takes on a new connection."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        response = await reader.read()
    finally:
        writer.close()
    if b" 200 " not in response.split(b"\r\n", 1)[0]:
        raise RuntimeError(f"/health/live responded with {response[:100]!r}")
    return time.perf_counter() - started
