"""Score served bundles: BLEU and chrF of translation models, accuracy of classifiers."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.bench.record import Result
from lab.bench.report import table
from lab.study.runs import SOURCE, TARGET, system_of, translates
from lab.study.served import Served, serve
from lab.zoo.data import corpus_folder
from lab.zoo.systems import MULTI30K, SMALL_GROUPS, SST2, SYSTEMS, bundle_name
from sightline.base.bundle import Manifest
from sightline.model.data.corpus import open_held_out
from sightline.model.data.formats import Reading
from sightline.model.data.records import LabelledRecord
from sightline.model.evaluation.bleu import read_test_set, score
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.evaluation.result import Share
from sightline.service.discovery import find_bundles

NAME = "quality"
SPLITS = ("dev", "test")  # of classifiers
NUM_BEAMS = 5
_SMALL = {bundle_name(name) for group in SMALL_GROUPS.values() for name in group}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help="folder of bundles; chat models are skipped")
    parser.add_argument("data", type=Path, help=f"folder that contains {MULTI30K.folder} and {SST2.folder}")


def measure(arguments: argparse.Namespace) -> Result:
    """Score one bundle after another."""
    manifests = find_bundles(arguments.bundles).values()
    with serve(arguments.bundles) as served, TemporaryDirectory() as derived:
        rows = [
            {"model": manifest.name, "stored": manifest.stored_dtype, "dtype": manifest.dtype, **scores}
            for manifest in manifests
            for scores in _scores(served, manifest, arguments.data, Path(derived))
        ]
    return Result(rows=rows)


def _scores(served: Served, manifest: Manifest, data: Path, derived: Path) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a model; none if it neither translates nor classifies. `derived` is a
    folder for the data that are derived from others.
    """
    if "classify" in manifest.tasks:
        folder = corpus_folder(SST2, data, derived)
        return [_accuracy(served, manifest, folder, split) for split in SPLITS]
    if translates(manifest):
        system = SYSTEMS.get(system_of(manifest.name))
        corpus = system.corpus if system and system.corpus.derived == "joined" else MULTI30K
        num_beams = 1 if manifest.name in _SMALL else NUM_BEAMS  # as their runs were scored
        return [_bleu(served, manifest.name, corpus_folder(corpus, data, derived), num_beams)]
    return []


def _bleu(served: Served, name: str, data: Path, num_beams: int) -> Mapping[str, Any]:
    test_set = read_test_set(data, TEST_SPLIT, SOURCE, TARGET)
    body = {"model": name, "parameters": {"num_beams": num_beams, "split_sentences": False}}
    outputs = [output["text"] for output in served.outputs("/v1/generate", body, test_set.sources)]
    scores = score(outputs, test_set, TARGET)
    if scores.tokenised_bleu is None:
        raise FileNotFoundError(f"{data} has no tokenized {TEST_SPLIT}")
    facts = {"split": TEST_SPLIT, "sentences": len(outputs), "num_beams": num_beams}
    values = {"tok_lc": scores.tokenised_bleu.value, "bleu": scores.bleu.value, "chrf": scores.chrf.value}
    return {**facts, **{metric: round(value, 2) for metric, value in values.items()}}


def _accuracy(served: Served, manifest: Manifest, data: Path, split: str) -> Mapping[str, Any]:
    texts, labels = read_reviews(data, split)
    outputs = served.outputs("/v1/classify", {"model": manifest.name}, texts)
    right = [output["labels"][0]["label"] == label for output, label in zip(outputs, labels, strict=True)]
    share = Share(sum(right), len(right))
    accuracy = {"accuracy": round(100 * share.value, 2), "interval_95": share.percent_interval}
    return {"split": split, "sentences": share.total, "correct": share.count, **accuracy}


def read_reviews(data: Path, split: str) -> tuple[list[str], list[str]]:
    """Return the texts and the labels of a split of SST-2."""
    records = [
        row
        for row in open_held_out(data / f"{split}.jsonl", Reading("classification"))
        if isinstance(row, LabelledRecord)
    ]
    return [record.text for record in records], [record.labels[0] for record in records]


def tables(result: Result) -> Mapping[str, str]:
    """Return tables of translation models, of those of the small setting, and of classifiers."""
    translating = [row for row in result.rows if "bleu" in row]
    whole = [
        [f"`{row['model']}`", row["stored"], *(f"{row[metric]:.2f}" for metric in ("tok_lc", "bleu"))]
        for row in translating
        if row["model"] not in _SMALL
    ]
    small = [[f"`{system_of(row['model'])}`", f"{row['tok_lc']:.1f}"] for row in translating if row["model"] in _SMALL]
    classifying = [
        [
            f"`{row['model']}`",
            describe_weights(row["stored"], row["dtype"]),
            row["split"],
            f"{row['correct']} of {row['sentences']}: {row['accuracy']:.2f} %",
            "{:.1f} to {:.1f} %".format(*row["interval_95"]),
        ]
        for row in result.rows
        if "accuracy" in row
    ]
    return {
        "served": table(["model", "weights", "tok-lc BLEU", "13a BLEU"], whole),
        "served-small": table(["system", "tok-lc BLEU as served"], small),
        "sentiment": table(["model", "weights", "split", "correct", "95 % interval"], classifying),
    }


def describe_weights(stored: str, dtype: str) -> str:
    """Describe the types of the weights in the files and in the computation."""
    return dtype if stored == dtype else f"{stored}, computed in {dtype}"
