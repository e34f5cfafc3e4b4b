"""Data-parallel training: processes that `torchrun` started train copies of one model.

Each process computes gradients of its share of the batches of an update. The gradients are summed,
so that all processes make the same update. Only the first process writes files.
"""

import importlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

T = TypeVar("T")


def default_device() -> torch.device:
    """Return the GPU of this process if PyTorch can use one, otherwise the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@dataclass(frozen=True)
class World:
    """The processes of a run. With one process, all methods return their arguments."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"  # of the tensors that processes exchange

    @classmethod
    def join(cls, device: torch.device) -> "World":
        """Connect with the other processes if there are any, as the variables of torchrun say."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not distributed.is_initialized():
            # The first optimizer imports it. If processes were already connected, it would keep the
            # threads of the connection after `close`, and these would abort the process at its end.
            importlib.import_module("torch._dynamo")
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(distributed.get_rank(), size, str(device))

    @property
    def is_first(self) -> bool:
        """True for the process that writes files."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums of values over all processes."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return total.tolist()

    def max(self, value: int) -> int:
        """Return the largest value of all processes."""
        if self.size == 1:
            return value
        largest = torch.tensor(value, device=self.device)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return int(largest.item())

    def first(self, value: T) -> T:
        """Return the value of the first process."""
        values = [value]
        if self.size > 1:
            distributed.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of each process by their sums, in one message."""
        if self.size == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        total = torch.cat([_gradient(parameter).flatten() for parameter in trained])
        distributed.all_reduce(total)
        for parameter, part in zip(trained, torch.split(total, [each.numel() for each in trained]), strict=True):
            parameter.grad = part.view_as(parameter)

    def close(self) -> None:
        """Disconnect from the other processes."""
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient; zero if the process had no batch that uses the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
