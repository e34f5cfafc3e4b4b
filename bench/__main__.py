"""`python -m bench [SECTION ...]`: measures the figures of docs/performance.md and writes them there.

Run it on a quiet machine: it takes the whole processor, and everything else that runs is measured with it. Each
section has a result of its own; a section that is not run keeps the one that it has.
"""

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import machine, report
from bench.bars import BARS
from bench.libraries import section as library
from bench.models import Models
from bench.options import Options
from bench.ourselves import batching, maps, memory, mixed, overhead, start
from bench.plots import draw
from bench.record import RESULTS, Recorded, Result, read_results, write_result
from bench.servers import section as servers
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
DOCUMENTS = (Path("docs/performance.md"), Path("README.md"))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; without, all")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, write tables and plots of what there is"
    )
    parser.add_argument("--bundle", type=Path, default=Path("bundles/multi30k-en-de"), help="the shipped model")
    parser.add_argument("--sentences", type=Path, default=Path("tests/data/sentences.txt"))
    parser.add_argument("--rounds", type=int, default=3, help="each figure is the median of so many")
    parser.add_argument("--rows", type=int, default=64, help="leave out cases with more rows or clients")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each load on a server")
    parser.add_argument("--requests", type=int, default=5000, help="of the section memory")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=Path, nargs="*", default=DOCUMENTS, help="where to write the tables")
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.sections) - SECTIONS.keys()
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return parsed


def measure(arguments: argparse.Namespace, command: str) -> None:
    """Run the sections and write their results, each as soon as it is there."""
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
            described = machine.describe()  # before the hours in which the tree may change
            result = SECTIONS[name](options)
            for bar in BARS:
                if figure := result.figures.get(bar.figure):
                    print(f"  {bar.text}: {figure.value:g} {figure.unit}", flush=True)
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # so that no contender outlives the bench
    main()
