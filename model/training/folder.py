"""Folder of a run: its files and its lock.

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

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from sightline.model.checkpoint import average, replace_text, save_checkpoint, save_tensors
from sightline.model.config import ArchitectureConfig
from sightline.model.data.preparation import check_writable
from sightline.model.parts import AVERAGED, BEST, CONFIG, TOKENIZER
from sightline.model.training.curve import draw_curve

# Folders that this process has locked. The lock belongs to the process, so that a part of a command
# can lock a folder that the whole command holds.
_HELD: set[Path] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder if necessary and lock it; remove a new folder that stays empty.

    The operating system releases the lock when the process ends. Raises `UsageError` if the folder
    is a file or cannot be written, and `ValueError` if another process holds the lock.
    """
    check_writable(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    name = folder.resolve()
    if name in _HELD:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is using {folder}; wait until it ends, or choose another folder"
            ) from None
        _HELD.add(name)
        yield
    finally:
        _HELD.discard(name)
        if is_new:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()
        os.close(descriptor)


class RunFolder:
    """Paths of a run, and its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings, self.config, self.tokenizer = path / "train.json", path / CONFIG, path / TOKENIZER
        self.state, self.epochs = path / "state.safetensors", path / "epochs"
        self.averaged, self.best = path / AVERAGED, path / BEST
        self.log, self.curve, self.record = path / "log.jsonl", path / "curve.svg", path / "record.json"

    def __str__(self) -> str:
        return str(self.path)

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
