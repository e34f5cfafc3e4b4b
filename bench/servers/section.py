"""Compare servers, each with its best settings, under closed and open loops."""

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.libraries.contender import Setup, Task, running_contenders
from bench.libraries.section import BEAMS, setups_of
from bench.load import GENERATE, bodies_of, measure_load
from bench.models import Subject
from bench.options import Options
from bench.record import Figure, Result
from bench.server import RunningServer
from bench.servers.setups import ServerSetup, fastapi_setups, litserve_setups, sightline_setups
from loadtest.load import Load
from loadtest.report import Summary

CLIENTS = (1, 16, 64)
OPEN_PERCENT = (50, 80, 120)  # of the slowest server's throughput with the most clients
PROBE_ROWS = 32

Measured = Mapping[str, Sequence[Summary]]  # by server, with a summary for each round


@dataclass(frozen=True)
class _Loop:
    """A load and its name."""

    name: str
    load: Load


def run_tiny(options: Options) -> Result:
    subject = options.models.tiny
    return _run(options, subject, [options.models.shipped_dtype])


def run_base(options: Options) -> Result:
    subject = options.models.grown_base
    return _run(options, subject, ["int8"])


def _run(options: Options, subject: Subject, dtypes: Sequence[str]) -> Result:
    figures: dict[str, Figure] = {}
    rows: list[dict[str, Any]] = []
    for decoding, num_beams in BEAMS.items():
        search = {"num_beams": num_beams, "early_stopping": True} if num_beams > 1 else {}
        bodies = bodies_of(options.sentences, **search)
        ours, theirs = _fastest_libraries(options, subject, dtypes, num_beams)
        candidates = [
            sightline_setups(subject, ours.dtype, options.threads),
            litserve_setups(subject, theirs, num_beams, options.threads),
            fastapi_setups(subject, theirs, num_beams, options.threads),
        ]
        chosen = [_fastest_server(options, setups, bodies) for setups in candidates]
        for loop, measured in _measure(options, chosen, bodies):
            name = f"server.{subject.name}.{decoding}.{loop.name}"
            figures |= {f"{name}.{key}": figure for key, figure in _ratios(measured).items()}
            rows += [{"decoding": decoding, "load": loop.name, **row} for row in _rows(measured, chosen)]
            print(f"  {name}", flush=True)
    return Result(figures, rows)


def _fastest_libraries(
    options: Options, subject: Subject, dtypes: Sequence[str], num_beams: int
) -> tuple[Setup, Setup]:
    """Find Sightline's data type, and CTranslate2's with its instruction set, that decode many rows
    fastest.
    """
    rows = min(PROBE_ROWS, options.max_rows)
    task = Task(subject.sources(options.sentences[:rows]), num_beams)
    setups = [
        setup
        for setup in setups_of(subject, rows * num_beams)
        if setup.kind == "ctranslate2" or (setup.kind == "sightline" and setup.dtype in dtypes)
    ]
    with running_contenders(setups, options.threads) as contenders:
        speeds = {one.setup.name: one.measure(task).tokens_per_s for one in contenders}
    fastest = [
        max((one for one in setups if one.kind == library and one.name in speeds), key=lambda one: speeds[one.name])
        for library in ("sightline", "ctranslate2")
    ]
    return fastest[0], fastest[1]


def _fastest_server(options: Options, setups: Sequence[ServerSetup], bodies: Sequence[bytes]) -> ServerSetup:
    speeds = []
    for setup in setups:
        with setup.start() as server:
            load = Load(GENERATE, bodies, clients=_max_clients(options), duration_s=options.seconds / 2)
            measure_load(server.url, load)
            speeds.append(measure_load(server.url, load).requests_per_s)
    return setups[speeds.index(max(speeds))]


def _max_clients(options: Options) -> int:
    return max(clients for clients in CLIENTS if clients <= options.max_rows)


def _measure(
    options: Options, setups: Sequence[ServerSetup], bodies: Sequence[bytes]
) -> list[tuple[_Loop, dict[str, list[Summary]]]]:
    """Measure every load on every server, in turns; the other servers are suspended."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, RunningServer] = {}
        for setup in setups:
            server = servers[setup.server] = stack.enter_context(setup.start())
            load = Load(GENERATE, bodies, clients=_max_clients(options), duration_s=options.seconds / 2)
            measure_load(server.url, load)  # warm-up
            server.process.suspend()

        def in_turns(loop: _Loop) -> tuple[_Loop, dict[str, list[Summary]]]:
            measured: dict[str, list[Summary]] = {name: [] for name in servers}
            for _ in range(options.rounds):
                for name, server in servers.items():
                    with server.process.running():
                        measured[name].append(measure_load(server.url, loop.load))
            return loop, measured

        def closed(clients: int) -> _Loop:
            name = f"{clients} client" if clients == 1 else f"{clients} clients"
            return _Loop(name, Load(GENERATE, bodies, clients=clients, duration_s=options.seconds))

        def open_(percent: int, capacity: float) -> _Loop:
            rate = capacity * percent / 100
            return _Loop(f"open {percent} %", Load(GENERATE, bodies, rate=rate, duration_s=options.seconds))

        done = [in_turns(closed(clients)) for clients in CLIENTS if clients <= options.max_rows]
        _, most = done[-1]
        capacity = min(statistics.median(one.requests_per_s for one in summaries) for summaries in most.values())
        return done + [in_turns(open_(percent, capacity)) for percent in OPEN_PERCENT]


def _ratios(measured: Measured) -> dict[str, Figure]:
    """Return Sightline's figures relative to each peer's, and to those of the peer with the higher
    throughput.
    """
    speed = {name: statistics.median(one.requests_per_s for one in summaries) for name, summaries in measured.items()}
    peers = {"litserve": "litserve", "fastapi": "fastapi"}
    peers["better"] = max(peers, key=lambda name: speed[name])
    figures = {}
    for label, name in peers.items():
        pairs = list(zip(measured["sightline"], measured[name], strict=True))
        figures[f"throughput.{label}"] = Figure.of([our.requests_per_s / their.requests_per_s for our, their in pairs])
        for percentile in ("p50", "p99"):
            ratios = [_latency_ms(our, percentile) / _latency_ms(their, percentile) for our, their in pairs]
            figures[f"{percentile}.{label}"] = Figure.of(ratios)
    return figures


def _latency_ms(summary: Summary, percentile: str) -> float:
    if summary.latency_ms is None:
        raise RuntimeError(f"none of {summary.sent} requests succeeded")
    latency_ms: float = getattr(summary.latency_ms, percentile)
    return latency_ms


def _rows(measured: Measured, setups: Sequence[ServerSetup]) -> list[dict[str, Any]]:
    return [
        {
            "server": setup.server,
            "settings": setup.settings,
            "requests_per_s": [round(one.requests_per_s, 1) for one in measured[setup.server]],
            "p50_ms": [round(_latency_ms(one, "p50"), 2) for one in measured[setup.server]],
            "p99_ms": [round(_latency_ms(one, "p99"), 2) for one in measured[setup.server]],
            "sent": sum(one.sent for one in measured[setup.server]),
            "refused": sum(sum(one.rejected.values()) for one in measured[setup.server]),
        }
        for setup in setups
    ]
