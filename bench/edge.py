"""Compare the cost of a call with that of another checkout of this project.

Usage: `python -m bench.edge --baseline CHECKOUT`. The checkouts serve in turns. First a fake runner
replaces the model and 64 clients request one new token each, so that only HTTP and scheduling are
measured. Then the shipped model serves 16 and 64 clients with each checkout's default settings. An
ordinary FastAPI application over the same use case is measured in the same rounds. CPU time is the
user and system time of the serving process. Run it on a quiet machine; the tables go to
docs/performance.md.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.commit import uncommitted_changes
from bench.load import GENERATE, bodies_of, measure_load
from bench.record import RESULTS, Figure, Recorded, Result, Row, write_result
from bench.report import table, write_into
from bench.server import RunningServer, serving
from loadtest.load import Load

SECTION = "edge"
WRITER = "python -m bench.edge"
DOCUMENT = Path("docs/performance.md")
CLIENTS = 64
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# The rows of the table: case, measure, comparison, and the target for the ratio of "now" to
# "baseline".
TARGETS = (
    ("fake, 64 clients, 1 new token", "requests_per_s", ">=", 2.0),
    ("fake, 64 clients, 1 new token", "cpu_ms", "<=", 0.5),
    ("shipped model, 16 clients", "cpu_ms", "<=", 0.65),
    ("shipped model, 64 clients", "cpu_ms", "<=", 0.65),
    ("shipped model, 64 clients", "requests_per_s", ">=", 2.0),
)


@dataclass(frozen=True)
class Case:
    """A load, and the module that serves each setup under it."""

    name: str
    clients: int
    max_new_tokens: int | None
    modules: dict[str, str]


FAKE = {"baseline": "bench.fake_server", "now": "bench.fake_server", "ordinary FastAPI": "bench.fastapi_edge"}
REAL = {"baseline": "service", "now": "service"}
CASES = (
    Case("fake, 64 clients, 1 new token", 64, 1, FAKE),
    Case("shipped model, 16 clients", 16, None, REAL),
    Case("shipped model, 64 clients", 64, None, REAL),
)


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m bench.edge", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--baseline", type=Path, required=True, help="folder of the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; each figure is their median")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load, in seconds")
    parser.add_argument("--sentences", type=Path, default=Path("tests/data/sentences.txt"))
    machine.add_allow_dirty(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="file whose table is updated")
    parsed = parser.parse_args(words)
    described = machine.describe_or_exit(parsed.allow_dirty)
    if (changed := uncommitted_changes(parsed.baseline)) and not parsed.allow_dirty:
        parser.error(f"the baseline has uncommitted changes in {', '.join(changed)}; allow them with --allow-dirty")
    result = run(
        parsed.baseline, parsed.sentences.read_text(encoding="utf-8").splitlines(), parsed.rounds, parsed.seconds
    )
    head = subprocess.run(
        ["git", "-C", str(parsed.baseline), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    )
    shown = [f"checkout-of-{head.stdout.strip()}" if word == str(parsed.baseline) else word for word in words]
    command = shlex.join(["python", "-m", "bench.edge", *shown])
    write_result(parsed.results, SECTION, Recorded(described, command, result))
    write_into(parsed.document, SECTION, report(result), WRITER)
    print(report(result))


def run(baseline: Path, sentences: Sequence[str], rounds: int, seconds: float) -> Result:
    """Measure all cases. Each figure is the median over rounds of the ratio of two setups in one
    round.
    """
    figures: dict[str, Figure] = {}
    rows: list[Row] = []
    for case in CASES:
        values = _measure(case, baseline, sentences, rounds, seconds)
        for setup, measured in values.items():
            row = {name: Figure.of([one[name] for one in measured], "").value for name in measured[0]}
            rows.append({"case": case.name, "setup": setup, **row})
            for name in () if setup == "baseline" else measured[0]:
                pairs = zip(measured, values["baseline"], strict=True)
                figures[f"{SECTION}.{case.name}.{setup}.{name}"] = Figure.of(
                    [one[name] / base[name] for one, base in pairs]
                )
    return Result(figures, rows)


def _measure(
    case: Case, baseline: Path, sentences: Sequence[str], rounds: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    parameters = {} if case.max_new_tokens is None else {"max_new_tokens": case.max_new_tokens}
    load = Load(GENERATE, bodies_of(sentences, **parameters), clients=case.clients, duration_s=seconds)
    with contextlib.ExitStack() as running:
        servers: dict[str, RunningServer] = {}
        for setup, module in case.modules.items():
            folder = baseline.resolve() if setup == "baseline" else Path.cwd()
            bundles = folder / "bundles"
            servers[setup] = running.enter_context(serving(bundles, module, folder=folder, log_level="info"))
            _measure_once(servers[setup], Load(load.path, load.bodies, clients=case.clients, duration_s=2.0))
            servers[setup].process.suspend()
        values: dict[str, list[dict[str, float]]] = {setup: [] for setup in servers}
        for number in range(rounds):
            order = list(servers) if number % 2 == 0 else list(servers)[::-1]
            for setup in order:
                with servers[setup].process.running():
                    values[setup].append(_measure_once(servers[setup], load))
                print(case.name, setup, values[setup][-1], flush=True)
    return values


def _measure_once(server: RunningServer, load: Load) -> dict[str, float]:
    before = cpu_seconds(server.process.pid)
    summary = measure_load(server.url, load)
    cpu_ms = 1000 * (cpu_seconds(server.process.pid) - before) / summary.succeeded
    assert summary.latency_ms is not None
    return {"requests_per_s": summary.requests_per_s, "cpu_ms": cpu_ms, "p50_ms": summary.latency_ms.p50}


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def report(result: Result) -> str:
    """Return the table of ratios with their targets, and the table of values."""
    ratios = []
    for case, name, sign, target in TARGETS:
        ratio = result.figures[f"{SECTION}.{case}.now.{name}"].value
        is_met = ratio >= target if sign == ">=" else ratio <= target
        ratios.append((case, NAMES[name], f"{ratio:.2f}", f"{sign} {target:g}", "yes" if is_met else "**no**"))
    rows = [(str(row["case"]), str(row["setup"]), *(f"{row[name]:.4g}" for name in NAMES)) for row in result.rows]
    head = ("load", "figure", "now / baseline", "target", "met")
    return f"{table(head, ratios)}\n\n{table(('load', 'setup', *NAMES.values()), rows)}"


NAMES = {"requests_per_s": "requests/s", "cpu_ms": "CPU ms a call", "p50_ms": "p50 ms"}


if __name__ == "__main__":
    main()
