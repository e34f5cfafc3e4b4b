"""Action of `sightline evaluate`: the metrics of a trained model on held-out data."""

import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from sightline.base.errors import UsageError
from sightline.model.architectures.factory import TranslationModel
from sightline.model.checkpoint import load_metadata, load_model, replace_text
from sightline.model.config import read_fields, task_of, to_json
from sightline.model.data.corpus import Split, open_corpus, open_held_out
from sightline.model.data.formats import PAIR_TASKS, READING_OPTIONS, Reading
from sightline.model.evaluation.bleu import read_test_set, tokenised_path
from sightline.model.evaluation.defaults import TEST_SPLIT, VALIDATION_SPLIT, EvaluateOptions
from sightline.model.evaluation.evaluate import evaluate_model, evaluate_search, report_lines
from sightline.model.evaluation.result import Evaluation, worst_rows
from sightline.model.parts import AVERAGED, BEST, checkpoint_of, weights_file


def evaluate(options: EvaluateOptions) -> None:
    """Print the metrics of a checkpoint on held-out data, and write them."""
    checkpoint = checkpoint_of(options.checkpoint)
    run = checkpoint.parent if checkpoint.name in (AVERAGED, BEST) else options.checkpoint
    record = read_fields(run / "record.json") if (run / "record.json").is_file() else {}
    model, tokenizer = load_model(checkpoint)
    task = task_of(model.config)
    if options.data is None and "data_path" not in record:
        raise UsageError(f"{run} does not record which data it was trained on; name a file or folder as DATA")
    data, split = options.data or Path(record["data_path"]), options.split
    stored = {**record.get("reading", {}), **{name: record[name] for name in ("source", "target") if name in record}}
    names = {name: getattr(options, name) or stored.get(name) for name in READING_OPTIONS}
    source, target = names["source"] or "en", names["target"] or "de"
    search = (options.num_beams, options.length_penalty)
    if isinstance(model, TranslationModel) and (split := split or _named_split(data, source, target)):
        test_set, evaluated = read_test_set(data, split, source, target, options.limit), f"{data / split}.{source}"
        evaluation = evaluate_search(model, tokenizer, test_set, target, *search)
        if test_set.tokenised_references is None:
            missing = tokenised_path(data, split, target)
            print(f"note: tok-lc BLEU is not computed, because {missing} is missing", file=sys.stderr)
    else:
        if split is not None:
            raise UsageError(f"--split is for translation only; omit it for {task}")
        if task not in PAIR_TASKS:
            names |= {"source": None, "target": None}
        reading = Reading(task, **names, multi_label=getattr(model.config, "multi_label", False))
        part = _held_out(record, data, reading)
        evaluation = evaluate_model(model, tokenizer, list(islice(part, options.limit)), *search)
        split, evaluated = part.name, str(part)
        if split == "dev":
            note = f"{part} also decided when the training stopped; a test set of its own is better"
            print(f"note: {note}", file=sys.stderr)
    print("\n".join([f"evaluated on {evaluated}", "", *report_lines(evaluation)]))
    is_own_data = "data_path" in record and data.resolve() == Path(record["data_path"]).resolve()
    if is_own_data and options.limit is None and checkpoint.name == AVERAGED:
        _add_to_record(run / "record.json", record, split, evaluation)
    if options.predictions is not None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in evaluation.predictions)
        replace_text(options.predictions, "".join(lines))
    if options.json_ is not None:
        facts = load_metadata(weights_file(checkpoint))
        report = {"data": evaluated, "split": split, "task": task, "checkpoint": facts}
        write_json(options.json_, {**report, **evaluation.report(checkpoint.name)})


def _add_to_record(path: Path, record: dict[str, Any], split: str, evaluation: Evaluation) -> None:
    """Write the metrics and the worst examples into the record of a run, for the model card."""
    errors = {"confusion": evaluation.details.get("confusion", {}), "worst": worst_rows(evaluation.predictions)}
    for name, value in {"metrics": evaluation.to_record(AVERAGED), "errors": errors}.items():
        record[name] = {**record.get(name, {}), split: value}
    replace_text(path, to_json(record))


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def _held_out(record: Mapping[str, Any], data: Path, reading: Reading) -> Split:
    """Return the records of `data` that the run was not trained on. Raises `UsageError` if the run
    divided the data, and they have changed since.
    """
    seed = record.get("split_seed")
    if seed is None or data.resolve() != Path(record["data_path"]).resolve():
        return open_held_out(data, reading)
    corpus = open_corpus(data, reading, seed)
    if corpus.digests != record["data"]:
        raise UsageError(
            f"{data} has changed since the training, so that its records may be those that the run was trained on; "
            "name a file of other records as DATA"
        )
    return corpus.dev if corpus.test is None else corpus.test


def _named_split(data: Path, source: str, target: str) -> str | None:
    """Return the test split of Multi30k in a folder, or else the validation split; None for a
    folder of other files. Raises `FileNotFoundError` if it has only one side of pairs, or nothing.
    """
    if not data.is_dir() or any(data.glob("test.*")):
        return None
    splits = {name: (data / f"{name}.{source}", data / f"{name}.{target}") for name in (TEST_SPLIT, VALIDATION_SPLIT)}
    missing = [path for sides in splits.values() for path in sides if not path.is_file()]
    found = next((name for name, sides in splits.items() if not {*sides} & {*missing}), None)
    if found == VALIDATION_SPLIT:
        print(
            f"note: evaluating on {found}, which also decided when training stopped, because {missing[0]} is missing; "
            "name a test set with --split",
            file=sys.stderr,
        )
    if found is None and (any(sides[0].is_file() for sides in splits.values()) or not any(data.iterdir())):
        raise FileNotFoundError(
            f"no test set: missing {', '.join(map(str, missing))}; add SPLIT.{source} and SPLIT.{target} with one "
            "sentence per line to the folder and name them with --split SPLIT "
            "(make evaluate ARGS='--split SPLIT'), or change --source and --target"
        )
    return found
