"""Report of a run: messages, progress, log and record."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sightline.model.config import ArchitectureConfig, architecture_of
from sightline.model.training.display import (
    MEASURED_STEPS,
    Display,
    Estimate,
    UpdateFacts,
    duration,
    megabytes,
    minutes,
    peak_memory,
    plural,
)
from sightline.model.training.folder import RunFolder, read_log
from sightline.model.training.run_record import TrainingRecord, differences, environment
from sightline.model.training.state import Progress
from sightline.model.training.task import Evaluation
from sightline.model.training.train_config import TrainConfig, goal_of

BYTES_PER_PARAMETER = 4
BYTES_PER_TRAINED = 12  # more: gradient and two moments of Adam


@dataclass(frozen=True)
class RunFacts:
    """Task, model and data of a run."""

    task: str
    model: ArchitectureConfig
    parameters: int
    trained: int  # parameters that change
    examples: Mapping[str, int]  # by split
    steps: int  # updates of an epoch
    data_digest: str
    details: Mapping[str, Any]  # more fields of the record


class Report:
    """Report of the training in this process."""

    def __init__(self, folder: RunFolder, config: TrainConfig, device: torch.device, flags: Mapping[str, str]) -> None:
        """Read the record of the run, if there is one. Messages name settings by `flags`.

        Raises `ValueError` for a record that is not valid JSON.
        """
        self._folder, self._config, self._device = folder, config, device
        self._flags = flags
        self.display = Display(config.max_epochs)
        self._estimate, self._record = Estimate(), TrainingRecord(folder.record)
        self._metrics: Mapping[str, Any] = {}  # of the last evaluation, as fields of the record
        self._superlative = "lowest" if config.metric == "loss" else "highest"

    def start(self, facts: RunFacts, progress: Progress, changes: Mapping[str, Any]) -> None:
        """Write that the training starts or resumes. `changes` are settings that the earlier part
        of the run had differently, with both values.
        """
        self.display.line(self._describe(facts, progress))
        now, earlier = environment(self._device), self._record.last_start
        start: dict[str, Any] = {"epoch": progress.epoch + 1, "step": progress.step, **now}
        if progress.step:
            start["changes"] = {name: list(values) for name, values in changes.items()}
            texts = [
                f"{self._flags.get(name, name)} is {after} instead of {before}"
                for name, (before, after) in changes.items()
            ]
            self.display.line(f"resuming at epoch {progress.epoch + 1}, step {progress.step:,}")
            if texts:
                self.display.line(f"note: {', '.join(texts)}")
            if others := differences(earlier or {}, now):
                self.display.line(
                    f"note: the run continues with {', '.join(others)}; its weights will differ in their last bits "
                    "from those of a run without this change"
                )
        fields = {"task": facts.task, "examples": facts.examples, "data_digest": facts.data_digest, **facts.details}
        self._record.start(fields, start)

    def _describe(self, facts: RunFacts, progress: Progress) -> str:
        config = self._config
        limit = f" or {config.max_minutes:g} minutes" if config.max_minutes else ""
        length = f"{plural(config.max_epochs, 'epoch')} of {plural(facts.steps, 'step')}{limit}"
        has_estimate = facts.steps * config.max_epochs - progress.step > MEASURED_STEPS
        parameters = f"{facts.parameters:,} parameters"
        if facts.trained < facts.parameters:
            parameters += f", of which {facts.trained:,} are trained"
        num_bytes = facts.parameters * BYTES_PER_PARAMETER + facts.trained * BYTES_PER_TRAINED
        later = f"; the minutes expected follow after {MEASURED_STEPS + 1} steps" if has_estimate else ""
        return (
            f"training {facts.task} on {facts.examples['train']:,} examples, with {facts.examples['dev']:,} for "
            f"validation: {architecture_of(facts.model)} model with {parameters}; at most {length}; "
            f"{config.precision} on {self._device.type}, threads: {torch.get_num_threads()}; weights and "
            f"optimizer take {megabytes(num_bytes)}{later}"
        )

    def already_finished(self, reason: str) -> None:
        """Write that the run had finished before."""
        limits = (self._flags.get(name, name) for name in ("max_epochs", "patience_epochs", "max_minutes"))
        self.display.line(
            f"{self._folder} has already finished: {reason}; to train longer, increase {', '.join(limits)}"
        )

    def step(self, progress: Progress, num_steps: int, tokens: int, rate: float, seconds: float) -> None:
        """Show an update of an epoch of `num_steps`. Tokens are counted without padding."""
        config, estimate, epoch = self._config, self._estimate, progress.epoch + 1
        estimate.add(seconds)
        done = math.ceil(progress.batch / config.accumulate)
        steps = num_steps * (config.max_epochs - progress.epoch) - done
        limit = 60 * config.max_minutes - progress.seconds if config.max_minutes else None
        validations = math.ceil((config.max_epochs - progress.epoch) / config.evaluate_epochs)
        left = estimate.seconds_left(steps, validations, limit)
        self.display.update(UpdateFacts(epoch, progress.step, progress.train_loss, rate, tokens, left))
        if estimate.is_first and left is not None and estimate.step_seconds is not None:
            # Before the first validation, its time is not known.
            joint = "and" if estimate.validation_seconds else "plus the time of"
            self.display.line(
                f"expected: {minutes(left)} for at most {plural(steps, 'more step')} of {estimate.step_seconds:.2g} s, "
                f"{joint} {plural(validations, 'validation')}; {megabytes(peak_memory(self._device))} of memory are in "
                "use"
            )

    def epoch(
        self,
        epoch: int,
        progress: Progress,
        validation_loss: float | None,
        evaluation: Evaluation | None,
        validation_seconds: float,
        is_whole: bool,
    ) -> None:
        """Write the log line of an epoch."""
        if validation_loss is not None:
            self._estimate.validation_seconds = validation_seconds
        row: dict[str, Any] = {"epoch": epoch, "step": progress.step, "train_loss": round(progress.train_loss, 4)}
        texts = [f"train loss {progress.train_loss:.4f}"]
        best = f" ({self._superlative})" if progress.best_epoch == epoch else ""
        if validation_loss is not None:
            row["validation_loss"] = round(validation_loss, 4)
            texts.append(f"dev loss {validation_loss:.4f}{best if self._config.metric == 'loss' else ''}")
        row["seconds"] = round(progress.epoch_seconds, 1)
        metrics = evaluation.metrics if evaluation is not None else {}
        if evaluation is not None and metrics:
            self._metrics = evaluation.to_record(f"epoch {epoch}")
            row["metrics"] = {name: round(value, 4) for name, value in metrics.items()}
            texts += [
                f"{name} {value:.2f}{best if name == evaluation.name_of(self._config.metric) else ''}"
                for name, value in metrics.items()
            ]
        if not is_whole:
            row["is_whole"] = False
        self._folder.add_to_log(row)
        name = f"epoch {epoch} of {self._config.max_epochs}{'' if is_whole else ', not finished'}"
        self.display.line(f"{name}: {', '.join(texts)}; {duration(progress.epoch_seconds)}")
        for sample in evaluation.samples if evaluation is not None else ():
            self.display.line(f"  {sample}")

    def end(self, reason: str, progress: Progress, checkpoints: Sequence[Path]) -> None:
        """Write why the training ended. `checkpoints` are the folders of the finished ones; empty
        if the run is interrupted.
        """
        result: dict[str, Any] = {"epoch": progress.epoch, "step": progress.step}
        result["minutes"] = round(progress.seconds / 60, 2)
        if progress.best_epoch:
            result |= {"best_epoch": progress.best_epoch, "best_validation_loss": round(progress.best_loss, 4)}
        rows = read_log(self._folder.path) if self._folder.log.exists() else {}
        result["last_epoch"] = rows[max(rows)] if rows else None
        self._record.end(reason, result, self._metrics)
        if checkpoints:
            is_falling = bool(rows) and max(rows) == progress.best_epoch > 1
            goal, is_loss = goal_of(self._config.metric), self._config.metric == "loss"
            change = "decreasing" if is_loss else "increasing"
            falling = f", but the {goal} was still {change}: train longer" if is_falling else ""
            best = f"{progress.best_loss:.4f}" if is_loss else f"{progress.best_metric:.2f}"
            if progress.step < self._config.warmup_steps:
                self.display.line(
                    f"warning: the training ended after {progress.step:,} updates, before the end of the warm-up of "
                    f"{self._config.warmup_steps:,}, and has learned little; allow more epochs or minutes, or fewer "
                    "--warmup-steps"
                )
            self.display.line(
                f"finished: {reason}{falling}; {self._superlative} {goal} {best} in epoch "
                f"{progress.best_epoch}; checkpoints: {' and '.join(map(str, checkpoints))}"
            )
