"""Training and scores of the systems of the study."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from lab.zoo.data import corpus_folder, read_data
from lab.zoo.diagnostics import DiagnosedTrainer
from lab.zoo.hard_attention import TRANSLATION
from lab.zoo.recall import NUM_DIALOGUES, SEED, TURNS, recall_report
from lab.zoo.systems import GROUPS, PLAN, SYSTEMS, System
from sightline.base.errors import Interrupted, UsageError
from sightline.model.checkpoint import load_metadata, load_model
from sightline.model.config import SPECIAL_IDS, ArchitectureConfig
from sightline.model.data.corpus import open_held_out
from sightline.model.data.formats import Reading
from sightline.model.data.records import TaskName
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.evaluate_command import write_json
from sightline.model.evaluation.bleu import read_test_set, score, translate
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.evaluation.evaluate import evaluate_model
from sightline.model.parts import weights_file
from sightline.model.train_command import TASKS as PRODUCT_TASKS
from sightline.model.training.folder import RunFolder, locked
from sightline.model.training.options import AUTO, Precision, TrainConfig, make_config, read_options, read_train_config
from sightline.model.training.task import Task
from sightline.model.training.trainer import Trainer

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# The losses of hard attention belong to the study.
TASKS: Mapping[TaskName, Task[Any, Any]] = {**PRODUCT_TASKS, "translation": TRANSLATION}


def train(arguments: argparse.Namespace) -> None:
    """Train the systems in the order of their seeds: seed 1 of all systems, then seed 2."""
    runs = chosen_runs(arguments)
    if arguments.processes < 1:
        raise UsageError(f"processes must be at least 1, got {arguments.processes}")
    if arguments.processes > 1:
        run_processes(runs, arguments)
        return
    for seed, name in runs:
        print(f"{name}, seed {seed}", flush=True)
        system, run = changed_system(name, arguments.config, arguments.model), arguments.runs / f"{name}-{seed}"
        config = make_config({**system.settings, "seed": seed, "precision": _precision(run, arguments.precision)})
        train_and_score(system, config, corpus_folder(system.corpus, arguments.data, arguments.runs), run)


def chosen_runs(arguments: argparse.Namespace) -> list[tuple[int, str]]:
    """Return seeds and names of the runs that options select."""
    if arguments.seeds is not None and arguments.seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {arguments.seeds}")
    runs = planned_runs(arguments.systems, arguments.groups, arguments.seeds)
    return [run for run in runs if arguments.only_seed in (None, run[0])]


def planned_runs(
    systems: Sequence[str] | None, groups: Sequence[str] | None, seeds: int | None
) -> list[tuple[int, str]]:
    """Return seeds and names of the runs, in the order of the groups and of the seeds. Without
    systems and groups, they are those of the group "zoo".
    """
    order = groups or (GROUPS[:1] if systems is None else GROUPS)
    names = [name for group in order for name, plan in PLAN.items() if plan.group == group]
    if systems is not None:
        names = [name for name in systems if name in names]
    runs = [(seed, name) for name in names for seed in range(1, 1 + (seeds or PLAN[name].seeds))]
    return sorted(runs, key=lambda run: run[0])


def changed_system(name: str, path: Path | None = None, fields: Mapping[str, str] | None = None) -> System:
    """Return a system with the epochs of its plan, changed by a configuration file of `sightline
    train` and by texts for fields of the model.
    """
    system = SYSTEMS[name]
    changes = {} if path is None else read_options(path, system.task).model_dump(exclude_unset=True)
    settings = {**system.settings, "epochs": PLAN[name].epochs}
    settings |= {key: value for key, value in changes.items() if value != AUTO}

    def make(vocab_size: int) -> ArchitectureConfig:
        return with_fields(system.make_config(vocab_size), dict(fields or {}))

    try:
        make(int(settings["vocab_size"]))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return replace(system, make_config=make, settings=settings)


def with_fields(config: ArchitectureConfig, changes: Mapping[str, str]) -> ArchitectureConfig:
    """Return a configuration with some fields replaced by values given as text. Raises `ValueError`
    if a field is unknown, or its value is not allowed.
    """
    # The tokenizer determines vocab_size and the special ids, and the data determines the labels.
    fields = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("vocab_size", "multi_label", *SPECIAL_IDS) and not isinstance(value, tuple | dict)
    }
    return replace(config, **{name: _read(name, text, fields) for name, text in changes.items()})


def _read(name: str, text: str, fields: Mapping[str, Any]) -> Any:
    """Convert text to the type that a field has now."""
    if name not in fields:
        raise ValueError(f"unknown field {name}; the fields of this model are {', '.join(fields)}")
    kind = type(fields[name])
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(
            f"{name} must be {'true or false' if kind is bool else f'of type {kind.__name__}'}, got {text}"
        ) from None


def run_processes(runs: Sequence[tuple[int, str]], arguments: argparse.Namespace) -> None:
    """Train runs in several processes at a time, each with one thread. The output of a process is
    added to RUNS/NAME-SEED.out. Raises `ValueError` that names failed runs, after the others are
    trained.
    """
    arguments.runs.mkdir(parents=True, exist_ok=True)
    children = set[subprocess.Popen[bytes]]()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def train(planned: tuple[int, str]) -> str:
        """Return "" or the name of the run that failed."""
        seed, name = planned
        run = arguments.runs / f"{name}-{seed}"
        if (run / "scores.json").exists():
            return ""
        print(f"{name}, seed {seed}", flush=True)
        options = ["--runs", str(arguments.runs), "--precision", arguments.precision, "--only-seed", str(seed)]
        options += [] if arguments.config is None else ["--config", str(arguments.config)]
        options += ["--model", *(f"{field}={value}" for field, value in arguments.model), "--systems", name]
        command = [sys.executable, "-m", "lab.zoo", "train", str(arguments.data), *options]
        with run.with_name(f"{run.name}.out").open("a") as output:
            child = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
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


def print_plan(arguments: argparse.Namespace) -> None:
    """Print how long the runs that are not finished take in one process, by measured updates."""
    runs, data, folder = chosen_runs(arguments), arguments.data, arguments.runs
    totals = dict[str, float]()
    print("group, system: runs left, updates of a run, seconds of an update, hours")
    for name in dict.fromkeys(name for _, name in runs):
        system, plan = changed_system(name), PLAN[name]
        left = [seed for seed, run in runs if run == name and not (folder / f"{name}-{seed}" / "scores.json").exists()]
        with TemporaryDirectory() as temporary:
            corpus = corpus_folder(system.corpus, data, folder)
            trainer = make_trainer(system, make_config(system.settings), corpus, Path(temporary) / name)
            steps, seconds = trainer.measure_updates()
        updates = steps * plan.epochs
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
    return read_train_config(run / "train.json").precision


def make_trainer(system: System, config: TrainConfig, data: Path, run: Path) -> Trainer:
    """Return the trainer of a run, which is new or resumed."""
    folder = RunFolder(run)
    tokenizer = read_tokenizer(folder.tokenizer) if folder.state.exists() else None
    prepared = read_data(system, data, run, config, int(system.settings["vocab_size"]), tokenizer)
    model_config = system.make_config(prepared.tokenizer.get_vocab_size())
    kind = DiagnosedTrainer if system.has_diagnostics else Trainer
    return kind(run, config, TASKS[system.task], prepared, model_config)


def train_and_score(system: System, config: TrainConfig, data: Path, run: Path) -> None:
    """Train a run and write `scores.json` into its folder; do nothing if the file exists."""
    path = run / "scores.json"
    if path.exists():
        return
    with locked(run):
        make_trainer(system, config, data, run).fit()
    checkpoint = run / "averaged"
    if system.corpus.languages is not None:
        report = score_report(checkpoint, data, *system.corpus.languages, system.num_beams)
    elif system.corpus.chat is not None:
        report = recall_report(checkpoint, TURNS, NUM_DIALOGUES, SEED)
    else:
        records = list(open_held_out(data / "dev.jsonl", Reading(system.task)))
        report = {"split": "dev", **evaluate_model(*load_model(checkpoint), records).report(checkpoint.name)}
    write_json(path, report)


def score_report(checkpoint: Path, data: Path, source: str, target: str, num_beams: int) -> dict[str, Any]:
    """Return the scores and outputs of a checkpoint on the test split of Multi30k."""
    test_set = read_test_set(data, TEST_SPLIT, source, target)
    outputs = translate(*load_model(checkpoint), test_set.sources, num_beams, 1.0)
    facts = {"split": TEST_SPLIT, "num_beams": num_beams, "length_penalty": 1.0}
    facts["checkpoint"] = load_metadata(weights_file(checkpoint))
    return {**facts, **asdict(score(outputs, test_set, target)), "outputs": outputs}
