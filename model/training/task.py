"""Interface of a training task.

A task has the parts of training that differ between translation, classification and chat;
`model.training.trainer` has the common parts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from model.config import ModelConfig
from model.training.config import TrainConfig


class TrainingBatch(Protocol):
    """Padded examples as tensors that can be moved to a device."""

    def to(self, device: torch.device) -> Self: ...


ExampleT = TypeVar("ExampleT")
BatchT = TypeVar("BatchT", bound=TrainingBatch)
ModelT = TypeVar("ModelT")


@dataclass(frozen=True)
class Task(Generic[ExampleT, BatchT, ModelT]):
    """Functions that read data, form batches and compute losses.

    A loss is a sum over a batch, in nats; `count` returns the number of terms, by which the trainer
    divides it.
    """

    validation_split: str
    read_texts: Callable[[Path, TrainConfig], list[str]]  # texts for training the tokenizer
    # Reads a split of a folder, and raises ValueError for data that the model cannot be trained on.
    read_examples: Callable[[Path, str, Tokenizer, TrainConfig, ModelConfig], list[ExampleT]]
    length: Callable[[ExampleT], int]  # tokens of the longer side
    batches: Callable[
        [Sequence[ExampleT], int, int, ModelConfig], Iterator[BatchT]
    ]  # examples, batch_tokens, seed, configuration
    count: Callable[[BatchT, int], int]  # batch, padding id
    training_loss: Callable[[ModelT, BatchT, float], Tensor]  # model, batch, label smoothing
    validation_loss: Callable[[ModelT, BatchT], Tensor]
