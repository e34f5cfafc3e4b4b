"""`python -m bench`: measures the figures of docs/performance.md and writes them there.

Run it on a quiet machine: it takes the whole processor, and everything else that runs is measured with it.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import figures, machine
from bench.random_bundle import write_random_bundle

START, END = "<!-- figures: written by `make bench` -->", "<!-- end of figures -->"
FIXED_LENGTH = {"max_new_tokens": 20, "min_new_tokens": 20}  # random weights never end a sentence by themselves


def measure(bundles: Path, name: str, sentences: list[str], rounds: int) -> Iterator[figures.Figure]:
    yield from figures.measure_start(bundles, sentences, rounds)
    yield from figures.measure_memory(bundles, sentences)
    yield from figures.measure_batching("the shipped model", 2.0, bundles, sentences, rounds)
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        write_random_bundle(base / "base", bundles / name / "tokenizer.json", sentences)
        what = "6+6 layers, d 512, random weights"
        yield from figures.measure_batching(what, 5.0, base, sentences, rounds, **FIXED_LENGTH)
    yield from figures.measure_maps(bundles / name, sentences, rounds)


def table(measured: list[figures.Figure]) -> str:
    rows = ["| figure | measured | bar | met |", "|---|---|---|---|"]
    for figure in measured:
        sign = "<=" if figure.better == "lower" else ">="
        value, bar = f"{figure.value:.2f} {figure.unit}", f"{sign} {figure.bar:g} {figure.unit}"
        rows.append(f"| {figure.name} | {value} | {bar} | {'yes' if figure.is_met else '**no**'} |")
    return "\n".join(rows)


def caption(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return (
        f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}, {versions}, commit {facts['commit']}."
    )


def write_into(document: Path, text: str) -> None:
    """Replace what stands between the two marks of a document."""
    before, rest = document.read_text(encoding="utf-8").split(START)
    _, after = rest.split(END)
    document.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--bundles", type=Path, default=Path("bundles"), help="folder of bundles to serve")
    parser.add_argument("--bundle", default="multi30k-en-de", help="the bundle of it whose attention maps are timed")
    parser.add_argument("--sentences", type=Path, default=Path("tests/data/sentences.txt"))
    parser.add_argument("--rounds", type=int, default=5, help="each figure is the median of so many")
    parser.add_argument("--json", type=Path, default=Path("bench/results/figures.json"))
    documents = [Path("docs/performance.md"), Path("README.md")]
    parser.add_argument("--documents", type=Path, nargs="*", default=documents, help="where to write the table")
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    facts = machine.describe()
    sentences = arguments.sentences.read_text(encoding="utf-8").splitlines()
    measured = []
    for figure in measure(arguments.bundles, arguments.bundle, sentences, arguments.rounds):
        print(f"{figure.name}: {figure.value:.2f} {figure.unit}", flush=True)
        measured.append(figure)
    result = {**facts, "command": "make bench", "figures": [dataclasses.asdict(figure) for figure in measured]}
    arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for document in arguments.documents:
        write_into(document, f"\n{table(measured)}\n\n{caption(facts)}\n")
    return 0 if all(figure.is_met for figure in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
