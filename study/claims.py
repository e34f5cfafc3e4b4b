"""Collect the runs of the small setting: BLEU of each test sentence, sizes of scores and gradients.

Tables compare the systems of each group with their baselines, by the resampled mean of their seeds,
and the systems on joined captions by the length of the source.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Line:
    """Line of a table: a system and the system that it is compared with."""

    system: str
    baseline: str | None = None
    name: str = ""  # by default, the system without its prefix

    def __str__(self) -> str:
        return self.name or f"`{self.system.partition('-')[2]}`"


_SCALED = "small-positions-sinusoidal"  # the Transformer that changes of the small setting start from
# Every system of `SMALL_GROUPS` by group, after its baseline.
TABLES: Mapping[str, Sequence[Line]] = {
    "context": (
        Line("small-fixed-context"),
        Line("small-initial-state", "small-fixed-context"),
        Line("small-bahdanau", "small-fixed-context"),
    ),
    "order": (
        Line("small-positions-none"),
        *(
            Line(f"small-positions-{kind}", "small-positions-none")
            for kind in ("sinusoidal", "learned", "relative", "alibi", "rotary")
        ),
    ),
    "scale": (
        Line(_SCALED, name="Transformer"),
        Line("small-unscaled", _SCALED, "Transformer, unscaled"),
        Line("small-dot"),
        Line("small-dot-scaled", "small-dot"),
        Line("small-general"),
        Line("small-general-scaled", "small-general"),
    ),
    "depth": tuple(
        line
        for depth, system in ((1, "small-depth-1"), (2, _SCALED), (4, "small-depth-4"), (6, "small-depth-6"))
        for line in (
            Line(system, name=f"`depth-{depth}`"),
            Line(f"small-depth-{depth}-no-residual", system),
        )
    ),
    "long": (
        Line("joined-fixed-context"),
        *(
            Line(f"joined-{kind}", "joined-fixed-context")
            for kind in ("initial-state", "bahdanau", "luong-local-p", "post-norm", "linformer")
        ),
    ),
    "controls": (
        Line("small-general"),
        *(
            Line(f"small-{kind}", "small-general")
            for kind in ("luong-concat", "luong-location", "luong-local-m", "luong-local-p", "without-feeding")
        ),
        Line("small-hard-reinforce", "small-without-feeding"),
        Line("small-without-feeding-smoothing", "small-without-feeding"),
        Line("small-hard-marginal", "small-without-feeding-smoothing"),
        Line("small-bahdanau"),
        Line("small-multiplicative", "small-bahdanau"),
        Line("small-reduced-rank", "small-bahdanau"),
        Line(_SCALED),
        *(
            Line(f"small-{kind}", _SCALED)
            for kind in ("pre-norm", "single-head", "single-head-without-weights", "linformer")
        ),
    ),
}


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
    """Return a table for each group of which systems have been trained."""
    trained = {row["system"] for row in result.rows if row["kind"] == "system"}
    return {
        f"claims-{group}": _by_length(result) if group == "long" else _by_system(result, group)
        for group in TABLES
        if trained & set(SMALL_GROUPS[group])
    }


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


def _by_system(result: Result, group: str) -> str:
    """Return the BLEU of the systems of a group, and their differences from their baselines."""
    lines = {line.system: line for line in TABLES[group]}
    runs = statistics_by_system(result, tuple(lines))
    found = {name: estimate(rows, resamples(len(rows[0]))) for name, rows in runs.items()}
    baselines = list(dict.fromkeys(line.baseline for line in lines.values() if line.baseline))
    # One baseline is named in the head of the column, several in a column.
    (only,) = baselines if len(baselines) == 1 else (None,)
    head = ["system", "seeds", "BLEU", *([] if only else ["compared with"])]
    head += [f"minus {lines[only]}" if only else "difference", *(text for text, _ in SIZES.get(group, ()))]
    body = []
    for name, bleu in found.items():
        baseline = lines[name].baseline if lines[name].baseline in found else None
        cells = [str(lines[name]), str(len(runs[name])), str(bleu)]
        if not only:
            cells.append(str(lines[baseline]) if baseline else "")
        cells.append(str(bleu - found[baseline]) if baseline else "")
        diagnostics = [row["diagnostics"] for row in result.rows if row.get("system") == name]
        body.append([*cells, *(size(diagnostics) for _, size in SIZES.get(group, ()))])
    return table(head, body)


Diagnostics = Sequence[Sequence[Mapping[str, Any]]]  # of each seed, by epoch


def _spread(diagnostics: Diagnostics, epoch: int) -> str:
    """Return the standard deviation of scores over keys, mean of all attentions and seeds."""
    spreads = [one["spread"] for run in diagnostics for one in run[epoch]["scores"].values()]
    return f"{np.mean(spreads):.2f}" if spreads else ""


def _gradient_ratio(diagnostics: Diagnostics) -> str:
    """Return the gradient norm of the first encoder layer divided by that of the last before the
    training, mean of all seeds.
    """
    ratios = []
    for run in diagnostics:
        gradients = {name: norm for name, norm in run[0]["gradients"].items() if name.startswith("encoder.")}
        if gradients:
            ratios.append(gradients[min(gradients)] / max(gradients[max(gradients)], 1e-30))
    return f"{np.mean(ratios):.2g}" if ratios else ""


# Columns of the tables whose question is about the size of scores or of gradients.
SIZES: Mapping[str, Sequence[tuple[str, Callable[[Diagnostics], str]]]] = {
    "scale": (
        ("spread of scores before", lambda diagnostics: _spread(diagnostics, 0)),
        ("after training", lambda diagnostics: _spread(diagnostics, -1)),
    ),
    "depth": (("gradient of first / last layer", _gradient_ratio),),
}


def _by_length(result: Result) -> str:
    """Return the BLEU of the systems on joined captions by the words of the source, and how the gap
    between each system and the first one grows from the shortest to the longest sources.
    """
    lines = {line.system: line for line in TABLES["long"]}
    runs = statistics_by_system(result, tuple(lines))
    sets = [row for row in result.rows if row["kind"] == "test set" and row["corpus"] == JOINED.data_name]
    words = np.array(sets[0]["source_words"])
    places = [(first <= words) & (words <= last) for first, last in BUCKETS]
    body = []
    found = {
        name: [_estimate(rows, inside, number) for number, inside in enumerate(places)] for name, rows in runs.items()
    }
    for name, bleu in found.items():
        growth = ""
        if base := found.get(lines[name].baseline or ""):
            growth = str((bleu[-1] - base[-1]) - (bleu[0] - base[0]))
        body.append([str(lines[name]), str(len(runs[name])), *map(str, bleu), growth])
    columns = [
        f"{first} to {last} words ({int(inside.sum())})" for (first, last), inside in zip(BUCKETS, places, strict=True)
    ]
    return table(["system", "seeds", *columns, f"growth of the gap to {TABLES['long'][0]}"], body)


def _estimate(rows: Sequence[Counts], inside: NDArray[np.bool_], stream: int) -> Estimate:
    return estimate([run[inside] for run in rows], resamples(int(inside.sum()), stream=stream))
