"""State of a run, from which a resumed run continues to the same weights."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sightline.model.checkpoint import load_metadata, load_tensors, save_tensors

RandomState = dict[str, Tensor]  # states of the random number generators, by the type of their device
RANDOM = "random.0."  # start of their names in a file; earlier versions had one state for each process


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
