"""Measure the figures of docs/performance.md and write them there.

Usage: `python -m bench [SECTION ...]`. Run it on a quiet machine: it uses all processors, and other
running programs change the figures. Each section has its own result file; sections that do not run
keep their last result.
"""

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import machine, report
from bench.engine import batching, maps, memory, mixed, overhead, start
from bench.libraries import section as library
from bench.models import Models
from bench.options import Options
from bench.plots import draw
from bench.record import RESULTS, Recorded, Result, read_results, write_result
from bench.servers import section as servers
from bench.targets import TARGETS
from service.machine import usable_threads

SECTIONS: Mapping[str, Callable[[Options], Result]] = {
    "library-base": library.run_base,
    "library-tiny": library.run_tiny,
    "server-base": servers.run_base,
    "server-tiny": servers.run_tiny,
    "http-base": overhead.run_base,
    "http-tiny": overhead.run_tiny,
    "maps": maps.run,
    "mixed": mixed.run,
    "memory": memory.run,
    "start": start.run,
    "batching-base": batching.run_base,
    "batching-tiny": batching.run_tiny,
}
EXIT_TERMINATED = 128 + signal.SIGTERM
DOCUMENTS = (Path("docs/performance.md"),)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"sections to run: {', '.join(SECTIONS)}; all by default"
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing; write the tables and plots of the existing results"
    )
    parser.add_argument("--bundle", type=Path, default=Path("bundles/multi30k-en-de"), help="bundle to measure")
    parser.add_argument("--sentences", type=Path, default=Path("tests/data/sentences.txt"))
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; each figure is their median")
    parser.add_argument("--rows", type=int, default=64, help="skip cases with more rows or clients than this")
    parser.add_argument("--seconds", type=float, default=2.5, help="duration of each load on a server, in seconds")
    parser.add_argument("--requests", type=int, default=5000, help="number of requests of the section `memory`")
    machine.add_allow_dirty(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=Path, nargs="*", default=DOCUMENTS, help="files whose tables are updated")
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.sections) - SECTIONS.keys()
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; sections are {', '.join(SECTIONS)}")
    for path in (parsed.bundle, parsed.sentences):
        if not path.exists() and not parsed.report:
            parser.error(f"{path} does not exist; name another with --bundle or --sentences")
    return parsed


def measure(arguments: argparse.Namespace, command: str) -> None:
    """Run the sections and write each result as soon as its section ends."""
    sentences = arguments.sentences.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(Path(scratch), arguments.bundle, sentences)
        options = Options(
            models=models,
            sentences=sentences,
            rounds=arguments.rounds,
            max_rows=arguments.rows,
            seconds=arguments.seconds,
            requests=arguments.requests,
            threads=usable_threads(),
        )
        for name in arguments.sections or SECTIONS:
            print(name, flush=True)
            described = machine.describe_or_exit(arguments.allow_dirty)
            result = SECTIONS[name](options)
            for target in TARGETS:
                if figure := result.figures.get(target.figure):
                    print(f"  {target.text}: {figure.value:g} {figure.unit}", flush=True)
            write_result(arguments.results, name, Recorded(described, command, result))


def write_report(results_folder: Path, documents: Sequence[Path]) -> None:
    results = read_results(results_folder)
    draw(results, results_folder)
    for document in documents:
        for part, text in report.parts(results).items():
            report.write_into(document, part, text)


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    parsed = parse_arguments(arguments)
    if not parsed.report:
        measure(parsed, shlex.join(["python", "-m", "bench", *words]))
    write_report(parsed.results, parsed.documents)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # so that the exit also ends the contenders
    main()
