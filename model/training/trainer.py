"""Training loop with checkpoints; an interrupted run resumes to the same result.

`sightline.model.training.folder` describes the folder of a run. The command that trains has locked
it, so that no other process changes it.

The order of the batches and the random numbers of an epoch depend only on the seed and the epoch. A
checkpoint within an epoch has the position in this order and the state of the random numbers, so
that a resumed run gives the same weights, bit for bit, on the same number of threads.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sightline.base.errors import Interrupted, UsageError
from sightline.model.architectures.factory import build_model
from sightline.model.architectures.pretrained import PretrainedModel
from sightline.model.checkpoint import load_metadata, one_line, replace_text
from sightline.model.config import ArchitectureConfig, model_config_to_json, read_model_config, to_json
from sightline.model.data.batches import bucket
from sightline.model.data.examples import Examples, TrainingData
from sightline.model.data.tokenizer_training import check_tokenizer
from sightline.model.precision import autocast, default_device
from sightline.model.training.folder import (
    Progress,
    RandomState,
    RunFolder,
    load_state,
    random_state,
    save_state,
    set_random_state,
)
from sightline.model.training.interrupts import Interrupts
from sightline.model.training.options import TrainConfig, changed_options, goal_of, read_train_config
from sightline.model.training.run_report import Report, peak_memory, plural
from sightline.model.training.task import Evaluation, Task

SAVED_BEFORE_VALIDATION_S = 60.0  # age of the last state from which it is saved again before a validation
PAIRS_PER_TOKEN = 512  # of tokens in the attention, which take about as much memory as one token elsewhere


def inverse_sqrt_rate(step: int, peak: float, warmup_steps: int) -> float:
    """Return the learning rate of a step, counting from 1 (Vaswani et al. 2017, equation 3).

    The rate grows linearly to the peak during the warm-up, then decreases with 1 / sqrt(step).
    """
    return peak * min(step / warmup_steps, math.sqrt(warmup_steps / step))


class Trainer:
    """Training run with its folder, task, data, model and optimizer."""

    def __init__(
        self,
        run: Path,
        config: TrainConfig,
        task: Task[Any, Any],
        data: TrainingData,
        model_config: ArchitectureConfig,
        device: torch.device | None = None,
        *,
        initialise: Callable[[nn.Module], None] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a run in an empty or missing folder, or resume the run in the folder.

        Args:
            device: device of the model; by default CUDA if available, else the CPU.
            initialise: replaces the random weights of a new run, for example by those of another
                run; by default, that of the task.
            details: more facts about the run for its record, which JSON can represent.

        Raises:
            OSError: the folder cannot be created or written.
            UsageError: the run in the folder has other settings, another model or other data.
            ValueError: the state of the run in the folder is damaged, or the tokenizer does not fit
                the model.
        """
        self.folder, self.config, self.task, self.model_config = RunFolder(run), config, task, model_config
        self.tokenizer, self._digest, self._records = data.tokenizer, data.digest, data.dev_records
        self.train_examples, self.dev_examples = data.train, data.dev
        self.device = device or default_device()
        self.progress = Progress()
        self._random_state: RandomState | None = None  # of the last checkpoint, if that is within an epoch
        self._interrupts = Interrupts()
        self._saved = self._counted = time.monotonic()
        if config.threads:
            torch.set_num_threads(config.threads)
        # Write nothing before everything is read and checked, so that invalid data leaves no
        # files.
        is_resumed = self.folder.state.exists()
        if is_resumed:
            self.folder.check_changes(changed_options(read_train_config(self.folder.settings), config))
            if read_model_config(self.folder.config) != model_config:
                raise self.folder.rejected("of another model")
        elif self.folder.log.exists():
            raise self.folder.rejected("without state.safetensors that cannot be resumed")
        check_tokenizer(self.tokenizer, model_config)
        self._check_loss("train", data.train, epoch=1)
        self._check_loss("dev", data.dev, epoch=0)
        torch.manual_seed(config.seed)
        self.model: Any = build_model(model_config)
        if not is_resumed:
            if initialise is not None:
                initialise(self.model)
            elif task.initialise is not None:
                task.initialise(self.model, data.train)
        if config.lora:
            assert isinstance(self.model, PretrainedModel), "the command has checked it"
            self.model.add_adapters(config.lora)
        self.model.to(self.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.0, betas=(0.9, 0.98), eps=1e-8, fused=True)
        if is_resumed:
            self._load_state()
        examples = {"train": len(data.train), "dev": len(data.dev)}
        facts: dict[str, Any] = {"task": task.name, "examples": examples, "data_digest": data.digest, **(details or {})}
        self._report = Report(self, facts)
        if not is_resumed:
            self._create_run()

    def _create_run(self) -> None:
        self.folder.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.folder.settings, to_json(self.config.model_dump()))
        replace_text(self.folder.tokenizer, self.tokenizer.to_str(pretty=True))
        replace_text(self.folder.config, model_config_to_json(self.model_config))
        self.observe(epoch=0)
        self._save_state()

    def observe(self, epoch: int) -> None:
        """Do nothing at epoch 0, before the training, and after each epoch; a subclass records."""

    def _check_loss(self, split: str, examples: Examples, epoch: int) -> None:
        """Check that some batch has something to predict; otherwise the loss is 0 in each epoch."""
        if not any(self.task.count(batch, self.model_config.pad_id) for batch in self.batches(examples, epoch)):
            raise UsageError(
                f"{split} has no loss: a text needs at least one token to predict, and a pair of an encoder needs "
                f"another pair with other texts, or another score, in its batch; add examples of {split}, or increase "
                "--batch-tokens"
            )

    def _load_state(self) -> None:
        path = self.folder.state
        try:
            digest = load_metadata(path).get("data", self._digest)
            self.progress, self._random_state = load_state(path, self.model, self.optimizer)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be resumed ({one_line(error)}); choose another folder") from error
        if digest != self._digest:
            raise self.folder.rejected("with other data")

    def _save_state(self) -> None:
        # Between two epochs, the seed determines the random state.
        self._random_state = random_state(self.device) if self.progress.batch else None
        save_state(self.folder.state, self.model, self.optimizer, self.progress, self._digest, self._random_state)
        self._saved = time.monotonic()

    def _seed(self, epoch: int) -> int:
        return self.config.seed * 1_000_003 + epoch

    def _buckets(self, examples: Examples, epoch: int) -> list[NDArray[np.int64]]:
        return bucket(self.task.sizes(examples.lengths), self.config.batch_tokens, self._seed(epoch))

    def make_batch(self, examples: Examples, indices: NDArray[np.int64]) -> Any:
        return self.task.make_batch([examples[int(index)] for index in indices], self.model_config)

    def batches(self, examples: Examples, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch on the CPU; epoch 0 is the order of the validation."""
        for indices in self._buckets(examples, epoch):
            yield self.make_batch(examples, indices)

    def train_epoch(self) -> bool:
        """Train on the examples of an epoch that were not used yet. Returns False if `minutes`
        ended it before its end. Raises `Interrupted` if a signal arrived, and `ValueError` if the
        loss or its gradient is not finite.
        """
        progress, epoch, examples = self.progress, self.progress.epoch + 1, self.train_examples
        buckets, per_update = self._buckets(examples, epoch), self.config.accumulate
        num_steps = math.ceil(len(buckets) / per_update)
        if not progress.batch:
            torch.manual_seed(self._seed(epoch))
        sizes = self.task.sizes(examples.lengths)
        self.model.train()
        for start in range(progress.batch, len(buckets), per_update):
            group = buckets[start : start + per_update]
            progress.step += 1
            batches = [self.make_batch(examples, indices).to(self.device) for indices in group]
            loss, count = self.update(batches)
            progress.loss_sum, progress.loss_count = progress.loss_sum + loss, progress.loss_count + count
            progress.batch = start + len(group)
            tokens, rate = sum(int(sizes[indices].sum()) for indices in group), self.optimizer.param_groups[0]["lr"]
            self._report.step(num_steps, tokens, rate, self._add_time())
            if not self._may_continue():
                return False
        return True

    def update(self, batches: Sequence[Any]) -> tuple[float, int]:
        """Make an update with batches on the device; return the training loss, summed over all
        batches, in nats, and its number of terms.
        """
        rate = inverse_sqrt_rate(self.progress.step, self.config.learning_rate, self.config.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total, count = self._compute_gradients(batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        # Before the update, so that a checkpoint never has weights that are not finite.
        self._check_finite("training loss", total)
        self._check_finite("norm of the gradient", norm.item())
        self.optimizer.step()
        return total, count

    def _compute_gradients(self, batches: Sequence[Any]) -> tuple[float, int]:
        """Compute the gradients of batches; return the sum of the loss, and its number of terms."""
        count = sum(self.task.count(batch, self.model_config.pad_id) for batch in batches)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            with autocast(self.device, self.config.precision):
                loss = self.task.training_loss(self.model, batch, self.config.label_smoothing)
            (loss / max(count, 1)).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total, count

    def needed_memory(self) -> float:
        """Return the most memory that the process needs for an update, in bytes. It computes the
        gradients of the largest batch beside tensors as large as the moments of the optimizer.
        """
        sizes, trained = self.task.sizes(self.train_examples.lengths), self.optimizer.param_groups[0]["params"]

        def extent(indices: NDArray[np.int64]) -> int:
            longest = int(sizes[indices].max())
            return len(indices) * longest * (PAIRS_PER_TOKEN + longest)

        largest = max(self._buckets(self.train_examples, 1), key=extent)
        moments = [] if self.optimizer.state else [torch.ones_like(weight) for weight in trained for _ in range(2)]
        self._compute_gradients([self.make_batch(self.train_examples, largest).to(self.device)])
        del moments
        return peak_memory(self.device)

    def measure_updates(self, count: int = 6, clock: Callable[[], float] = time.process_time) -> tuple[int, float]:
        """Measure updates with batches of all sizes of the first epoch, after one that is not
        measured. Returns the number of updates of an epoch, and the mean time of an update of one
        batch in seconds.

        Weights, random numbers and progress change, so that this trainer cannot train afterwards.
        `clock` returns seconds, by default those of the process.
        """
        buckets = sorted(self._buckets(self.train_examples, 1), key=len)
        chosen = [buckets[round(index)] for index in np.linspace(0, len(buckets) - 1, 2 * count + 1)[1::2]]
        batches = [self.make_batch(self.train_examples, indices).to(self.device) for indices in chosen]
        self.model.train()
        self.progress.step = 1
        self.update(batches[:1])
        started = clock()
        for batch in batches:
            self.update([batch])
        return math.ceil(len(buckets) / self.config.accumulate), (clock() - started) / len(batches)

    def _may_continue(self) -> bool:
        """Save a checkpoint within the epoch if it is time; return False if the run has used its
        time. Raises `Interrupted` if a signal arrived.
        """
        if self._interrupts.received:
            raise Interrupted(self._interrupts.received)
        if self._is_out_of_time():
            return False
        steps, minutes = self.config.checkpoint_steps, self.config.checkpoint_minutes
        is_due = steps and self.progress.step % steps == 0
        if is_due or 0 < 60 * minutes <= time.monotonic() - self._saved:
            self._save_state()
        return True

    def _is_out_of_time(self) -> bool:
        return 0 < 60 * self.config.minutes <= self.progress.seconds

    def _add_time(self) -> float:
        """Add the time since the last call to the time of the run, and return it in seconds."""
        now = time.monotonic()
        seconds, self._counted = now - self._counted, now
        self.progress.seconds += seconds
        self.progress.epoch_seconds += seconds
        return seconds

    @torch.inference_mode()
    def validate(self) -> float:
        """Compute the mean loss on the development examples without label smoothing, in nats.
        Raises `ValueError` if it is not finite.
        """
        self.model.eval()
        total, count = 0.0, 0
        for batch in self.batches(self.dev_examples, epoch=0):
            total += self.task.validation_loss(self.model, batch.to(self.device)).item()
            count += self.task.count(batch, self.model_config.pad_id)
        self._check_finite("validation loss", total)
        return total / max(count, 1)

    @torch.inference_mode()
    def evaluate(self) -> Evaluation | None:
        """Compute the metrics of the task on records of the development set, if it has both."""
        if self.task.evaluate is None or not len(self._records):
            return None
        self.model.eval()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return self.task.evaluate(self.model, self.tokenizer, self._records)

    def _check_finite(self, name: str, value: float) -> None:
        """Raise ValueError for a value that is not finite, before the weights are written."""
        if not math.isfinite(value):
            raise ValueError(
                f"the {name} is {value} after update {self.progress.step}: the training diverged; start again in "
                "another folder with a lower --learning-rate or --clip-norm, or with more --warmup-steps"
            )

    def fit(self) -> None:
        """Train until `epochs`, `minutes`, or `patience_epochs` epochs without a better `metric`.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived; the state is saved.
            UsageError: the run is longer than `epochs` already, and has no validated checkpoint.
            ValueError: the training diverged.
        """
        progress = self.progress
        changes = changed_options(read_train_config(self.folder.settings), self.config)
        # Record the actual length of the run, which may differ from that at its start.
        record = self.config.model_copy(update={"epochs": max(self.config.epochs, progress.epoch)})
        replace_text(self.folder.settings, to_json(record.model_dump()))
        if not self._is_finished():
            batches = len(self._buckets(self.train_examples, progress.epoch + 1))
            steps = math.ceil(batches / self.config.accumulate)
            self._report.start(self, steps, self.needed_memory(), changes)
            self._train()
        elif progress.best_epoch:
            self._report.already_finished(self._reason_to_stop())
        else:
            raise UsageError(
                f"{self.folder} has no validated checkpoint to end with after {plural(progress.epoch, 'epoch')}; set "
                f"--epochs to at least {progress.epoch + 1}, or allow more --minutes"
            )

    def _train(self) -> None:
        """Train, or save the state if a signal arrives, and report the end."""
        progress = self.progress
        self._saved = self._counted = time.monotonic()
        if self._random_state is not None:
            set_random_state(self._random_state, self.device)
        try:
            with Interrupts() as self._interrupts:
                while not self._reason_to_stop():
                    if self.train_epoch():
                        self._finish_epoch(is_whole=True)
                if not self._is_finished():
                    self._finish_epoch(is_whole=False)
        except Interrupted as interrupted:
            self._save_state()
            self._report.end("interrupted", ())
            where = f"epoch {progress.epoch + 1}, step {progress.step:,}"
            raise Interrupted(
                interrupted.signal_number,
                f"interrupted; the run is saved at {where}; run the same command again to resume it",
            ) from None
        checkpoints = [folder for folder in (self.folder.averaged, self.folder.best) if folder.exists()]
        self._report.end(self._reason_to_stop(), checkpoints)

    def _is_finished(self) -> bool:
        """Return True if there is a reason to stop and the last updates are validated."""
        progress = self.progress
        is_validated = not progress.batch or progress.validated_step == progress.step
        return is_validated and bool(self._reason_to_stop())

    def _reason_to_stop(self) -> str:
        config, progress = self.config, self.progress
        if progress.epoch >= config.epochs:
            return f"{plural(progress.epoch, 'epoch')} done"
        waited = progress.epoch - progress.best_epoch
        if progress.validated_step == progress.step and waited >= config.patience_epochs:
            return f"the {goal_of(config.metric)} has not improved for {plural(waited, 'epoch')}"
        return f"{config.minutes:g} minutes used" if self._is_out_of_time() else ""

    def _finish_epoch(self, is_whole: bool) -> None:
        """Validate, and write the checkpoints and the log line of an epoch, which is not whole if
        the run ends within it; a resumed run can then continue it.

        The state is written last, so that an interruption in between repeats a part of the epoch.
        """
        progress, epoch = self.progress, self.progress.epoch + 1
        self.optimizer.zero_grad(set_to_none=True)  # a validation needs no gradients
        loss, evaluation = None, None
        is_last = not is_whole or epoch == self.config.epochs or self._is_out_of_time()
        if is_last or epoch % self.config.evaluate_epochs == 0:
            is_due = self.config.checkpoint_minutes > 0 and time.monotonic() - self._saved > SAVED_BEFORE_VALIDATION_S
            if is_due:  # the validation and the metrics can take minutes
                self._save_state()
            with self._interrupts.at_once():
                loss, evaluation = self.validate(), self.evaluate()
            progress.validated_step = progress.step
        self.observe(epoch)
        is_best, metric = loss is not None and loss < progress.best_loss, progress.best_metric
        if evaluation is not None and self.config.metric != "loss":
            metric = evaluation.metrics.get(evaluation.name_of(self.config.metric), 0.0)
            is_best = metric > progress.best_metric
        facts = {"epoch": epoch} if loss is None else {"epoch": epoch, "validation_loss": loss}
        kept = self.config.average_last
        # A run that ends early averages the same share of its epochs.
        averaged = min(kept, math.ceil(kept * epoch / self.config.epochs))
        if not is_best and (self.config.metric != "loss" or isinstance(self.model, PretrainedModel)):
            averaged = 0  # the averaged weights end with the best epoch
        weights = self.model.merged_weights() if self.config.lora else self.model.state_dict()
        self.folder.write_epoch(self.model_config, weights, facts, kept=kept, averaged=averaged, is_best=is_best)
        if loss is not None and is_best:
            progress.best_loss, progress.best_metric, progress.best_epoch = loss, metric, epoch
        self._report.epoch(loss, evaluation, self._add_time(), is_whole)
        if is_whole:
            progress.finish_epoch()
        self._save_state()
