"""Score served bundles: BLEU and chrF of translation models, accuracy of classifiers."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import Result
from bench.report import table
from model.data.text import read_labelled
from model.evaluation.accuracy import accuracy_fields
from model.evaluation.bleu import read_test_set, score
from model.evaluation.defaults import TEST_SPLIT
from model.evaluation.share import Share
from model.systems import MULTI30K, SST2
from model.training.tasks import VALIDATION_SPLITS
from service.bundle import Manifest, read_manifest
from study.runs import SOURCE, TARGET, translates
from study.served import Served, serve
from study.step import no_pictures

NAME = "quality"
DEV_SPLIT = VALIDATION_SPLITS["classification"]
NUM_BEAMS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help="folder of bundles; chat models are skipped")
    parser.add_argument("data", type=Path, help=f"folder that contains {MULTI30K.folder} and {SST2.folder}")


def measure(arguments: argparse.Namespace) -> Result:
    """Score one bundle after another.

    Raises:
        FileNotFoundError, ValueError: The bundles cannot be served, or data is missing.
    """
    manifests = [read_manifest(path.parent) for path in sorted(arguments.bundles.glob("*/manifest.json"))]
    with serve(arguments.bundles) as served:
        rows = [
            {"model": manifest.name, "half_weights": manifest.half_weights, "dtype": manifest.dtype, **scores}
            for manifest in manifests
            for scores in _scores(served, manifest, arguments.data)
        ]
    return Result(rows=rows)


def _scores(served: Served, manifest: Manifest, data: Path) -> Sequence[Mapping[str, Any]]:
    """Return one row, or none for a model that neither translates nor classifies."""
    if "classify" in manifest.tasks:
        return [_accuracy(served, manifest, data / SST2.folder)]
    if translates(manifest):
        return [_bleu(served, manifest.name, data / MULTI30K.folder)]
    return []


def _bleu(served: Served, name: str, data: Path) -> Mapping[str, Any]:
    test_set = read_test_set(data, TEST_SPLIT, SOURCE, TARGET)
    body = {"model": name, "parameters": {"num_beams": NUM_BEAMS}}
    outputs = [output["text"] for output in served.outputs("/v1/generate", body, test_set.sources)]
    scores = score(outputs, test_set, TARGET)
    if scores.tokenised_bleu is None:
        raise FileNotFoundError(f"{data} has no tokenized {TEST_SPLIT}")
    facts = {"split": TEST_SPLIT, "sentences": len(outputs), "num_beams": NUM_BEAMS}
    values = {"tok_lc": scores.tokenised_bleu.value, "bleu": scores.bleu.value, "chrf": scores.chrf.value}
    return {**facts, **{metric: round(value, 2) for metric, value in values.items()}}


def _accuracy(served: Served, manifest: Manifest, data: Path) -> Mapping[str, Any]:
    texts, labels = read_labelled(data, DEV_SPLIT)
    outputs = served.outputs("/v1/classify", {"model": manifest.name}, texts)
    chosen = [output["labels"][0]["label"] for output in outputs]
    right = [manifest.labels[label] == one for label, one in zip(labels, chosen, strict=True)]
    return {"split": DEV_SPLIT, **accuracy_fields(Share(sum(right), len(right)))}


def tables(result: Result) -> Mapping[str, str]:
    """Return the table of translation models and the table of classifiers."""
    translating = [
        [
            f"`{row['model']}`",
            "float16" if row["half_weights"] else row["dtype"],
            *(f"{row[metric]:.2f}" for metric in ("tok_lc", "bleu")),
        ]
        for row in result.rows
        if "bleu" in row
    ]
    classifying = [
        [
            f"`{row['model']}`",
            _weights(row),
            f"{row['correct']} of {row['sentences']}: {row['accuracy']:.2f} %",
            "{:.1f} to {:.1f} %".format(*row["interval_95"]),
        ]
        for row in result.rows
        if "accuracy" in row
    ]
    return {
        "served": table(["model", "weights", "tok-lc BLEU", "13a BLEU"], translating),
        "sentiment": table(["model", "weights", f"correct on {DEV_SPLIT}", "95 % interval"], classifying),
    }


def _weights(row: Mapping[str, Any]) -> str:
    return "float16, computed in float32" if row["half_weights"] else row["dtype"]


draw = no_pictures
