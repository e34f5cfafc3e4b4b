"""Compare servers that get the same requests in turns; the others are suspended meanwhile."""

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.load import measure_load
from lab.bench.options import Options
from lab.bench.peers import MissingPeerError, Peer, Setting
from lab.bench.record import Figure, Result, Row, rounded
from lab.bench.server import RunningServer, serving
from sightline.loadtest.load import Load
from sightline.loadtest.load_report import Summary

OURS = "sightline"
TURN = 150  # requests after which the next turn begins
ROUNDED = 4  # digits of the values in rows


@dataclass(frozen=True)
class Case:
    """Requests of one kind, and the numbers of clients that send them, one at a time each."""

    name: str
    path: str
    bodies: Sequence[bytes]
    clients: Sequence[int]
    is_streamed: bool = False
    seconds: float = 1.0  # duration of a load, as a multiple of that of the options

    def load(self, clients: int, seconds: float, turn: int) -> Load:
        """Return a load with other requests in each turn, because servers may remember prompts."""
        start = TURN * turn % len(self.bodies)
        bodies = [*self.bodies[start:], *self.bodies[:start]]
        return Load(self.path, bodies, self.is_streamed, clients=clients, duration_s=self.seconds * seconds)


@dataclass(frozen=True)
class Contender:
    """A server with its settings."""

    name: str
    settings: str
    start: Callable[[], contextlib.AbstractContextManager[RunningServer]]
    change: Callable[[bytes], bytes] = bytes  # of the bodies that it gets


def sightline(bundles: Path, name: str = OURS, settings: str = "default settings") -> Contender:
    """Return the service over a folder of bundles, as it runs without any setting."""
    return Contender(name, settings, lambda: serving(bundles, log_level="info"))


def compare(
    section: str,
    cases: Sequence[Case],
    ours: Contender,
    peers: Mapping[Peer, Mapping[str, Path]],
    options: Options,
    others: Sequence[Contender] = (),
) -> Result:
    """Measure all cases; the figures are ratios of ours to each peer, and to the fastest of them.

    Args:
        section: Beginning of the names of the figures.
        ours: The service with weights of the same precision as those of the peers.
        peers: The files that each peer serves.
        others: The service with weights of other precisions, which count in no ratio.
    """
    builds: dict[str, str] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        try:
            builds[peer.name] = peer.build()
        except MissingPeerError as error:
            missing[peer.name] = str(error)
            print(f"  {error}", flush=True)
    rows: list[Row] = []
    for case in cases:
        ready = {peer: files for peer, files in peers.items() if peer.name not in missing}
        contenders = [ours, *others, *(_at_its_best(peer, files, case, options) for peer, files in ready.items())]
        rows += _measure(case, contenders, options, missing)
    return Result(ratios(section, rows, ours.name, [peer.name for peer in peers]), rows, builds, missing)


def _at_its_best(peer: Peer, files: Mapping[str, Path], case: Case, options: Options) -> Contender:
    """Return the peer with its fastest settings, by the geometric mean of the speeds under all
    numbers of clients. They are tried one after another: values of the first with the first values
    of the others, then of the second, and so on.
    """

    def contender(settings: Sequence[Setting]) -> Contender:
        text = ", ".join(setting.text for setting in settings)
        return Contender(peer.name, text, lambda: peer.start(files, options.threads, settings))

    settings = tuple(axis[0] for axis in peer.axes)
    numbers = options.allowed(case.clients)
    speeds: dict[str, float] = {}
    for index, axis in enumerate(() if options.is_quick else peer.axes):
        variants = [(*settings[:index], value, *settings[index + 1 :]) for value in axis]
        tried = {contender(variant).settings: variant for variant in variants}
        for name in tried.keys() - speeds.keys():
            with contextlib.suppress(RuntimeError), contender(tried[name]).start() as server:
                loads = [case.load(clients, options.seconds / 2, turn) for turn, clients in enumerate(numbers)]
                speeds[name] = statistics.geometric_mean(speed(_measured(server, load)) for load in loads)
                print(f"  tried {peer.name} ({name}): {speeds[name]:.4g}/s", flush=True)
        settings = tried[max(tried, key=lambda name: speeds.get(name, 0.0))]
    return contender(settings)


def _measure(case: Case, contenders: Sequence[Contender], options: Options, missing: dict[str, str]) -> list[Row]:
    """Measure a case; a peer that does not start is added to the missing ones."""
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        started: list[tuple[Contender, RunningServer]] = []
        for contender in contenders:
            try:
                server = stack.enter_context(contender.start())
            except RuntimeError as error:
                if contender.name.startswith(OURS):
                    raise
                missing[contender.name] = str(error)
                continue
            server.process.suspend()  # the next one may measure at its start how many threads are fastest
            started.append((contender, server))
        turns = itertools.count()
        for clients in options.allowed(case.clients):
            measured: list[list[dict[str, float]]] = [[] for _ in started]
            for number in range(options.rounds + 1):  # the first round is a warm-up
                load = case.load(clients, options.seconds if number else options.seconds / 2, next(turns))
                for (contender, server), values in zip(started, measured, strict=True):
                    own = replace(load, bodies=list(map(contender.change, load.bodies)))
                    with server.process.running():
                        values.append(_measured(server, own))
            for (contender, _), values in zip(started, measured, strict=True):
                metrics = {name: [of_round[name] for of_round in values[1:]] for name in values[0]}
                row = {"load": case.name, "clients": clients, "server": contender.name, "settings": contender.settings}
                rows.append({**row, **metrics})
                print(f"  {case.name}, {clients}: {contender.name} ({contender.settings}) {metrics}", flush=True)
    return rows


def _measured(server: RunningServer, load: Load) -> dict[str, float]:
    """Run a load and return its metrics. CPU time is that of all processes of the server."""
    before = server.process.cpu_seconds()
    summary = measure_load(server.url, load)
    cpu_ms = 1000 * (server.process.cpu_seconds() - before) / max(1, summary.succeeded)
    speeds = {"tokens/s": summary.output_tokens_per_s} if load.is_streamed else {"requests/s": summary.requests_per_s}
    metrics = {**speeds, **_latencies(summary, load.is_streamed), "CPU ms": cpu_ms}
    return {name: rounded(value, ROUNDED) for name, value in metrics.items()} | {
        "rejected": sum(summary.rejected.values())
    }


def _latencies(summary: Summary, is_streamed: bool) -> dict[str, float]:
    if summary.latency_ms is None:
        raise RuntimeError(f"none of {summary.sent} requests succeeded: {dict(summary.rejected)}")
    if is_streamed:  # some dozen replies, too few for a 99th percentile
        assert summary.time_to_first_token_ms is not None
        return {"first token ms": summary.time_to_first_token_ms.p50, "p50 ms": summary.latency_ms.p50}
    return {"p50 ms": summary.latency_ms.p50, "p99 ms": summary.latency_ms.p99}


def speed(row: Row) -> float:
    """Return the median of the tokens or requests per second of a row."""
    values: Any = row.get("tokens/s", row.get("requests/s"))
    return float(values) if isinstance(values, float) else statistics.median(values)


def ratios(section: str, rows: Iterable[Row], ours: str, peers: Sequence[str]) -> dict[str, Figure]:
    """Return each metric of ours relative to that of each peer, and to the fastest peer (`best`). A
    missing peer could have been the fastest, so without it there is no `best`.
    """
    figures = {}
    for (load, clients), group in itertools.groupby(rows, key=lambda row: (row["load"], row["clients"])):
        by_server = {row["server"]: row for row in group}
        own = by_server[ours]
        others = {name: by_server[name] for name in peers if name in by_server}
        if others and len(others) == len(peers):
            others["best"] = max(others.values(), key=speed)
        for name, other in others.items():
            for metric in (
                metric for metric, values in own.items() if isinstance(values, list) and metric != "rejected"
            ):
                figures[f"{section}.{load}.{clients}.{metric}.{name}"] = Figure.of_ratios(own[metric], other[metric])
    return figures
