"""Folder of a run: its files, its lock, and the state from which a resumed run continues.

A run is a folder:

    train.json                    settings of the training
    config.json, tokenizer.json   configuration and tokenizer of the model
    state.safetensors             last checkpoint: weights, optimizer, counters and random state
    epochs/0001.safetensors ...   weights of the last epochs, for averaging
    best/                         checkpoint with the lowest validation loss
    averaged/                     checkpoint with the mean weights of the last epochs
    log.jsonl                     one line per epoch; of a repeated epoch, the last line counts
    curve.svg                     losses by epoch
    teacher.txt, teacher.jsonl    translations of a teacher, and the pairs with them as targets
    alignment-after-N/            links of words that the model found after N updates
    pretrained/                   files of the third-party checkpoint that the run started from
    record.json                   data, versions, commands and times of the run
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sightline.base.errors import UsageError
from sightline.base.options import flag_name
from sightline.model.checkpoint import average, load_metadata, load_tensors, replace_text, save_checkpoint, save_tensors
from sightline.model.config import ArchitectureConfig
from sightline.model.parts import AVERAGED, BEST, CONFIG, TOKENIZER
from sightline.model.training.curve import draw_curve
from sightline.model.training.options import CHANGEABLE

RandomState = dict[str, Tensor]  # states of the random number generators, by the type of their device
RANDOM = "random.0."  # start of their names in a file; earlier versions had one state for each process


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder if necessary and lock it; remove a new folder that stays empty.

    The operating system releases the lock when the process ends. Raises `UsageError` if the folder
    is a file or cannot be written, and `ValueError` if another process holds the lock.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(
            f"cannot write to the folder {folder} ({error.strerror}); change its permissions, or choose another folder "
            "for the run"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is using {folder}; wait until it ends, or choose another folder"
            ) from None
        yield
    finally:
        if is_new:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()
        os.close(descriptor)


class RunFolder:
    """Files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings, self.config, self.tokenizer = path / "train.json", path / CONFIG, path / TOKENIZER
        self.state, self.epochs = path / "state.safetensors", path / "epochs"
        self.averaged, self.best = path / AVERAGED, path / BEST
        self.log, self.curve, self.record = path / "log.jsonl", path / "curve.svg", path / "record.json"

    def __str__(self) -> str:
        return str(self.path)

    def check_changes(self, names: Collection[str]) -> None:
        """Check that options that changed may change when a run is resumed. Raises `UsageError`."""
        if fixed := sorted(flag_name(name) for name in names if name not in CHANGEABLE):
            raise self.rejected(f"with other values of {', '.join(fixed)}")

    def rejected(self, run: str) -> UsageError:
        """Return the error of a folder whose run, described in words, cannot be resumed."""
        return UsageError(f"{self} contains a run {run}; choose another folder")

    def write_epoch(
        self,
        config: ArchitectureConfig,
        weights: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        *,
        kept: int,
        averaged: int,
        is_best: bool,
    ) -> None:
        """Write the weights of an epoch, the averaged checkpoint and, if `is_best`, the best.

        Args:
            facts: `epoch` and, if known, `validation_loss`.
            kept: number of last epochs whose weights stay in the folder.
            averaged: number of last epochs whose weights are averaged, at most `kept`; 0 leaves the
                averaged checkpoint as it is.
        """
        self.epochs.mkdir(exist_ok=True)
        save_tensors(self.epochs / f"{facts['epoch']:04d}.safetensors", weights, facts)
        paths = sorted(self.epochs.glob("[0-9]*.safetensors"), key=lambda path: int(path.stem))
        for old in paths[:-kept]:
            old.unlink()
        if averaged:
            last = paths[-averaged:]
            averaged_facts = {"epochs": [int(path.stem) for path in last]}
            save_checkpoint(self.averaged, config, average(last), self.tokenizer, averaged_facts)
        if is_best:
            save_checkpoint(self.best, config, weights, self.tokenizer, facts)

    def add_to_log(self, row: Mapping[str, Any]) -> None:
        """Add a line to the log and draw the curve again. Both files are replaced, so that a full
        disk leaves no partial line. A line of the log that is not valid only prevents the curve.
        """
        add_line(self.log, row)
        with suppress(ValueError, KeyError):
            replace_text(self.curve, draw_curve(list(read_log(self.path).values())))


def add_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add an object to a file of JSON lines, which is replaced."""
    earlier = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    replace_text(path, earlier + json.dumps(row) + "\n")


def read_log(run: Path) -> dict[int, dict[str, Any]]:
    """Read the log of a run as rows by epoch; the last row of a repeated epoch counts."""
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["epoch"]: row for row in map(json.loads, lines)}


@dataclass
class Progress:
    """Progress of a run: everything that a resumed run needs besides tensors."""

    epoch: int = 0  # epochs finished
    step: int = 0  # updates made
    best_loss: float = float("inf")  # validation loss of `best_epoch` in nats, averaged over `Task.count`
    best_metric: float = float("-inf")  # value of `TrainConfig.metric`, if it is not the loss
    best_epoch: int = 0
    validated_step: int = 0  # updates made before the last validation
    batch: int = 0  # batches of the current epoch that are done; 0 between two epochs
    loss_sum: float = 0.0  # training loss of these batches in nats
    loss_count: int = 0  # terms of this sum
    epoch_seconds: float = 0.0  # time of the current epoch
    seconds: float = 0.0  # time of the run, over all resumes

    @property
    def train_loss(self) -> float:
        """Mean training loss of the current epoch in nats."""
        return self.loss_sum / max(self.loss_count, 1)

    def finish_epoch(self) -> None:
        self.epoch += 1
        self.batch, self.loss_sum, self.loss_count, self.epoch_seconds = 0, 0.0, 0, 0.0


def random_state(device: torch.device) -> RandomState:
    """Return the states of the random number generators that training on a device uses."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: RandomState, device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    data_digest: str,
    random_state: RandomState | None,
) -> None:
    """Write the state of a run atomically.

    `data_digest` is that of the data with which the run must continue. `random_state` is None
    between two epochs, because an epoch sets it.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors.update({f"adam.{index}.{key}": torch.as_tensor(value) for key, value in state.items()})
    tensors.update({f"{RANDOM}{device}": state for device, state in (random_state or {}).items()})
    save_tensors(path, tensors, {**dataclasses.asdict(progress), "data": data_digest})


def load_state(path: Path, model: nn.Module, optimizer: Optimizer) -> tuple[Progress, RandomState | None]:
    """Read what `save_state` wrote into a model and an optimizer. Raises `KeyError`,
    `RuntimeError`, `TypeError` or `ValueError` if the state is damaged or of another model.
    """
    tensors, facts = load_tensors(path), load_metadata(path)
    model.load_state_dict(_part(tensors, "model."))
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _part(tensors, "adam.").items():
        index, key = name.split(".")
        states.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    facts.pop("data", None)
    return Progress(**facts), _part(tensors, RANDOM) or None


def _part(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
