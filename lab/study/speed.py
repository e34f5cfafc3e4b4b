"""Measure the time of a training update, and tokens per second of served greedy decoding.

Systems take turns, so that disturbances affect all of them alike. Training continues from the state
of a system's first run, in each precision, with the same batches for all systems that share data
and settings. Runs are not modified.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.runs import SOURCE
from lab.study.served import Served, serve
from lab.zoo.data import corpus_folder, read_data
from lab.zoo.dialogues import draw_dialogues
from lab.zoo.systems import COMPARED, MULTI30K, SYSTEMS, Corpus, bundle_name
from lab.zoo.training import PRECISIONS, TASKS, changed_system
from sightline.base.bundle import MANIFEST
from sightline.base.bundle_files import read_bundle
from sightline.base.machine import usable_threads
from sightline.model.config import read_model_config
from sightline.model.data.examples import MemoryExamples
from sightline.model.data.text import read_lines
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.training.folder import read_log
from sightline.model.training.options import Precision, read_train_config
from sightline.model.training.trainer import Trainer

NAME = "speed"
CPU = torch.device("cpu")
SENTENCES = f"{TEST_SPLIT}.{SOURCE}"  # translated from its first line
DIALOGUES_SEED = 7  # of the prompts of chat systems
TEXTS_PER_ROUND = {1: 8, 32: 32}  # by the number of concurrent requests
DECODING_S = 0.3  # minimum time of each system in a round
DECODING_ROUNDS = 5  # for each training round: they are twenty times as short, so that disturbances weigh more
# Updates of each system in one round. Batches differ in length: the first 3 of Multi30k are 14 %
# shorter than the mean of all, the first 12 are 3 % shorter.
UPDATES = 12


Name = TypeVar("Name")


@dataclass(frozen=True)
class Training:
    """A run whose training continues in memory, and the batches that are timed."""

    trainer: Trainer
    batches: Sequence[Any]
    precision: Precision  # of the run itself

    def seconds_per_update(self, precision: Precision) -> float:
        self.trainer.config = self.trainer.config.model_copy(update={"precision": precision})
        started = time.perf_counter()
        for batch in self.batches:
            self.trainer.update([batch])
        return (time.perf_counter() - started) / len(self.batches)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help="folder of float32 bundles; systems without one are skipped")
    parser.add_argument(
        "runs", type=Path, help="folder of runs, NAME-1; systems without one are timed for decoding only"
    )
    parser.add_argument("data", type=Path, help="folder of the data folders that the runs were trained on")
    parser.add_argument(
        "--rounds", type=int, default=3, help=f"rounds of training; decoding has {DECODING_ROUNDS} times as many"
    )
    parser.add_argument("--threads", type=int, default=usable_threads(), help="threads of training and of each engine")


def measure(arguments: argparse.Namespace) -> Result:
    """Return a row for each system. Raises `ValueError` if a bundle is not float32, or a run cannot
    be resumed.
    """
    if min(arguments.rounds, arguments.threads) < 1:
        raise ValueError(f"--rounds and --threads must be at least 1, got {arguments.rounds} and {arguments.threads}")
    bundles = _bundles(arguments.bundles)
    rows = {name: _facts(bundle) for name, bundle in bundles.items()}
    folders = {name: arguments.runs / f"{name}-1" for name in bundles}
    runs = {name: folder for name, folder in folders.items() if (folder / "scores.json").is_file()}
    for timed in (
        _time_updates(runs, arguments.data, arguments.rounds, arguments.threads),
        _time_decoding(arguments, bundles),
    ):
        for name, fields in timed.items():
            rows[name].update(fields)
    settings = {"threads": arguments.threads, "updates_a_round": UPDATES}
    return Result(rows=[settings, *({"system": name, **fields} for name, fields in rows.items())])


def _bundles(folder: Path) -> dict[str, Path]:
    folders = {name: folder / bundle_name(name) for name in SYSTEMS}
    existing = {name: bundle for name, bundle in folders.items() if (bundle / MANIFEST).is_file()}
    if not existing:
        raise FileNotFoundError(f"{folder} has no bundle of any system: {', '.join(map(bundle_name, SYSTEMS))}")
    return existing


def _facts(bundle: Path) -> dict[str, Any]:
    manifest = read_bundle(bundle)
    if manifest.dtype != "float32":
        raise ValueError(f"{bundle} must compute in float32 to be comparable, got {manifest.dtype}")
    return {"parameters": manifest.parameters}


def _time_updates(runs: Mapping[str, Path], data: Path, rounds: int, threads: int) -> dict[str, dict[str, Any]]:
    """Return the facts of each run, and the milliseconds of an update by precision and round."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    print("training", flush=True)
    try:
        trainings = {name: _resume(run, name, data) for name, run in runs.items()}
        turns = {
            (name, precision): partial(training.seconds_per_update, precision)
            for name, training in trainings.items()
            for precision in PRECISIONS
        }
        seconds = _in_turns(turns, rounds)
    finally:
        torch.set_num_threads(before)
    return {
        name: {
            **_log(run),
            "precision": trainings[name].precision,
            "update_ms": {each: [round(1000 * duration, 2) for duration in seconds[name, each]] for each in PRECISIONS},
        }
        for name, run in runs.items()
    }


def _log(run: Path) -> dict[str, Any]:
    """Return the number of updates of a run and the minutes that they took, with validation."""
    epochs = read_log(run)
    seconds = sum(epoch["seconds"] for epoch in epochs.values())
    return {"updates": epochs[max(epochs)]["step"], "log_minutes": round(seconds / 60, 1)}


def _resume(run: Path, name: str, data: Path) -> Training:
    system, config = changed_system(name), read_train_config(run / "train.json")
    tokenizer, vocab_size = read_tokenizer(run / "tokenizer.json"), int(system.settings["vocab_size"])
    with TemporaryDirectory() as temporary:
        folder = corpus_folder(system.corpus, data, Path(temporary))
        prepared = read_data(system, folder, Path(temporary) / name, config, vocab_size, tokenizer)
        trainer = Trainer(run, config, TASKS[system.task], prepared, read_model_config(run / "config.json"), CPU)
        chosen = list(itertools.islice(trainer.batches(trainer.train_examples, epoch=1), UPDATES))
    trainer.train_examples = MemoryExamples([])  # those of all runs together would take a gigabyte
    trainer.model.train()
    trainer.progress.step += 1  # the learning rate depends on it
    return Training(trainer, chosen, config.precision)


def _time_decoding(arguments: argparse.Namespace, bundles: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return tokens per second of generating systems by number of concurrent requests and round."""
    generating = [name for name, bundle in bundles.items() if "generate" in read_bundle(bundle).tasks]
    measured: dict[str, dict[str, Any]] = {name: {"tokens_per_s": {}} for name in generating}
    with serve(arguments.bundles, arguments.threads) as served:
        for count, num_texts in TEXTS_PER_ROUND.items():
            print(f"decoding, {count} concurrent requests", flush=True)
            turns = {}
            for name in generating:
                texts = _texts(SYSTEMS[name].corpus, arguments.data, num_texts)
                turns[name] = partial(_tokens_per_s, served, bundle_name(name), texts, count)
            for name, speeds in _in_turns(turns, DECODING_ROUNDS * arguments.rounds).items():
                measured[name]["tokens_per_s"][str(count)] = [round(speed, 1) for speed in speeds]
    return measured


def _tokens_per_s(served: Served, model: str, texts: Sequence[str], count: int) -> float:
    """Send all texts repeatedly, `count` requests at a time, and return the tokens per second."""
    bodies = [{"model": model, "inputs": text, "parameters": {"split_sentences": False}} for text in texts]
    num_tokens, started = 0, time.perf_counter()
    while time.perf_counter() - started < DECODING_S:
        for start in range(0, len(bodies), count):
            responses = served.post("/v1/generate", *bodies[start : start + count])
            num_tokens += sum(len(response["outputs"][0]["tokens"]) for response in responses)
    return num_tokens / (time.perf_counter() - started)


def _texts(corpus: Corpus, data: Path, count: int) -> list[str]:
    if corpus.chat is not None:
        return [dialogue.prompt for dialogue in draw_dialogues(DIALOGUES_SEED, count, has_ghost_attention=True)]
    return read_lines(data / corpus.folder / SENTENCES)[:count]


def _in_turns(measures: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Measure in turns; return the values of every round after a warm-up round."""
    figures: dict[Name, list[float]] = {name: [] for name in measures}
    for _ in range(1 + rounds):
        for name, measure_one in measures.items():
            figures[name].append(measure_one())
    return {name: mine[1:] for name, mine in figures.items()}


REFERENCE = "transformer"  # speeds of the others are divided by its speed
# Systems of the short table: those that are compared, and the extremes.
SHOWN = (REFERENCE, *COMPARED, "hard-marginal", "linformer", "sentiment", "chat-gatt")


def training_minutes(row: Row) -> float:
    """Estimate the minutes of a whole run from its timed updates in the run's own precision."""
    return float(statistics.median(row["update_ms"][row["precision"]]) * row["updates"] / 60_000)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Divide round by round, because a disturbance affects both values of a round."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def tables(result: Result) -> Mapping[str, str]:
    """Return the tables of training and decoding, of some systems and of all."""
    settings, *rows = result.rows
    speeds = {row["system"]: row.get("tokens_per_s", {}) for row in rows}
    counts = list(dict.fromkeys(count for speed in speeds.values() for count in speed))
    reference = speeds.get(REFERENCE, {})
    head = ["system", *(f"ms per update, {each}" for each in PRECISIONS), "training, minutes"]
    head += [f"speed served, {count} at once" for count in counts]
    body = {
        row["system"]: [f"`{row['system']}`", *_training(row), *(_speed(row, reference, count) for count in counts)]
        for row in rows
    }
    short = [cells for system, cells in body.items() if system in SHOWN]
    threads = settings["threads"]
    decoded = max((len(speed) for each in speeds.values() for speed in each.values()), default=0)
    trained = max((len(row["update_ms"][each]) for row in rows if "update_ms" in row for each in PRECISIONS), default=0)
    text = (
        f"{threads} {'thread' if threads == 1 else 'threads'}; medians of rounds in which all systems take turns: "
        f"{trained} of {settings['updates_a_round']} updates, {decoded} of decoding.{_spread(rows)}"
    )
    return {"speed": f"{table(head, short)}\n\n{text}", "speed-all": table(head, list(body.values()))}


def _spread(rows: Sequence[Row]) -> str:
    """Return a sentence on the largest spread between the rounds of an update."""
    times = [row["update_ms"][each] for row in rows if "update_ms" in row for each in PRECISIONS]
    most = max((max(rounds) / min(rounds) - 1 for rounds in times), default=0)
    return f" The slowest round of updates takes up to {most:.0%} longer than the fastest." if most else ""


def _training(row: Row) -> list[str]:
    if "update_ms" not in row:
        return [""] * (len(PRECISIONS) + 1)
    times = [f"{statistics.median(row['update_ms'][each]):,.0f}" for each in PRECISIONS]
    return [*times, f"{training_minutes(row):.0f}"]


def _speed(row: Row, theirs: Mapping[str, Any], count: str) -> str:
    """Return the speed over that of the reference with its range, or else tokens per second."""
    ours = row.get("tokens_per_s", {})
    if count not in ours:
        return ""
    # Chat systems generate other texts, so that their tokens per second are not comparable.
    if row["system"] == REFERENCE or count not in theirs or SYSTEMS[row["system"]].corpus != MULTI30K:
        return f"{statistics.median(ours[count]):,.0f} tokens/s"
    each = ratios(ours[count], theirs[count])
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
