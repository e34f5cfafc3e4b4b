"""Measure a step of the attention study, or write its documents.

`python -m lab.study STEP` writes lab/study/results/STEP.json; `python -m lab.study report` writes
documents and model cards.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.bench import machine, report
from lab.bench.record import Recorded, read_results, write_result
from lab.study import (
    alignment,
    beams,
    claims,
    collect,
    context,
    coverage,
    documents,
    ghost_attention,
    heads,
    layers,
    linformer,
    masking,
    pairs,
    pronouns,
    quality,
    recall,
    sentence,
    speed,
    tags,
    terms,
    vanishing,
)
from lab.study.cards import write_cards
from lab.study.step import Drawing, Step

STEPS: Sequence[Step] = (
    collect,
    claims,
    vanishing,
    quality,
    beams,
    layers,
    sentence,
    heads,
    masking,
    pronouns,
    context,
    alignment,
    speed,
    linformer,
    recall,
    ghost_attention,
    terms,
    documents,
    tags,
    pairs,
    coverage,
)
RESULTS = Path("lab/study/results")
LAB_DOCS = Path("lab/docs")
DOCUMENTS = (
    Path("docs/research/attention.md"),
    *(LAB_DOCS / name for name in ("attention-study.md", "attention-tables.md")),
    Path("docs/research/translation.md"),
    Path("docs/research/omitted-words.md"),
)
PICTURES = LAB_DOCS / "attention"
WRITER = "python -m lab.study report"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m lab.study", description=__doc__, formatter_class=formatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    commands = parser.add_subparsers(required=True, metavar="STEP")
    for step in STEPS:
        text = step.__doc__ or ""
        command = commands.add_parser(
            step.NAME, help=text.partition("\n")[0], description=text, formatter_class=formatter
        )
        command.set_defaults(step=step)
        machine.add_allow_dirty(command)
        step.add_arguments(command)
    text = "measure nothing; write the tables, pictures and model cards of the existing results"
    command = commands.add_parser("report", help=text)
    command.add_argument(
        "--documents", type=Path, nargs="+", default=DOCUMENTS, help="documents whose tables are updated"
    )
    command.add_argument("--pictures", type=Path, default=PICTURES, help="folder for the pictures")
    command.add_argument("--bundles", type=Path, default=Path("bundles"), help="folder of bundles to write cards into")
    command.set_defaults(step=None)
    return parser.parse_args(arguments)


def write_report(results_folder: Path, documents: Sequence[Path], pictures: Path) -> None:
    """Write the tables and pictures of all steps with a result; keep those of other steps."""
    results = read_results(results_folder)
    pictures.mkdir(parents=True, exist_ok=True)
    parts = {"machines": report.machines(results)}
    for step in STEPS:
        if recorded := results.get(step.NAME):
            parts.update(step.tables(recorded.result))
            if isinstance(step, Drawing):
                step.draw(recorded.result, pictures)
    for document in documents:
        for part, text in parts.items():
            report.write_into(document, part, text, WRITER)


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    parsed = parse_arguments(arguments)
    if parsed.step is None:
        write_report(parsed.results, parsed.documents, parsed.pictures)
        write_cards(read_results(parsed.results), parsed.bundles)
        return 0
    described = machine.describe_or_exit(parsed.allow_dirty)
    try:
        result = parsed.step.measure(parsed)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "lab.study", *words])
    write_result(parsed.results, parsed.step.NAME, Recorded(described, command, result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
