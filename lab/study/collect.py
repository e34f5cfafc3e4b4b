"""Collect the scores of finished runs of the systems, with the BLEU statistics of each sentence."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.bench.record import Result, Row
from lab.study.bleu import corpus_bleu, statistics_of
from lab.study.changes import changes_table
from lab.study.headline import headline
from lab.study.lengths import draw_lengths, lengths_table
from lab.study.runs import TARGET, TRANSLATING, sources_and_references
from lab.study.step import add_keep, keep_last_rows
from lab.zoo.systems import PLAN
from sightline.model.checkpoint import load_model
from sightline.model.evaluation.bleu import moses_lines
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.training.folder import read_log
from sightline.model.training.options import read_train_config

NAME = "collect"
RUN_NAME = re.compile(r"(?P<system>.+)-(?P<seed>\d+)")
METRICS = ("tokenised_bleu", "bleu", "chrf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, help="folder of run folders, SYSTEM-SEED; those without scores are skipped")
    parser.add_argument("data", type=Path, help="folder with the test set")
    add_keep(parser, "runs")


def measure(arguments: argparse.Namespace) -> Result:
    """Read the scores of all finished runs and count their statistics. Raises `ValueError` for
    folders not named after a system, outputs that do not give the stated BLEU on this test set, and
    an earlier result of another test set.
    """
    sources, references = sources_and_references(arguments.data)
    systems = [_read_run(folder, references) for folder in _finished_runs(arguments.runs)]
    lengths = [len(reference.split()) for reference in references]
    words = [len(source.split()) for source in sources]
    sentences = {"kind": "test set", "split": TEST_SPLIT, "source_words": words, "reference_lengths": lengths}
    if not arguments.keep:
        return Result(rows=(sentences, *systems))
    all_rows = keep_last_rows(arguments.results, NAME, (sentences, *systems), _key)
    runs = [row for row in all_rows if row["kind"] == "system"]
    if len(all_rows) > 1 + len(runs):
        raise ValueError(f"the result in {arguments.results} is for another test set; run without --keep")
    return Result(rows=(sentences, *sorted(runs, key=_key)))


def _key(row: Row) -> tuple[Any, ...]:
    is_run = row["kind"] == "system"
    return tuple(row[name] for name in (("system", "seed") if is_run else ("source_words", "reference_lengths")))


def _finished_runs(runs: Path) -> list[Path]:
    """Return the folders of runs that translate and have been scored."""
    folders = sorted(path.parent for path in runs.glob("*/scores.json"))
    names = [system_and_seed(folder)[0] for folder in folders]
    return [folder for folder, name in zip(folders, names, strict=True) if name in TRANSLATING]


def system_and_seed(folder: Path) -> tuple[str, int]:
    match = RUN_NAME.fullmatch(folder.name)
    if match is None or match["system"] not in PLAN:
        raise ValueError(f"{folder} must be named SYSTEM-SEED, with a planned system")
    return match["system"], int(match["seed"])


def _read_run(folder: Path, references: Sequence[str]) -> dict[str, Any]:
    system, seed = system_and_seed(folder)
    model, _ = load_model(folder / "averaged")
    scored = read_scores(folder / "scores.json", references)
    epochs = read_log(folder)
    if scored["epochs"] not in epochs:
        raise ValueError(f"{folder}/log.jsonl has no entry for epoch {scored['epochs']}, which was scored")
    settings = read_train_config(folder / "train.json")
    return {
        "kind": "system",
        "system": system,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "updates": epochs[scored["epochs"]]["step"],
        "batch_tokens": settings.batch_tokens,
        "precision": settings.precision,
        **scored,
    }


def read_scores(path: Path, references: Sequence[str]) -> dict[str, Any]:
    """Return the scores of a run with the statistics of its outputs."""
    scores: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    outputs = scores["outputs"]
    if (scores["split"], len(outputs)) != (TEST_SPLIT, len(references)):
        raise ValueError(
            f"{path} must have {len(references)} outputs of {TEST_SPLIT}, got {len(outputs)} of {scores['split']}"
        )
    statistics = statistics_of(moses_lines(outputs, TARGET), references)
    counted, stated = corpus_bleu(statistics.rows.sum(axis=0)), scores["tokenised_bleu"]["value"]
    if counted != stated:
        raise ValueError(f"{path} states tokenized BLEU {stated}, but its outputs give {counted} on this test set")
    return {
        "epochs": scores["checkpoint"]["epochs"][-1],
        **{name: scores[name] for name in (*METRICS, "num_beams", "length_penalty")},
        "output_lengths": statistics.output_lengths.tolist(),
        "matches": statistics.matches.T.tolist(),  # one list for each order of n-grams
    }


def tables(result: Result) -> Mapping[str, str]:
    return {**headline(result), **changes_table(result), **lengths_table(result)}


draw = draw_lengths
