"""Actions of the commands of `python -m model`. They need PyTorch; the options do not."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model.architectures.causal import CausalModel
from model.architectures.classifier import Classifier
from model.checkpoint import load_checkpoint, load_metadata, load_model, replace_text
from model.config import ModelConfig, architecture_of, with_fields
from model.data.text import read_labelled
from model.decoding.reference import one_thread
from model.errors import UsageError
from model.evaluation.accuracy import accuracy, accuracy_fields
from model.evaluation.bleu import Scores, read_test_set, score, tokenised_path, translate
from model.evaluation.defaults import NUM_DIALOGUES, SEED, TEST_SPLIT, TURNS
from model.evaluation.recall import greedy_answers, recall
from model.parts import WEIGHTS
from model.systems import PLAN, SYSTEMS, System
from model.training.config import Precision, TrainConfig, read_train_config
from model.training.tasks import VALIDATION_SPLITS, read_system_data
from model.training.trainer import Trainer


def train_system(arguments: argparse.Namespace) -> None:
    system, changes = SYSTEMS[arguments.system], dict(arguments.model)
    data = _training_data(arguments.system, arguments.data)

    def make_config(vocab_size: int) -> ModelConfig:
        return with_fields(system.make_config(vocab_size), changes)

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    settings = {**system.training, **{name: value for name, value in vars(arguments).items() if name in names}}
    try:
        config = TrainConfig(**settings)
        make_config(config.vocab_size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    prepared, model_config = read_system_data(system.task_name, data, arguments.run, config, make_config)
    trainer = Trainer(arguments.run, config, system.task, prepared, model_config)
    vocab_size = model_config.vocab_size
    if vocab_size < config.vocab_size:
        print(
            f"note: the vocabulary has {vocab_size} tokens instead of vocab_size ({config.vocab_size}), because the "
            "training data has no more pairs to merge",
            file=sys.stderr,
        )
    trainer.fit()


def _training_data(name: str, data: Path | None) -> Path:
    """Return the data folder.

    Raises:
        UsageError: the system needs a folder and none is given, or the other way round.
    """
    generates_data = not SYSTEMS[name].corpus.folder
    if generates_data and data is not None:
        raise UsageError(f"the system {name} generates its training data; remove the argument {data}")
    if not generates_data and data is None:
        raise UsageError(
            f"the system {name} needs a folder of training data: python -m model system {name} DATA --run RUN"
        )
    return data or Path()


def evaluate_split(
    arguments: argparse.Namespace, checkpoint: Path, split: str | None, source: str, target: str
) -> None:
    """Print the scores of translations of two files of a folder, in two ways of counting words.

    Args:
        arguments: options of the command.
        checkpoint: folder of the checkpoint.
        split: first part of the names of the files; by default those of Multi30k.
        source: ending of the file of sources.
        target: ending of the file of references.
    """
    data, limit = arguments.data, getattr(arguments, "limit", None)
    scores, report = evaluated(
        checkpoint, data, split, source, target, arguments.num_beams, arguments.length_penalty, limit
    )
    tokenised = f"BLEU {scores.tokenised_bleu}"
    if scores.tokenised_bleu is None:
        tokenised = f"not computed, because {tokenised_path(data, report['split'], target)} is missing"
    print(f"tok-lc: {tokenised}")
    print(f"detok, cased: BLEU {scores.bleu}; chrF {scores.chrf}")
    if hasattr(arguments, "json"):
        write_json(arguments.json, report)


def _default_split(data: Path, source: str, target: str) -> str:
    """Return the test split of Multi30k if the folder has it, otherwise the validation split.

    Raises:
        FileNotFoundError: the folder has neither; the message names the missing files.
    """
    missing = list[Path]()
    for split in (TEST_SPLIT, VALIDATION_SPLITS["translation"]):
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
        "split": split,
        "sentences": len(outputs),
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "checkpoint": load_metadata(checkpoint / WEIGHTS),
        **dataclasses.asdict(scores),
        "outputs": outputs,
    }


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def print_accuracy(arguments: argparse.Namespace) -> None:
    print(json.dumps(accuracy_report(arguments.checkpoint, arguments.data, arguments.split), indent=2))


def accuracy_report(checkpoint: Path, data: Path, split: str) -> dict[str, Any]:
    model, tokenizer = load_model(checkpoint)
    if not isinstance(model, Classifier):
        raise UsageError(f"{checkpoint} must be a classifier, but its architecture is {architecture_of(model.config)}")
    found = accuracy(model, tokenizer, *read_labelled(data, split, len(model.config.labels)))
    return {"split": split, **accuracy_fields(found), "checkpoint": load_metadata(checkpoint / WEIGHTS)}


def measure_recall(arguments: argparse.Namespace) -> None:
    if min(*arguments.turns, arguments.dialogues) < 1:
        raise UsageError(
            f"turns and dialogues must be at least 1, got {min(arguments.turns)} and {arguments.dialogues}"
        )
    report = recall_report(arguments.checkpoint, arguments.turns, arguments.dialogues, arguments.seed)
    for turn, kinds in report["turns"].items():
        print(f"turn {turn}: " + ", ".join(f"{name} {one['kept']} of {one['total']}" for name, one in kinds.items()))
    if arguments.json is not None:
        write_json(arguments.json, report)


def recall_report(checkpoint: Path, turns: Sequence[int], num_dialogues: int, seed: int) -> dict[str, Any]:
    model, tokenizer = load_model(checkpoint)
    if not isinstance(model, CausalModel):
        raise UsageError(f"{checkpoint} must be a chat model, but its architecture is {architecture_of(model.config)}")
    with one_thread():
        counts = recall(greedy_answers(model, tokenizer), turns, num_dialogues, seed)
    return {"seed": seed, "checkpoint": load_metadata(checkpoint / WEIGHTS), "turns": counts}


def train_zoo(arguments: argparse.Namespace) -> None:
    """Train the systems in the order of their seeds: seed 1 of all systems, then seed 2."""
    if arguments.seeds is not None and arguments.seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {arguments.seeds}")
    runs = [(seed, name) for name in arguments.systems for seed in range(1, 1 + (arguments.seeds or PLAN[name].seeds))]
    for seed, name in sorted(runs, key=lambda one: one[0]):
        print(f"{name}, seed {seed}", flush=True)
        system = SYSTEMS[name]
        run, data = arguments.runs / f"{name}-{seed}", arguments.data / system.corpus.folder
        settings = {**system.training, "max_epochs": PLAN[name].max_epochs, "seed": seed}
        train_and_score(system, TrainConfig(**settings, precision=_precision(run, arguments.precision)), data, run)


def _precision(run: Path, requested: Precision) -> Precision:
    """Return the precision of a run that exists, otherwise the requested one."""
    return read_train_config(run / "train.json").precision if (run / "state.safetensors").exists() else requested


def train_and_score(system: System, config: TrainConfig, data: Path, run: Path) -> None:
    """Train a run and write `scores.json` into its folder; do nothing if the file exists."""
    path = run / "scores.json"
    if path.exists():
        return
    prepared, model_config = read_system_data(system.task_name, data, run, config, system.make_config)
    Trainer(run, config, system.task, prepared, model_config).fit()
    checkpoint = run / "averaged"
    if system.task_name == "translation":
        _, report = evaluated(checkpoint, data, TEST_SPLIT, config.source, config.target)
    elif system.task_name == "classification":
        report = accuracy_report(checkpoint, data, VALIDATION_SPLITS["classification"])
    else:
        report = recall_report(checkpoint, TURNS, NUM_DIALOGUES, SEED)
    write_json(path, report)
