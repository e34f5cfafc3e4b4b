"""Report of a run: messages, progress, log, and its record: data, versions, commands, times and
results. Settings and the configuration of the model are in files of their own, see
`sightline.model.training.folder`.
"""

import math
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import tokenizers
import torch

import sightline
from sightline.base.options import flag_name
from sightline.model.checkpoint import replace_text
from sightline.model.config import architecture_of, read_fields, to_json
from sightline.model.training.folder import read_log
from sightline.model.training.options import goal_of
from sightline.model.training.task import Evaluation

if TYPE_CHECKING:
    from sightline.model.training.trainer import Trainer

MEASURED_STEPS = 5  # updates from which the time of the run is estimated
INTERVAL_S = 5.0  # between two lines about updates
# Fields of earlier versions, which are now in other files of the run, or among the metrics.
MOVED = ("model", "training", "config", "options", "seed", "signature")
CHECKOUT = Path(__file__).resolve().parents[2]


class Report:
    """Report of the training in this process.

    The record has one entry of `starts` for each start or resume.
    """

    def __init__(self, trainer: "Trainer", facts: Mapping[str, Any]) -> None:
        """Read the record of the run, if there is one. `facts` are fields of the record about the
        whole run, which replace earlier ones.

        Raises `ValueError` for a record that is not valid JSON.
        """
        self._folder, self._config = trainer.folder, trainer.config
        self._progress, self._device = trainer.progress, trainer.device
        # Updates of this process after the first one, which is slower, and their time with that of
        # the validations between them.
        self._measured_steps, self._measured_seconds = -1, 0.0
        self._tokens, self._seconds = 0, 0.0  # of the updates since the last line about one
        earlier = read_fields(self._folder.record) if self._folder.record.exists() else {"starts": []}
        self._record = {name: value for name, value in earlier.items() if name not in MOVED} | dict(facts)

    def line(self, text: str) -> None:
        """Write a line for the user."""
        sys.stderr.write(f"{text}\n")

    def start(self, trainer: "Trainer", steps: int, memory: float, changes: Mapping[str, Any]) -> None:
        """Write that the training starts or resumes, with `steps` an epoch and `memory` in bytes.
        `changes` are settings that the run had differently before, with both values.
        """
        progress, starts = self._progress, self._record.setdefault("starts", [])
        self.line(self._describe(trainer, steps, memory))
        facts = environment(self._device)
        start: dict[str, Any] = {"time": _now(), "command": shlex.join(sys.orig_argv)}
        start |= {"epoch": progress.epoch + 1, "step": progress.step, **facts}
        if progress.step:
            start["changes"] = {name: list(values) for name, values in changes.items()}
            self.line(f"resuming at epoch {progress.epoch + 1}, step {progress.step:,}")
            if changes:
                notes = [f"{flag_name(name)} is {now} instead of {before}" for name, (before, now) in changes.items()]
                self.line(f"note: {', '.join(notes)}")
            if others := differences(starts[-1] if starts else {}, facts):
                self.line(
                    f"note: the run continues with {', '.join(others)}; its weights will differ in their last bits "
                    "from those of a run without this change"
                )
        starts.append(start)
        self._write()

    def _describe(self, trainer: "Trainer", steps: int, memory: float) -> str:
        config = self._config
        limit = f" or {config.minutes:g} minutes" if config.minutes else ""
        length = f"{plural(config.epochs, 'epoch')} of {plural(steps, 'step')}{limit}"
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in trainer.model.parameters()]
        total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
        part = f", of which {trained:,} are trained" if trained < total else ""
        return (
            f"training {trainer.task.name} on {len(trainer.train_examples):,} examples, with "
            f"{len(trainer.dev_examples):,} for validation: {architecture_of(trainer.model_config)} model with "
            f"{total:,} parameters{part}; at most {length}; {config.precision} on {self._device.type}, threads: "
            f"{torch.get_num_threads()}; about {memory / 1e6:,.0f} MB of memory"
        )

    def already_finished(self, reason: str) -> None:
        """Write that the run had finished before."""
        self.line(
            f"{self._folder} has already finished: {reason}; to train longer, increase --epochs, --patience-epochs, "
            "--minutes"
        )
        self._write()

    def step(self, num_steps: int, tokens: int, rate: float, seconds: float) -> None:
        """Count an update of an epoch of `num_steps`, and write a line every few seconds. `tokens`
        are those without padding.
        """
        config, progress = self._config, self._progress
        self._measured_steps += 1
        if self._measured_steps > 0:
            self._measured_seconds += seconds
        done = math.ceil(progress.batch / config.accumulate)
        steps = num_steps * (config.epochs - progress.epoch) - done
        limit = 60 * config.minutes - progress.seconds if config.minutes else math.inf
        mean = self._measured_seconds / max(1, self._measured_steps)
        left = max(0.0, min(steps * mean, limit)) if self._measured_steps >= MEASURED_STEPS else None
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        if self._seconds >= INTERVAL_S:
            speed = f"{self._tokens / self._seconds:,.0f} tokens/s"
            self.line(
                f"epoch {progress.epoch + 1} of {config.epochs}, step {progress.step:,}: loss "
                f"{progress.train_loss:.3f}, rate {rate:.1e}, {speed}"
                f"{'' if left is None else f', {duration(left)} left'}"
            )
            self._tokens, self._seconds = 0, 0.0
        if self._measured_steps == MEASURED_STEPS and left is not None:
            self.line(f"expected: {duration(left)} for at most {plural(steps, 'more step')} of {mean:.2g} s")

    def epoch(self, loss: float | None, evaluation: Evaluation | None, seconds: float, is_whole: bool) -> None:
        """Write the log line of an epoch with its validation. `seconds` is the time since its last
        update.
        """
        if self._measured_steps > 0:
            self._measured_seconds += seconds
        progress, metric, epoch = self._progress, self._config.metric, self._progress.epoch + 1
        row: dict[str, Any] = {"epoch": epoch, "step": progress.step, "train_loss": round(progress.train_loss, 4)}
        texts = [f"train loss {progress.train_loss:.4f}"]
        best = " (best)" if progress.best_epoch == epoch else ""
        if loss is not None:
            row["validation_loss"] = round(loss, 4)
            texts.append(f"dev loss {loss:.4f}{best if metric == 'loss' else ''}")
        row["seconds"] = round(progress.epoch_seconds, 1)
        if evaluation is not None and evaluation.metrics:
            # Metrics of test are those of earlier weights.
            self._record["metrics"] = {"dev": dict(evaluation.to_record(f"epoch {epoch}"))}
            row["metrics"] = {name: round(value, 4) for name, value in evaluation.metrics.items()}
            texts += [
                f"{name} {value:.2f}{best if name == evaluation.name_of(metric) else ''}"
                for name, value in evaluation.metrics.items()
            ]
        if not is_whole:
            row["is_whole"] = False
        self._folder.add_to_log(row)
        name = f"epoch {epoch} of {self._config.epochs}{'' if is_whole else ', not finished'}"
        self.line(f"{name}: {', '.join(texts)}; {duration(progress.epoch_seconds)}")
        for sample in evaluation.samples if evaluation is not None else ():
            self.line(f"  {sample}")

    def end(self, reason: str, checkpoints: Sequence[Path]) -> None:
        """Write why the training ended. `checkpoints` are the folders of the finished ones; empty
        if the run is interrupted.
        """
        config, progress = self._config, self._progress
        result: dict[str, Any] = {"epoch": progress.epoch, "step": progress.step}
        result["minutes"] = round(progress.seconds / 60, 2)
        if progress.best_epoch:
            result |= {"best_epoch": progress.best_epoch, "best_validation_loss": round(progress.best_loss, 4)}
        rows = read_log(self._folder.path) if self._folder.log.exists() else {}
        result["last_epoch"] = rows[max(rows)] if rows else None
        self._record["starts"][-1] |= {"end_time": _now(), "end": reason}
        self._record["result"] = result
        self._write()
        if checkpoints:
            goal, is_improving = goal_of(config.metric), bool(rows) and max(rows) == progress.best_epoch > 1
            longer = f", but the {goal} was still improving: train longer" if is_improving else ""
            best = f"{progress.best_loss:.4f}" if config.metric == "loss" else f"{progress.best_metric:.2f}"
            if progress.step < config.warmup_steps:
                self.line(
                    f"warning: the training ended after {progress.step:,} updates, before the end of the warm-up of "
                    f"{config.warmup_steps:,}, and has learned little; allow more epochs or minutes, or fewer "
                    "--warmup-steps"
                )
            self.line(
                f"finished: {reason}{longer}; best {goal} {best} in epoch {progress.best_epoch}; checkpoints: "
                f"{' and '.join(map(str, checkpoints))}"
            )

    def _write(self) -> None:
        replace_text(self._folder.record, to_json(self._record))


def environment(device: torch.device) -> dict[str, Any]:
    """Return the facts on which the bits of the weights depend, and the commit of the code."""
    return {
        "versions": {
            "python": sys.version.split()[0],
            **{package.__name__: str(package.__version__) for package in (sightline, torch, tokenizers, numpy)},
        },
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "commit": _commit(),
    }


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return descriptions of the differences between two environments that change the bits."""
    before, after = (
        {"threads": one.get("threads"), "device": one.get("device"), "PyTorch": one.get("versions", {}).get("torch")}
        for one in (earlier, now)
    )
    return [
        f"{name} {after[name]} instead of {value}" for name, value in before.items() if value not in (None, after[name])
    ]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _commit() -> str | None:
    """Return the commit of the code, `-dirty` if files are changed; None without a checkout."""
    git = shutil.which("git")
    if git is None or not (CHECKOUT / ".git").exists():
        return None
    describe = [git, "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    response = subprocess.run(describe, capture_output=True, text=True, check=False)  # noqa: S603 - constant arguments
    return response.stdout.strip() or None


def duration(seconds: float) -> str:
    """Write a duration for a reader: `40 s`, `12 min` or `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def peak_memory(device: torch.device) -> float:
    """Return the largest memory of the process so far, in bytes; on a GPU, of its tensors."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
