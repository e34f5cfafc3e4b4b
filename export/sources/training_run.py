"""Checkpoint of a training run of `model`. Only recurrent models need PyTorch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sightline.export.sources.opened_checkpoint import FolderFiles, Tensors, stored_tensors
from sightline.export.sources.run_folder import read_record
from sightline.export.sources.safetensors_file import SafetensorsFile
from sightline.model.parts import WEIGHTS, load_parts

if TYPE_CHECKING:
    from sightline.model.architectures.factory import Model

Read = Callable[[], NDArray[np.float32]]


class TrainingRun(FolderFiles):
    """A folder with the configuration, the tokenizer and the weights of a model."""

    def __init__(self, path: Path, half_weights: bool = False) -> None:
        """Open a checkpoint; with `half_weights`, matrices are read rounded to float16.

        Raises `FileNotFoundError`, or `ValueError` if configuration and tokenizer do not match.
        """
        super().__init__(path)
        self.config, self.tokenizer = load_parts(path)
        self.record = read_record(path)
        try:
            file = SafetensorsFile(path / WEIGHTS, str(path / WEIGHTS))
        except ValueError as error:
            raise self.unusable(error) from error
        stored = stored_tensors(file)
        if half_weights:
            stored = {name: replace(full, load=partial(_read_half, name, full.load)) for name, full in stored.items()}
        self.tensors = Tensors(stored, str(path / WEIGHTS))

    def unusable(self, error: Exception) -> ValueError:
        """Return the error for weights that do not belong to the configuration."""
        # PyTorch names the class in the first line and the first mismatch in the second.
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        return ValueError(f"{self.path} is not a checkpoint of this version of Sightline: {reason}; train it again")

    def load(self) -> "Model":
        """Return the model in PyTorch, in evaluation mode."""
        import torch

        from sightline.model.architectures.factory import build_model

        model = build_model(self.config)
        try:
            model.load_state_dict({name: torch.from_numpy(self.tensors.read(name)) for name in self.tensors.names})
        except RuntimeError as error:
            raise self.unusable(error) from error
        return model.eval()


def _read_half(name: str, read: Read) -> NDArray[np.float32]:
    """Read a tensor; round a matrix to float16 and back. Large weights raise `ValueError`."""
    array = read()
    if array.ndim < 2:
        return array
    with np.errstate(over="ignore"):
        rounded = array.astype(np.float16).astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError(f"{name} has weights beyond ±65504, the largest of float16")
    return rounded
