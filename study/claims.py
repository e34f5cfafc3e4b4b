"""Collect the runs of the small setting: BLEU of each test sentence, sizes of scores and gradients.

Tables compare the systems of each group, by the resampled mean of their seeds, and the systems on
joined captions by the length of the source.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.record import Result, Row
from bench.report import table
from model.commands import corpus_folder
from model.evaluation.bleu import read_test_set
from model.evaluation.defaults import TEST_SPLIT
from model.systems import JOINED, SMALL, SMALL_GROUPS, SYSTEMS
from model.training.folder import RunFolder
from study.bleu import Counts, Estimate, Statistics, estimate, resamples
from study.collect import read_scores, system_and_seed
from study.runs import SOURCE, TARGET
from study.step import no_pictures

NAME = "claims"
# First and last number of source words of the joined captions.
BUCKETS = ((20, 34), (35, 47), (48, 60))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, help="folder of run folders, SYSTEM-SEED; those without scores are skipped")
    parser.add_argument("data", type=Path, help="folder with the subfolder multi30k")


def measure(arguments: argparse.Namespace) -> Result:
    """Read the scores and the diagnostics of all finished runs of the small setting.

    Raises:
        FileNotFoundError: there is no test set.
        ValueError: the outputs of a run do not give the stated BLEU on its test set.
    """
    rows: list[Row] = []
    for corpus in (SMALL, JOINED):
        test_set = read_test_set(corpus_folder(corpus, arguments.data, arguments.runs), TEST_SPLIT, SOURCE, TARGET)
        references = test_set.tokenised_references
        if references is None:
            raise FileNotFoundError(f"{arguments.data / corpus.folder} has no tokenized {TEST_SPLIT}")
        rows.append(
            {
                "kind": "test set",
                "corpus": corpus.data_name,
                "source_words": [len(source.split()) for source in test_set.sources],
                "reference_lengths": [len(reference.split()) for reference in references],
            }
        )
        for path in sorted(arguments.runs.glob("*/scores.json")):
            system, seed = system_and_seed(path.parent)
            if SYSTEMS[system].corpus == corpus:
                scores = read_scores(path, references)
                facts = {"kind": "system", "corpus": corpus.data_name, "system": system, "seed": seed}
                rows.append({**facts, **scores, "diagnostics": _diagnostics(path.parent)})
    return Result(rows=tuple(rows))


def _diagnostics(run: Path) -> list[dict[str, Any]]:
    """Return the diagnostics before the training, after its first epoch and after its last."""
    lines = RunFolder(run).diagnostics.read_text(encoding="utf-8").splitlines()
    by_epoch = {row["epoch"]: row for row in map(json.loads, lines)}
    return [by_epoch[epoch] for epoch in sorted({0, 1, max(by_epoch)} & by_epoch.keys())]


def tables(result: Result) -> Mapping[str, str]:
    found = {f"claims-{group}": _by_system(result, tuple(systems)) for group, systems in SMALL_GROUPS.items()}
    return {**found, "claims-long": _by_length(result)}


draw = no_pictures


def statistics_by_system(result: Result, systems: Sequence[str]) -> dict[str, list[Counts]]:
    """Return the statistics (N, 10) of each run, by system."""
    references = {row["corpus"]: np.array(row["reference_lengths"]) for row in result.rows if row["kind"] == "test set"}
    found: dict[str, list[Counts]] = {}
    for row in result.rows:
        if row["kind"] == "system" and row["system"] in systems:
            lengths = np.array(row["output_lengths"]), references[row["corpus"]]
            found.setdefault(row["system"], []).append(Statistics(np.array(row["matches"]).T, *lengths).rows)
    return {name: found[name] for name in systems if name in found}


def _by_system(result: Result, systems: Sequence[str]) -> str:
    """Return the BLEU of systems, and their difference from the first of them."""
    runs = statistics_by_system(result, systems)
    body, first = [], None
    for name, rows in runs.items():
        found = estimate(rows, resamples(len(rows[0])))
        first = first or found
        difference = "" if found is first else str(found - first)
        body.append([SYSTEMS[name].description, str(len(rows)), str(found), difference, *_sizes(result, name)])
    head = ["system", "seeds", "BLEU", "difference", "spread of scores", "gradient of the first and last layer"]
    return table(head, body)


def _sizes(result: Result, system: str) -> list[str]:
    """Return the mean spread of scores at the end, and the ratio of gradients at the start.

    The first is the mean of all attentions and seeds. The second divides the norm of the gradient
    of the first encoder layer by that of the last, before the training.
    """
    rows = [row["diagnostics"] for row in result.rows if row["kind"] == "system" and row["system"] == system]
    spreads = [one["spread"] for row in rows for one in row[-1]["scores"].values()]
    ratios = []
    for row in rows:
        layers = sorted(name for name in row[0]["gradients"] if name.startswith("encoder."))
        if layers:
            ratios.append(row[0]["gradients"][layers[0]] / max(row[0]["gradients"][layers[-1]], 1e-30))
    return [f"{np.mean(spreads):.2f}" if spreads else "", f"{np.mean(ratios):.2g}" if ratios else ""]


def _by_length(result: Result) -> str:
    """Return the BLEU of the systems on joined captions by the words of the source."""
    words = np.array(
        next(
            row["source_words"]
            for row in result.rows
            if row["kind"] == "test set" and row["corpus"] == JOINED.data_name
        )
    )
    runs = statistics_by_system(result, tuple(SMALL_GROUPS["long"]))
    places = [(first <= words) & (words <= last) for first, last in BUCKETS]
    body = []
    for name, rows in runs.items():
        found = [_estimate(rows, inside, number) for number, inside in enumerate(places)]
        body.append([SYSTEMS[name].description, *map(str, found), str(found[-1] - found[0])])
    columns = [
        f"{first} to {last} words ({int(inside.sum())})" for (first, last), inside in zip(BUCKETS, places, strict=True)
    ]
    return table(["system", *columns, "longest minus shortest"], body)


def _estimate(rows: Sequence[Counts], inside: NDArray[np.bool_], stream: int) -> Estimate:
    return estimate([run[inside] for run in rows], resamples(int(inside.sum()), stream=stream))
