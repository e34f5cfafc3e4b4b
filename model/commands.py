"""Actions of the commands of `python -m sightline.model`. They need PyTorch; the options do not."""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sightline.base.errors import Interrupted, UsageError
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.classifier import Classifier
from sightline.model.checkpoint import load_checkpoint, load_metadata, load_model, replace_text
from sightline.model.config import ModelConfig, architecture_of, with_fields
from sightline.model.data.derived import derive
from sightline.model.data.text import read_labelled
from sightline.model.decoding.reference import one_thread
from sightline.model.evaluation.accuracy import accuracy, accuracy_fields
from sightline.model.evaluation.bleu import Scores, read_test_set, score, tokenised_path, translate
from sightline.model.evaluation.defaults import NUM_DIALOGUES, SEED, TEST_SPLIT, TURNS
from sightline.model.evaluation.recall import greedy_answers, recall
from sightline.model.parts import WEIGHTS
from sightline.model.systems import GROUPS, PLAN, SYSTEMS, Corpus, System
from sightline.model.training.config import Precision, SystemConfig, read_train_config
from sightline.model.training.tasks import VALIDATION_SPLITS, read_system_data
from sightline.model.training.trainer import Trainer


def train_system(arguments: argparse.Namespace) -> None:
    system, changes = SYSTEMS[arguments.system], dict(arguments.model)
    data = _training_data(arguments.system, arguments.data)

    def make_config(vocab_size: int) -> ModelConfig:
        return with_fields(system.make_config(vocab_size), changes)

    names = {field.name for field in dataclasses.fields(SystemConfig)}
    settings = {**system.training, **{name: value for name, value in vars(arguments).items() if name in names}}
    try:
        config = SystemConfig(**settings)
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
            f"the system {name} needs a folder of training data: python -m sightline.model system {name} DATA --run RUN"
        )
    return data or Path()


def evaluate_split(
    arguments: argparse.Namespace, checkpoint: Path, split: str | None, source: str, target: str
) -> dict[str, Any]:
    """Print the scores of translations of two files of a folder, in two ways of counting words, and
    return the report.

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
    return report


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
        "task": "translation",
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
    for condition, turns in report["turns"].items():
        for turn, kinds in turns.items():
            counts = ", ".join(f"{name} {one['kept']} of {one['total']}" for name, one in kinds.items())
            print(f"{condition}, turn {turn}: {counts}")
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
    for name in ("seeds", "processes"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    runs = planned_runs(arguments.systems, arguments.groups, arguments.seeds)
    if arguments.only_seed is not None:
        runs = [one for one in runs if one[0] == arguments.only_seed]
    if arguments.plan:
        print_plan(runs, arguments.data, arguments.runs)
    elif arguments.processes > 1:
        run_processes(runs, arguments)
    else:
        for seed, name in runs:
            print(f"{name}, seed {seed}", flush=True)
            system = SYSTEMS[name]
            run, data = arguments.runs / f"{name}-{seed}", corpus_folder(system.corpus, arguments.data, arguments.runs)
            config = _zoo_config(name, seed, _precision(run, arguments.precision))
            train_and_score(system, config, data, run)


def planned_runs(
    systems: Sequence[str] | None, groups: Sequence[str] | None, seeds: int | None
) -> list[tuple[int, str]]:
    """Return seeds and names of the runs, in the order of the groups and of the seeds.

    Without systems and groups, they are those of the group "zoo".
    """
    order = groups or (GROUPS[:1] if systems is None else GROUPS)
    names = [name for group in order for name, plan in PLAN.items() if plan.group == group]
    if systems is not None:
        names = [name for name in systems if name in names]
    runs = [(seed, name) for name in names for seed in range(1, 1 + (seeds or PLAN[name].seeds))]
    return sorted(runs, key=lambda one: one[0])


def _zoo_config(name: str, seed: int, precision: Precision = "float32") -> SystemConfig:
    settings = {**SYSTEMS[name].training, "max_epochs": PLAN[name].max_epochs, "seed": seed}
    return SystemConfig(**settings, precision=precision)


def corpus_folder(corpus: Corpus, data: Path, runs: Path) -> Path:
    """Return the folder of the data of a corpus, and derive it if necessary."""
    if corpus.derived is None:
        return data / corpus.folder
    derive(corpus.derived, data / corpus.folder, runs / "data" / corpus.data_name)
    return runs / "data" / corpus.data_name


def run_processes(runs: Sequence[tuple[int, str]], arguments: argparse.Namespace) -> None:
    """Train runs in several processes at a time, each with one thread.

    The output of a process is added to RUNS/NAME-SEED.out.

    Raises:
        ValueError: runs failed; the message names them. The others are trained.
    """
    arguments.runs.mkdir(parents=True, exist_ok=True)
    children = set[subprocess.Popen[bytes]]()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def train(one: tuple[int, str]) -> str:
        """Return "" or the name of the run that failed."""
        seed, name = one
        run = arguments.runs / f"{name}-{seed}"
        if (run / "scores.json").exists():
            return ""
        print(f"{name}, seed {seed}", flush=True)
        options = ["--runs", str(arguments.runs), "--systems", name, "--precision", arguments.precision]
        command = [
            sys.executable,
            "-m",
            "sightline.model",
            "zoo",
            str(arguments.data),
            *options,
            "--only-seed",
            str(seed),
        ]
        with run.with_name(f"{run.name}.out").open("a") as output:
            child = subprocess.Popen(command, env=environment, stdout=output, stderr=output)  # noqa: S603
            children.add(child)
            code = child.wait()
            children.remove(child)
        print(f"{name}, seed {seed}: {'done' if code == 0 else f'exit code {code}'}", flush=True)
        return run.name if code else ""

    def stop(number: int, _: object) -> None:
        raise Interrupted(number)

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    pool = ThreadPoolExecutor(arguments.processes)
    try:
        failed = [name for name in pool.map(train, runs) if name]
    except Interrupted:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in list(children):
            child.terminate()  # it saves a checkpoint
        raise
    finally:
        pool.shutdown()
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; see {arguments.runs}/NAME.out, and run "
            "the same command again to resume them"
        )


def print_plan(runs: Sequence[tuple[int, str]], data: Path, folder: Path) -> None:
    """Print how long the runs that are not finished take in one process, by measured updates."""
    totals = dict[str, float]()
    print("group, system: runs left, updates of a run, seconds of an update, hours")
    for name in dict.fromkeys(name for _, name in runs):
        system, plan = SYSTEMS[name], PLAN[name]
        left = [seed for seed, one in runs if one == name and not (folder / f"{name}-{seed}" / "scores.json").exists()]
        with TemporaryDirectory() as temporary:
            run, config = Path(temporary) / name, _zoo_config(name, 1)
            corpus = corpus_folder(system.corpus, data, folder)
            prepared, model_config = read_system_data(system.task_name, corpus, run, config, system.make_config)
            trainer = Trainer(run, config, system.task, prepared, model_config)
            steps, seconds = trainer.measure_updates()
        updates = steps * plan.max_epochs
        hours = len(left) * updates * seconds / 3600
        totals[plan.group] = totals.get(plan.group, 0.0) + hours
        print(f"{plan.group}, {name}: {len(left)}, {updates:,}, {seconds:.3f}, {hours:.2f}", flush=True)
    for group, hours in totals.items():
        print(f"{group}: {hours:.2f} hours of one core")
    print(f"all: {sum(totals.values()):.2f} hours of one core, without validation and evaluation")


def _precision(run: Path, requested: Precision) -> Precision:
    """Return the precision of a run that exists, otherwise the requested one."""
    if not (run / "state.safetensors").exists():
        return requested
    return read_train_config(run / "train.json", SystemConfig).precision


def train_and_score(system: System, config: SystemConfig, data: Path, run: Path) -> None:
    """Train a run and write `scores.json` into its folder; do nothing if the file exists."""
    path = run / "scores.json"
    if path.exists():
        return
    prepared, model_config = read_system_data(system.task_name, data, run, config, system.make_config)
    Trainer(run, config, system.task, prepared, model_config, has_diagnostics=system.has_diagnostics).fit()
    checkpoint = run / "averaged"
    if system.task_name == "translation":
        _, report = evaluated(checkpoint, data, TEST_SPLIT, config.source, config.target, system.num_beams)
    elif system.task_name == "classification":
        report = accuracy_report(checkpoint, data, VALIDATION_SPLITS["classification"])
    else:
        report = recall_report(checkpoint, TURNS, NUM_DIALOGUES, SEED)
    write_json(path, report)
