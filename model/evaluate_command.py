"""Action of `sightline evaluate`: the metrics of a trained model on held-out data."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from sightline.base.errors import UsageError
from sightline.model.checkpoint import load_checkpoint, load_metadata, replace_text
from sightline.model.config import ArchitectureConfig, PretrainedConfig, architecture_of, read_fields, to_json
from sightline.model.data.corpus import Split, open_corpus, open_held_out
from sightline.model.data.formats import PAIR_TASKS, READING_OPTIONS, Reading
from sightline.model.data.records import TASK_NAMES, PairRecord, TaskName
from sightline.model.data.text import read_parallel
from sightline.model.evaluation.bleu import Scores, read_test_set, score, tokenised_path, translate, translation_rows
from sightline.model.evaluation.defaults import TEST_SPLIT, VALIDATION_SPLIT, EvaluateOptions
from sightline.model.evaluation.evaluate import evaluate_checkpoint, headline, report_lines
from sightline.model.evaluation.result import worst_rows
from sightline.model.parts import AVERAGED, BEST, checkpoint_of, load_parts, weights_file
from sightline.model.training.start import TASK_ARCHITECTURES


def evaluate(options: EvaluateOptions) -> None:
    """Print the metrics of a checkpoint on held-out data."""
    run, checkpoint = _run_and_checkpoint(options.checkpoint)
    record = read_fields(run / "record.json") if (run / "record.json").is_file() else {}
    config, _ = load_parts(checkpoint)
    task = _task_of(config)
    if options.data is None and "data_path" not in record:
        raise UsageError(f"{run} does not record which data it was trained on; name a file or folder as DATA")
    data = options.data or Path(record["data_path"])
    is_own_data = "data_path" in record and data.resolve() == Path(record["data_path"]).resolve()
    is_recorded = is_own_data and options.limit is None and checkpoint.name == AVERAGED
    split = options.split
    stored = {**record.get("reading", {}), **{name: record[name] for name in ("source", "target") if name in record}}
    names = {name: getattr(options, name) or stored.get(name) for name in READING_OPTIONS}
    source, target = names["source"], names["target"]
    if task == "translation":
        sides = source or "en", target or "de"
        if split is not None or _has_named_split(data, sides[0]):
            report = evaluate_split(options, checkpoint, data, *sides)
            _write(options, report, run, record if is_recorded else None, checkpoint)
            return
    if split is not None:
        raise UsageError(f"--split is for translation only; omit it for {task}")
    if task not in PAIR_TASKS:
        names |= {"source": None, "target": None}
    reading = Reading(task, **names, multi_label=getattr(config, "multi_label", False))
    part = _held_out(record, data, reading)
    records = list(islice(part, options.limit))
    report = evaluate_checkpoint(
        checkpoint, records, num_beams=options.num_beams, length_penalty=options.length_penalty
    )
    report = {"data": str(part), "split": part.name, **report}
    print("\n".join(report_lines(report)))
    if part.name == "dev":
        print(f"note: {part} also decided when the training stopped; a test set of its own is better", file=sys.stderr)
    _write(options, report, run, record if is_recorded else None, checkpoint)


def _write(
    options: EvaluateOptions, report: dict[str, Any], run: Path, record: dict[str, Any] | None, checkpoint: Path
) -> None:
    """Write the files of the options. Write the metrics and the worst examples into the record of
    the run, which the model card shows, if it is given.
    """
    rows, split = report.pop("predictions"), report["split"]
    if record is not None:
        found: dict[str, Any] = {"metrics": headline(report).to_record(checkpoint.name)}
        found["errors"] = {"confusion": report.get("confusion", {}), "worst": worst_rows(rows)}
        for name, value in found.items():
            record[name] = {**record.get(name, {}), split: value}
        replace_text(run / "record.json", to_json(record))
    if options.predictions is not None:
        replace_text(options.predictions, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if options.json_ is not None:
        write_json(options.json_, report)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report without its predictions."""
    fields = {name: value for name, value in report.items() if name != "predictions"}
    replace_text(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


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


def _run_and_checkpoint(path: Path) -> tuple[Path, Path]:
    """Return the folder of a run and its averaged checkpoint, or that which the path names."""
    checkpoint = checkpoint_of(path)
    return (checkpoint.parent if checkpoint.name in (AVERAGED, BEST) else path), checkpoint


def _task_of(config: ArchitectureConfig) -> TaskName:
    """Return the task of a model."""
    if isinstance(config, PretrainedConfig):
        return config.task
    return next(task for task in TASK_NAMES if architecture_of(config) in TASK_ARCHITECTURES[task])


def _has_named_split(data: Path, source: str) -> bool:
    """Return True if a folder has files named as in Multi30k, and no test files of its own."""
    if not data.is_dir() or any(data.glob("test.*")):
        return False
    names = (TEST_SPLIT, VALIDATION_SPLIT)
    return any((data / f"{name}.{source}").is_file() for name in names) or not any(data.iterdir())


def evaluate_split(options: EvaluateOptions, checkpoint: Path, data: Path, source: str, target: str) -> dict[str, Any]:
    """Print the scores of translations of two files of a folder, in two ways of counting words, and
    return the report. `source` and `target` are the endings of the files.
    """
    scores, report = evaluated(
        checkpoint, data, options.split, source, target, options.num_beams, options.length_penalty, options.limit
    )
    tokenised = f"BLEU {scores.tokenised_bleu}"
    if scores.tokenised_bleu is None:
        tokenised = f"not computed, because {tokenised_path(data, report['split'], target)} is missing"
    print(f"tok-lc: {tokenised}")
    print(f"detok, cased: BLEU {scores.bleu}; chrF {scores.chrf}")
    pairs = map(PairRecord, *read_parallel(data, report["split"], source, target))
    return report | {"predictions": translation_rows(list(islice(pairs, options.limit)), report["outputs"])}


def _default_split(data: Path, source: str, target: str) -> str:
    """Return the test split of Multi30k if the folder has it, otherwise the validation split."""
    missing = list[Path]()
    for split in (TEST_SPLIT, VALIDATION_SPLIT):
        absent = [path for path in (data / f"{split}.{source}", data / f"{split}.{target}") if not path.is_file()]
        if not absent:
            if missing:
                print(
                    f"note: evaluating on {split}, which also decided when training stopped, because {missing[0]} is "
                    "missing; name a test set with --split",
                    file=sys.stderr,
                )
            return split
        missing += absent
    raise FileNotFoundError(
        f"no test set: missing {', '.join(map(str, missing))}; add SPLIT.{source} and SPLIT.{target} with one sentence "
        "per line to the folder and name them with --split SPLIT "
        "(make evaluate ARGS='--split SPLIT'), or change --source and --target"
    )


def evaluated(
    checkpoint: Path,
    data: Path,
    split: str | None,
    source: str,
    target: str,
    num_beams: int = 5,
    length_penalty: float = 1.0,
    limit: int | None = None,
) -> tuple[Scores, dict[str, Any]]:
    """Return the scores of a checkpoint on a split, and the report for `--json`."""
    model, tokenizer = load_checkpoint(checkpoint)
    split = split or _default_split(data, source, target)
    test_set = read_test_set(data, split, source, target, limit)
    outputs = translate(model, tokenizer, test_set.sources, num_beams, length_penalty)
    scores = score(outputs, test_set, target)
    return scores, {
        "task": "translation",
        "split": split,
        "sentences": len(outputs),
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "checkpoint": load_metadata(weights_file(checkpoint)),
        **dataclasses.asdict(scores),
        "outputs": outputs,
    }
