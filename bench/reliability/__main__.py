"""Measure the figures of docs/explanation/reliability.md and write them there.

Usage: `python -m bench.reliability [SECTION ...]`. Run it on a quiet machine. The section
`responses` needs root to create a control group.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import machine
from bench.record import RESULTS, Recorded, Result, read_results, write_result
from bench.reliability import overload, responses
from bench.reliability.options import Options
from bench.reliability.report import WRITER, parts
from bench.report import write_into

SECTIONS: Mapping[str, Callable[[Options], Result]] = {"overload": overload.run, "responses": responses.run}
FOLDER = RESULTS / "reliability"
DOCUMENT = Path("docs/explanation/reliability.md")


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench.reliability", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"sections to run: {', '.join(SECTIONS)}; all by default"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing; write the tables of existing results")
    parser.add_argument("--sentences", type=Path, default=Path("tests/data/sentences.txt"))
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds; each figure is their median (default: 3)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each load, in seconds (default: 10)")
    parser.add_argument("--bundles", type=Path, default=Path("bundles"), help="folder to serve (default: bundles)")
    parser.add_argument("--clients", type=int, default=600, help="maximum number of clients (default: 600)")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads for each graph; 0 lets the service choose (default: 0)"
    )
    machine.add_allow_dirty(parser)
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parsed = parser.parse_args(words)
    unknown = set(parsed.sections) - SECTIONS.keys()
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; sections are {', '.join(SECTIONS)}")
    if not parsed.report:
        sentences = parsed.sentences.read_text(encoding="utf-8").splitlines()
        options = Options(parsed.bundles, sentences, parsed.rounds, parsed.seconds, parsed.clients, parsed.threads)
        for name in parsed.sections or SECTIONS:
            print(name, flush=True)
            described = machine.describe_or_exit(parsed.allow_dirty)
            result = SECTIONS[name](options)
            for row in result.rows:
                print(f"  {dict(row)}", flush=True)
            command = shlex.join(["python", "-m", "bench.reliability", *words])
            write_result(parsed.results, name, Recorded(described, command, result))
    for part, text in parts(read_results(parsed.results)).items():
        write_into(parsed.document, part, text, WRITER)


if __name__ == "__main__":
    main()
