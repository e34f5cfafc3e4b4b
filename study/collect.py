"""What the finished runs of `python -m model zoo` reached, and what each test sentence adds to their BLEU."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import Result, Row
from model.checkpoint import load_model
from model.evaluation.bleu import TEST_SPLIT, moses_lines, read_test_set
from model.systems import PLAN
from model.training.config import read_train_config
from model.training.trainer import read_log
from study.bleu import corpus_bleu, statistics_of
from study.changes import changes_table
from study.headline import headline
from study.lengths import draw_lengths, lengths_table
from study.runs import SOURCE, TARGET, TRANSLATING
from study.step import add_keep, with_kept

NAME = "collect"
RUN_NAME = re.compile(r"(?P<system>.+)-(?P<seed>\d+)")
METRICS = ("tokenised_bleu", "bleu", "chrf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, help="folder of run folders, SYSTEM-SEED; those without scores.json wait")
    parser.add_argument("data", type=Path, help="folder with the test set")
    add_keep(parser, "runs")


def measure(arguments: argparse.Namespace) -> Result:
    """Read scores and count.

    Raises:
        FileNotFoundError: there is no test set, or no result to keep anything of.
        ValueError: a run has another name; the outputs in a scores.json do not give its own BLEU on this test set; what
            is kept was measured on another one.
    """
    test_set = read_test_set(arguments.data, TEST_SPLIT, SOURCE, TARGET)
    if test_set.tokenised_references is None:
        raise FileNotFoundError(f"{arguments.data} has no tokenised {TEST_SPLIT}")
    references = test_set.tokenised_references
    systems = [_of_run(folder, references) for folder in _finished(arguments.runs)]
    lengths = [len(reference.split()) for reference in references]
    words = [len(source.split()) for source in test_set.sources]
    sentences = {"kind": "test set", "split": TEST_SPLIT, "source_words": words, "reference_lengths": lengths}
    if not arguments.keep:
        return Result(rows=(sentences, *systems))
    all_rows = with_kept(arguments.results, NAME, (sentences, *systems), _which)
    runs = [row for row in all_rows if row["kind"] == "system"]
    if len(all_rows) > 1 + len(runs):
        raise ValueError(f"the result in {arguments.results} is of another test set")
    return Result(rows=(sentences, *sorted(runs, key=_which)))


def _which(row: Row) -> tuple[Any, ...]:
    is_run = row["kind"] == "system"
    return tuple(row[name] for name in (("system", "seed") if is_run else ("source_words", "reference_lengths")))


def _finished(runs: Path) -> list[Path]:
    """The folders of systems that translate and have been scored."""
    folders = sorted(path.parent for path in runs.glob("*/scores.json"))
    names = [_system_and_seed(folder)[0] for folder in folders]
    return [folder for folder, name in zip(folders, names, strict=True) if name in TRANSLATING]


def _system_and_seed(folder: Path) -> tuple[str, int]:
    match = RUN_NAME.fullmatch(folder.name)
    if match is None or match["system"] not in PLAN:
        raise ValueError(f"{folder} is not named as a planned system and its seed")
    return match["system"], int(match["seed"])


def _of_run(folder: Path, references: Sequence[str]) -> dict[str, Any]:
    system, seed = _system_and_seed(folder)
    model, _ = load_model(folder / "averaged")
    scored = _scored(folder / "scores.json", references)
    epochs = read_log(folder)
    if scored["epochs"] not in epochs:
        raise ValueError(f"{folder}/log.jsonl has no line of epoch {scored['epochs']}, which was scored")
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


def _scored(path: Path, references: Sequence[str]) -> dict[str, Any]:
    """Scores as they are, and the statistics of the outputs beside them."""
    scores: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    outputs = scores["outputs"]
    if (scores["split"], len(outputs)) != (TEST_SPLIT, len(references)):
        raise ValueError(
            f"{path} has {len(outputs)} outputs of {scores['split']}, not {len(references)} of {TEST_SPLIT}"
        )
    statistics = statistics_of(moses_lines(outputs, TARGET), references)
    counted, stated = corpus_bleu(statistics.rows.sum(axis=0)), scores["tokenised_bleu"]["value"]
    if counted != stated:
        raise ValueError(f"{path} says tokenised BLEU {stated}, but its outputs have {counted} with these references")
    return {
        "epochs": scores["checkpoint"]["epochs"][-1],
        **{name: scores[name] for name in (*METRICS, "num_beams", "length_penalty")},
        "output_lengths": statistics.output_lengths.tolist(),
        "matches": statistics.matches.T.tolist(),  # a list an order
    }


def tables(result: Result) -> Mapping[str, str]:
    return {**headline(result), **changes_table(result), **lengths_table(result)}


draw = draw_lengths
