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

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.bench.style import BLACK, BLUE, GREEN, LIGHT_BLUE, LIGHT_ORANGE, ORANGE
from lab.study.bleu import Counts, Statistics, estimate, resamples
from lab.study.collect import read_scores, system_and_seed
from lab.study.gradients import Diagnostics, draw_gradients, ratio, total
from lab.study.lengths import Bucket, buckets_of, draw_buckets
from lab.study.runs import sources_and_references
from lab.study.step import add_keep, keep_last_rows
from lab.zoo.data import corpus_folder
from lab.zoo.diagnostics import DIAGNOSTICS
from lab.zoo.systems import JOINED, SMALL, SMALL_GROUPS, SYSTEMS

NAME = "claims"
# First and last number of source words of the joined captions.
BUCKETS = ((20, 34), (35, 47), (48, 60))


LONG_LINES = {  # by system: label, colour, marker
    "joined-fixed-context": ("fixed context", ORANGE, "s"),
    "joined-initial-state": ("fixed context, initial state only", LIGHT_ORANGE, "v"),
    "joined-bahdanau": ("Bahdanau", BLUE, "o"),
    "joined-luong-local-p": ("local-p", LIGHT_BLUE, "D"),
    "joined-post-norm": ("Transformer", GREEN, "^"),
    "joined-linformer": ("Linformer", BLACK, "P"),
}


@dataclass(frozen=True)
class Line:
    """Line of a table: a system and the system that it is compared with."""

    system: str
    baseline: str | None = None
    name: str = ""  # by default, the system without its prefix

    def __str__(self) -> str:
        return self.name or f"`{self.system.partition('-')[2]}`"


_SCALED = "small-positions-sinusoidal"  # the Transformer that changes of the small setting start from
# Systems with residual connections by their number of layers.
DEPTHS: Mapping[int, str] = {1: "small-depth-1", 2: _SCALED, 4: "small-depth-4", 6: "small-depth-6"}
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
        for depth, system in DEPTHS.items()
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
            for kind in ("causal-encoder", "pre-norm", "single-head", "single-head-without-weights", "linformer")
        ),
    ),
}

# Groups whose systems are compared with a second system, too.
SECOND: Mapping[str, str] = {"order": _SCALED}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, help="folder of run folders, SYSTEM-SEED; those without scores are skipped")
    parser.add_argument("data", type=Path, help="folder with the subfolder multi30k")
    add_keep(parser, "runs")


def measure(arguments: argparse.Namespace) -> Result:
    """Read the scores and the diagnostics of all finished runs of the small setting. Raises
    `ValueError` if the outputs of a run do not give the stated BLEU on its test set.
    """
    rows: list[Row] = []
    for corpus in (SMALL, JOINED):
        sources, references = sources_and_references(corpus_folder(corpus, arguments.data, arguments.runs))
        rows.append(
            {
                "kind": "test set",
                "corpus": corpus.data_name,
                "source_words": [len(source.split()) for source in sources],
                "reference_lengths": [len(reference.split()) for reference in references],
            }
        )
        for path in sorted(arguments.runs.glob("*/scores.json")):
            system, seed = system_and_seed(path.parent)
            if SYSTEMS[system].corpus == corpus:
                scores = read_scores(path, references)
                facts = {"kind": "system", "corpus": corpus.data_name, "system": system, "seed": seed}
                rows.append({**facts, **scores, "diagnostics": _diagnostics(path.parent)})
    if arguments.keep:
        rows = keep_last_rows(arguments.results, NAME, rows, _key)
    return Result(rows=tuple(rows))


def _key(row: Row) -> tuple[object, ...]:
    return row["corpus"], row.get("system"), row.get("seed")


def _diagnostics(run: Path) -> list[dict[str, Any]]:
    """Return the diagnostics before the training, after its first epoch and after its last."""
    lines = (run / DIAGNOSTICS).read_text(encoding="utf-8").splitlines()
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


def draw(result: Result, folder: Path) -> None:
    """Write `gradients.svg` and `long.svg`, if their systems have been trained."""
    runs: dict[str, list[Any]] = {}
    for row in result.rows:
        if row["kind"] == "system":
            runs.setdefault(row["system"], []).append(row["diagnostics"])
    with_residual = {depth: runs[system] for depth, system in DEPTHS.items() if system in runs}
    without = {depth: runs[name] for depth in DEPTHS if (name := f"small-depth-{depth}-no-residual") in runs}
    if with_residual or without:
        draw_gradients(with_residual, without, folder / "gradients.svg")
    buckets = _buckets(result)
    if buckets[0].bleu:
        draw_buckets(buckets, LONG_LINES, folder / "long.svg")


def statistics_by_system(result: Result, systems: Sequence[str]) -> dict[str, list[Counts]]:
    """Return the statistics (N, 10) of each run, by system."""
    references = {row["corpus"]: np.array(row["reference_lengths"]) for row in result.rows if row["kind"] == "test set"}
    by_system: dict[str, list[Counts]] = {}
    for row in result.rows:
        if row["kind"] == "system" and row["system"] in systems:
            lengths = np.array(row["output_lengths"]), references[row["corpus"]]
            by_system.setdefault(row["system"], []).append(Statistics(np.array(row["matches"]).T, *lengths).rows)
    return {name: by_system[name] for name in systems if name in by_system}


def _by_system(result: Result, group: str) -> str:
    """Return the BLEU of the systems of a group, and their differences from their baselines."""
    lines = {line.system: line for line in TABLES[group]}
    runs = statistics_by_system(result, tuple(lines))
    estimates = {name: estimate(rows, resamples(len(rows[0]))) for name, rows in runs.items()}
    baselines = list(dict.fromkeys(line.baseline for line in lines.values() if line.baseline))
    counts = {name: len(rows) for name, rows in runs.items()}
    # One baseline is named in the head of the column, several in a column.
    (only,) = baselines if len(baselines) == 1 else (None,)
    head = ["system", *_seeds_head(counts), "BLEU", *([] if only else ["compared with"])]
    head.append(f"minus {lines[only]}" if only else "difference")
    second = group in SECOND and SECOND[group] in estimates and SECOND[group]
    head += [f"minus {lines[second]}"] if second else []
    head += [text for text, _ in SIZES.get(group, ())]
    body = []
    for name, bleu in estimates.items():
        baseline = lines[name].baseline if lines[name].baseline in estimates else None
        cells = [str(lines[name]), *_seeds_cell(counts, name), str(bleu)]
        if not only:
            cells.append(str(lines[baseline]) if baseline else "")
        cells.append(str(bleu - estimates[baseline]) if baseline else "")
        if second:
            cells.append("" if name in (only, second) else str(bleu - estimates[second]))
        diagnostics = [row["diagnostics"] for row in result.rows if row.get("system") == name]
        body.append([*cells, *(size(diagnostics) for _, size in SIZES.get(group, ()))])
    return table(head, body) + _seeds_note(counts)


def _seeds_head(counts: Mapping[str, int]) -> list[str]:
    return ["seeds"] if len(set(counts.values())) > 1 else []


def _seeds_cell(counts: Mapping[str, int], name: str) -> list[str]:
    """Return the number of seeds of a system if not all systems have the same number."""
    return [str(counts[name])] if _seeds_head(counts) else []


def _seeds_note(counts: Mapping[str, int]) -> str:
    """Return a sentence if all systems have the same number of several seeds."""
    several = set(counts.values()) - {1}
    return f"\n\nMeans of {several.pop()} seeds." if several and not _seeds_head(counts) else ""


def _spread(diagnostics: Diagnostics, epoch: int) -> str:
    """Return the standard deviation of scores over keys, mean of all attentions and seeds."""
    spreads = [attention["spread"] for run in diagnostics for attention in run[epoch]["scores"].values()]
    return f"{np.mean(spreads):.2f}" if spreads else ""


# Columns of the tables whose question is about the size of scores or of gradients.
SIZES: Mapping[str, Sequence[tuple[str, Callable[[Diagnostics], str]]]] = {
    "scale": (
        ("spread of scores before", lambda diagnostics: _spread(diagnostics, 0)),
        ("after training", lambda diagnostics: _spread(diagnostics, -1)),
        ("gradient before", lambda diagnostics: total(diagnostics, 0)),
        ("after", lambda diagnostics: total(diagnostics, -1)),
    ),
    "depth": (
        ("first / last decoder layer, before", lambda diagnostics: ratio(diagnostics, 0, "decoder")),
        ("first / last encoder layer, after", lambda diagnostics: ratio(diagnostics, -1, "encoder")),
    ),
}


def _buckets(result: Result) -> list[Bucket]:
    """Return the systems on joined captions by the words of the source."""
    (words,) = [
        row["source_words"] for row in result.rows if row["kind"] == "test set" and row["corpus"] == JOINED.data_name
    ]
    return buckets_of(np.array(words), BUCKETS, statistics_by_system(result, list(LONG_LINES)))


def _by_length(result: Result) -> str:
    """Return the BLEU of the systems on joined captions by the words of the source, how it changes
    from the shortest to the longest sources, and how the gap to the first system changes.
    """
    lines = {line.system: line for line in TABLES["long"]}
    counts = {name: len(rows) for name, rows in statistics_by_system(result, list(lines)).items()}
    buckets = _buckets(result)
    first, last = buckets[0].bleu, buckets[-1].bleu
    body = []
    for name in first:
        base = lines[name].baseline or ""
        change = last[name] - first[name]
        growth = str(change - (last[base] - first[base])) if base in first else ""
        values = [str(bucket.bleu[name]) for bucket in buckets]
        body.append([str(lines[name]), *_seeds_cell(counts, name), *values, str(change), growth])
    columns = [f"{bucket.name} words ({bucket.num_sentences})" for bucket in buckets]
    ends = ["change", f"growth of the gap to {TABLES['long'][0]}"]
    return table(["system", *_seeds_head(counts), *columns, *ends], body) + _seeds_note(counts)
