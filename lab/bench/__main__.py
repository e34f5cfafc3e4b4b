"""Measure the figures of docs/performance.md and docs/explanation/reliability.md, and write them
there.

Usage: `python -m lab.bench [SECTION ...]`. Run it on a quiet machine: it uses all processors, and
other running programs change the figures. Each section has its own result file; sections that do
not run keep their last result. The peers are installed under build/ when they are first needed.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench import machine, ray_serve, report, servers, soak
from lab.bench.commit import head
from lab.bench.engine import maps, memory, mixed, start
from lab.bench.libraries import section as library
from lab.bench.models import CACHE, Models
from lab.bench.options import Options
from lab.bench.plots import draw
from lab.bench.record import RESULTS, Recorded, Result, read_results, write_result
from lab.bench.reliability import overload, responses, traces
from lab.bench.targets import COMPARISONS, HEADLINE, RELIABILITY, TARGETS
from sightline.base.machine import usable_threads

SECTIONS: Mapping[str, Callable[[Options], Result]] = {
    "shipped": partial(servers.run_translator, name="shipped", dtype="shipped"),
    "grown": partial(servers.run_translator, name="grown"),
    "marian": servers.run_marian,
    "minilm": servers.run_minilm,
    "minilm-int8": partial(servers.run_minilm, bits=8),
    "smollm2": servers.run_smollm2,
    "smollm2-int8": partial(servers.run_smollm2, bits=8),
    "prompts": servers.run_prompts,
    "firefox": servers.run_firefox,
    "marks": servers.run_marks,
    "library": library.run,
    "maps": maps.run,
    "mixed": mixed.run,
    "memory": memory.run,
    "start": start.run,
    "overload": overload.run,
    "traces": traces.run,
    "responses": responses.run,
    "soak": soak.run,
    "ray": ray_serve.run,
}
ON_REQUEST = ("responses", "soak", "ray")  # they need root, half an hour, and the extra `ray`
README = tuple(comparison.section for comparison in HEADLINE)
QUICK_OPTIONS = {"rounds": 1, "seconds": 1.0}
QUICK_RESULTS = Path("build/bench/quick")
EXIT_TERMINATED = 128 + signal.SIGTERM


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"sections to run: {', '.join(SECTIONS)}; all but {', '.join(ON_REQUEST)} by default",
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing; write the tables and plots of the existing results"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure for a short time, with the first settings of each peer, and only print the ratios",
    )
    parser.add_argument("--readme", action="store_true", help=f"run the sections of the README: {', '.join(README)}")
    parser.add_argument(
        "--resume", action="store_true", help="skip sections that were measured at this commit with these options"
    )
    parser.add_argument("--bundle", type=Path, default=Path("bundles/multi30k-en-de"), help="bundle to measure")
    parser.add_argument("--bundles", type=Path, default=Path("bundles"), help="folder to serve where several are")
    parser.add_argument("--sentences", type=Path, default=Path("loadtest/sentences.txt"))
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; each figure is their median")
    parser.add_argument("--clients", type=int, default=64, help="skip cases with more clients or rows than this")
    parser.add_argument("--seconds", type=float, default=2.5, help="duration of each load on a server, in seconds")
    parser.add_argument("--requests", type=int, default=5000, help="number of requests of the section `memory`")
    parser.add_argument("--minutes", type=float, default=30, help="duration of the section `soak`")
    machine.add_allow_dirty(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--models", type=Path, default=CACHE, help="folder to keep the created models in")
    parser.add_argument(
        "--documents", type=Path, nargs="*", default=report.DOCUMENTS, help="files whose tables are updated"
    )
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.sections) - SECTIONS.keys()
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; sections are {', '.join(SECTIONS)}")
    for path in (parsed.bundle, parsed.bundles, parsed.sentences):
        if not path.exists() and not parsed.report:
            parser.error(f"{path} does not exist; name another with --bundle, --bundles or --sentences")
    if parsed.quick:
        parser.set_defaults(**QUICK_OPTIONS, results=QUICK_RESULTS, documents=())
        parsed = parser.parse_args(arguments)
    every = README if parsed.readme else [key for key in SECTIONS if key not in ON_REQUEST]
    parsed.sections = parsed.sections or every
    return parsed


def measure(parsed: argparse.Namespace, command: str) -> list[str]:
    """Run the sections and write each result as soon as its section ends; return the failures."""
    sentences = parsed.sentences.read_text(encoding="utf-8").splitlines()
    options = Options(
        models=Models(parsed.models, parsed.bundle, sentences),
        bundles=parsed.bundles,
        sentences=sentences,
        rounds=parsed.rounds,
        max_clients=parsed.clients,
        seconds=parsed.seconds,
        requests=parsed.requests,
        minutes=parsed.minutes,
        threads=usable_threads(),
        default_model=parsed.bundle.name,
        is_quick=parsed.quick,
    )
    facts = {"options": {name: getattr(options, name) for name in ("rounds", "seconds", "max_clients")}}
    done = read_results(parsed.results) if parsed.resume else {}
    failures: list[str] = []
    for number, name in enumerate(parsed.sections, 1):
        if name in done and _is_same(done[name].machine, facts):
            print(f"{name}: measured before", flush=True)
            continue
        print(f"{name} ({number} of {len(parsed.sections)})", flush=True)
        described = machine.describe_or_exit(parsed.allow_dirty) | facts
        result = SECTIONS[name](options)
        for target in (*TARGETS, *RELIABILITY):
            if figure := result.figures.get(target.figure):
                print(f"  {target.text}: {figure.value:g} {figure.unit}", flush=True)
        write_result(parsed.results, name, Recorded(described, command, result))
        failures += result.failures
    return failures


def _is_same(machine: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return machine["commit"] == head() and not machine.get("changed") and machine.get("options") == facts["options"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections and write the report; return 1 if a section failed, else 0."""
    words = sys.argv[1:] if arguments is None else arguments
    parsed = parse_arguments(words)
    failures = [] if parsed.report else measure(parsed, shlex.join(["python", "-m", "lab.bench", *words]))
    results = read_results(parsed.results)
    if parsed.quick:
        measured = report.all_figures(results)
        if compared := [each for each in COMPARISONS if each.section in results]:
            print(report.comparisons_table(results, compared))
        if targets := [target for target in TARGETS if target.figure in measured]:
            print(report.targets_table(results, targets))
    else:
        draw(results, parsed.results)
    report.write_documents(results, parsed.documents)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # so that the exit also ends the contenders
    sys.exit(main())
