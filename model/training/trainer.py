"""Training loop with a checkpoint after every epoch; an interrupted run resumes to the same result.

A run is a folder:

    train.json                    settings of the training
    config.json, tokenizer.json   configuration and tokenizer of the model
    state.safetensors             weights, optimizer and counters after the last epoch
    epochs/0001.safetensors ...   weights of the last epochs, for averaging
    best/                         checkpoint with the lowest validation loss
    averaged/                     checkpoint with the mean weights of the last epochs
    log.jsonl                     one line per epoch, two for a repeated epoch

Only one process can use the folder at a time: it holds a lock while it creates or resumes the run
and while it trains.
"""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from model.architectures.factory import build_model
from model.checkpoint import (
    average,
    load_metadata,
    load_tensors,
    one_line,
    replace_text,
    save_checkpoint,
    save_tensors,
)
from model.config import ModelConfig, model_config_to_json, read_model_config
from model.data.tokenizer import check_tokenizer, read_tokenizer, train_tokenizer
from model.errors import UsageError
from model.precision import autocast
from model.training.config import TrainConfig, read_train_config, train_config_to_json
from model.training.task import Task


@dataclass
class Progress:
    """Progress of a run: everything that a resumed run needs besides tensors."""

    epoch: int = 0  # epochs finished
    step: int = 0  # updates made
    best_loss: float = float("inf")  # validation loss in nats, averaged over `Task.count`
    best_epoch: int = 0


def inverse_sqrt_rate(step: int, peak: float, warmup_steps: int) -> float:
    """Return the learning rate of a step (Vaswani et al. 2017, equation 3).

    The rate grows linearly to the peak during the warm-up, then decreases with 1 / sqrt(step).

    Args:
        step: number of the update, counting from 1.
        peak: the largest learning rate.
        warmup_steps: number of updates of the warm-up.
    """
    return peak * min(step / warmup_steps, math.sqrt(warmup_steps / step))


def read_log(run: Path) -> dict[int, dict[str, Any]]:
    """Read the log of a run as rows by epoch; the last row of a repeated epoch counts."""
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["epoch"]: row for row in map(json.loads, lines)}


class Trainer:
    """Training run with its folder, task, data, model and optimizer."""

    def __init__(
        self,
        run: Path,
        config: TrainConfig,
        task: Task[Any, Any, Any],
        data: Path,
        make_model: Callable[[int], ModelConfig],
        device: torch.device | None = None,
    ) -> None:
        """Create a run in an empty or missing folder, or resume the run in the folder.

        Args:
            run: folder of the run.
            config: settings of the training.
            task: translation, classification or chat.
            data: folder of the training and validation data.
            make_model: maps the vocabulary size to a model configuration.
            device: device of the model; by default CUDA if available, else the CPU.

        Raises:
            FileNotFoundError: a data file is missing.
            OSError: the folder cannot be created or written.
            ValueError: another process uses the folder; the run in it has other settings, another
                model or other data, or its state is missing or damaged; or the data is not valid.
        """
        self.run, self.config, self.task = run, config, task
        self._state_path, self._settings_path = run / "state.safetensors", run / "train.json"
        self._config_path, self._tokenizer_path = run / "config.json", run / "tokenizer.json"
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with self._locked():
            # Write nothing before everything is read and checked, so that invalid data leaves no
            # files.
            is_resumed = self._state_path.exists()
            if is_resumed:
                self._check_settings()
            elif (run / "log.jsonl").exists():
                raise ValueError(
                    f"{run} contains a run without state.safetensors that cannot be resumed; choose another folder"
                )
            self.tokenizer = read_tokenizer(self._tokenizer_path) if is_resumed else self._train_tokenizer(data)
            self.model_config = make_model(self.tokenizer.get_vocab_size())
            if is_resumed and read_model_config(self._config_path) != self.model_config:
                raise ValueError(f"{self.run} contains a run of another model; choose another folder")
            check_tokenizer(self.tokenizer, self.model_config)
            self.train_examples = self._read_examples(data, "train")
            self.validation_examples = self._read_examples(data, task.validation_split)
            examples = repr((self.train_examples, self.validation_examples))
            self._data_digest = hashlib.sha256(examples.encode()).hexdigest()
            torch.manual_seed(config.seed)
            self.model = build_model(self.model_config).to(self.device)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-8, fused=True)
            self.progress = Progress()
            if is_resumed:
                self._load_state()
            else:
                self._create_run()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Create the folder if necessary and lock it; remove a new folder that stays empty.

        The operating system releases the lock when the process ends.
        """
        if self.run.exists() and not self.run.is_dir():
            raise UsageError(f"{self.run} is a file; choose a folder for the run")
        is_new = not self.run.exists()
        self.run.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.run, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is using {self.run}; wait until it ends, or choose another folder"
                ) from None
            yield
        finally:
            if is_new:
                with suppress(OSError):  # the folder is not empty
                    self.run.rmdir()
            os.close(folder)

    def _create_run(self) -> None:
        replace_text(self._settings_path, train_config_to_json(self.config))
        replace_text(self._tokenizer_path, self.tokenizer.to_str(pretty=True))
        replace_text(self._config_path, model_config_to_json(self.model_config))
        self._save_state()

    def _check_settings(self) -> None:
        earlier = read_train_config(self._settings_path)
        # `max_epochs` may change when a run is resumed.
        stored = dataclasses.asdict(dataclasses.replace(earlier, max_epochs=self.config.max_epochs))
        changed = [name for name, value in dataclasses.asdict(self.config).items() if stored[name] != value]
        if changed:
            raise ValueError(
                f"{self.run} contains a run with other values of {', '.join(changed)}; choose another folder"
            )

    def _train_tokenizer(self, data: Path) -> Tokenizer:
        return train_tokenizer(self.task.read_texts(data, self.config), self.config.vocab_size)

    def _read_examples(self, data: Path, split: str) -> list[Any]:
        examples = self.task.read_examples(data, split, self.tokenizer, self.config, self.model_config)
        kept = [one for one in examples if self.task.length(one) <= self.config.max_length_tokens]
        if not kept:
            raise ValueError(
                f"no example of {split} has at most max_length_tokens ({self.config.max_length_tokens}); increase it"
            )
        longest, limit = max(map(self.task.length, kept)), self.model_config.max_positions
        if longest > limit:
            raise ValueError(
                f"an example of {split} has {longest} tokens, but max_positions of the model is {limit}; set "
                f"max_length_tokens to {limit} to skip longer examples"
            )
        return kept

    def _load_state(self) -> None:
        try:
            tensors, facts = load_tensors(self._state_path), load_metadata(self._state_path)
        except ValueError as error:
            raise ValueError(f"{error}; the run cannot be resumed, choose another folder") from error
        if facts.pop("data", self._data_digest) != self._data_digest:
            raise ValueError(f"{self.run} contains a run with other data; choose another folder")
        try:
            self._set_state(tensors, facts)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self._state_path} does not match this model ({one_line(error)}); choose another folder"
            ) from error

    def _set_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam."):
                _, index, key = name.split(".")
                states.setdefault(int(index), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        self.progress = Progress(**facts)

    def _save_state(self) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors.update({f"adam.{index}.{key}": torch.as_tensor(value) for key, value in state.items()})
        save_tensors(self._state_path, tensors, {**dataclasses.asdict(self.progress), "data": self._data_digest})

    def train_epoch(self, epoch: int) -> float:
        """Train on all examples once.

        Returns:
            The mean training loss in nats.

        Raises:
            ValueError: the loss is not finite.
        """
        # Order and dropout depend only on the seed and the epoch, so that a resumed run gives the
        # same result.
        torch.manual_seed(self.config.seed * 1_000_003 + epoch)
        batches = list(self._batches(self.train_examples, epoch))
        self.model.train()
        total, count = 0.0, 0
        with tqdm(batches, desc=f"epoch {epoch}", unit="batch", leave=False) as bar:
            for batch in bar:
                self.progress.step += 1
                total_in_batch, count_in_batch = self.update(batch.to(self.device))
                self._check_finite("training", total_in_batch)
                total, count = total + total_in_batch, count + count_in_batch
                bar.set_postfix(loss=f"{total / count:.3f}")
        return total / count

    def update(self, batch: Any) -> tuple[float, int]:
        rate = inverse_sqrt_rate(self.progress.step, self.config.peak_learning_rate, self.config.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with autocast(self.device, self.config.precision):
            loss = self.task.training_loss(self.model, batch, self.config.label_smoothing)
        count = self.task.count(batch, self.model_config.pad_id)
        self.optimizer.zero_grad(set_to_none=True)
        (loss / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        return loss.item(), count

    def _batches(self, examples: list[Any], seed: int) -> Iterator[Any]:
        seed = self.config.seed * 1_000_003 + seed
        return self.task.batches(examples, self.config.batch_tokens, seed, self.model_config)

    @torch.inference_mode()
    def validate(self) -> float:
        """Compute the mean loss on the validation examples without label smoothing, in nats.

        Raises:
            ValueError: the loss is not finite.
        """
        self.model.eval()
        total, count = 0.0, 0
        for batch in self._batches(self.validation_examples, 0):
            total += self.task.validation_loss(self.model, batch.to(self.device)).item()
            count += self.task.count(batch, self.model_config.pad_id)
        self._check_finite("validation", total)
        return total / count

    def _check_finite(self, which: str, loss: float) -> None:
        """Raise ValueError for a loss that is not finite, before the weights are written."""
        if not math.isfinite(loss):
            raise ValueError(
                f"the {which} loss is {loss} after update {self.progress.step}: the training diverged; start again in "
                "another folder with a lower peak_learning_rate or clip_norm, or with more warmup_steps"
            )

    def fit(self) -> None:
        """Train until `max_epochs`, or until the validation loss stops improving.

        Training stops after `patience_epochs` epochs without improvement.

        Raises:
            OSError: a file cannot be written.
            ValueError: another process uses the folder or has continued the run, or the training
                diverged.
        """
        with self._locked():
            if load_metadata(self._state_path).get("epoch", 0) != self.progress.epoch:
                raise ValueError(
                    f"another process has continued the run in {self.run}; run the command again to resume it"
                )
            # Record the actual length of the run, which may differ from the length at its start.
            max_epochs = max(self.config.max_epochs, self.progress.epoch)
            record = dataclasses.replace(self.config, max_epochs=max_epochs)
            replace_text(self._settings_path, train_config_to_json(record))
            self._train()

    def _train(self) -> None:
        while self.progress.epoch < self.config.max_epochs and not self._is_patience_spent():
            epoch, started = self.progress.epoch + 1, time.monotonic()
            train_loss = self.train_epoch(epoch)
            val_loss = self.validate()
            self._finish_epoch(epoch, val_loss)
            self._log(epoch, train_loss, val_loss, time.monotonic() - started)
            self._save_state()

    def _is_patience_spent(self) -> bool:
        return self.progress.epoch - self.progress.best_epoch >= self.config.patience_epochs

    def _finish_epoch(self, epoch: int, val_loss: float) -> None:
        """Write the checkpoints of an epoch.

        The caller writes the state last, so that an interruption in between repeats the epoch.
        """
        facts = {"epoch": epoch, "validation_loss": val_loss}
        weights = self.model.state_dict()
        epochs = self.run / "epochs"
        epochs.mkdir(exist_ok=True)
        save_tensors(epochs / f"{epoch:04d}.safetensors", weights, facts)
        kept = sorted(epochs.glob("*.safetensors"))
        for old in kept[: -self.config.average_last]:
            old.unlink()
        kept = kept[-self.config.average_last :]
        averaged_facts = {"epochs": [int(path.stem) for path in kept]}
        save_checkpoint(self.run / "averaged", self.model_config, average(kept), self._tokenizer_path, averaged_facts)
        self.progress.epoch = epoch
        if val_loss < self.progress.best_loss:
            self.progress.best_loss, self.progress.best_epoch = val_loss, epoch
            save_checkpoint(self.run / "best", self.model_config, weights, self._tokenizer_path, facts)

    def _log(self, epoch: int, train_loss: float, val_loss: float, seconds: float) -> None:
        row = {
            "epoch": epoch,
            "step": self.progress.step,
            "train_loss": round(train_loss, 4),
            "validation_loss": round(val_loss, 4),
            "seconds": round(seconds, 1),
        }
        log = self.run / "log.jsonl"
        earlier = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        replace_text(log, earlier + json.dumps(row) + "\n")  # atomic, so that a full disk leaves no partial line
        tqdm.write(json.dumps(row))
