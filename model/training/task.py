"""A task: the parts of training in which translation, classification and chat differ.

`model.training.trainer` has the rest.
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
    """Padded examples as tensors."""

    def to(self, device: torch.device) -> Self: ...


ExampleT = TypeVar("ExampleT")
BatchT = TypeVar("BatchT", bound=TrainingBatch)
ModelT = TypeVar("ModelT")


@dataclass(frozen=True)
class Task(Generic[ExampleT, BatchT, ModelT]):
    """How data becomes examples, examples become batches, and a batch becomes a loss.

    A loss is a sum over a batch; `count` says of how many parts, which is what its mean is taken over.
    """

    validation_split: str
    read_texts: Callable[[Path, TrainConfig], list[str]]  # what the tokenizer learns from
    # Reads a split of a folder, and refuses what the model could not learn from.
    read_examples: Callable[[Path, str, Tokenizer, TrainConfig, ModelConfig], list[ExampleT]]
    length: Callable[[ExampleT], int]  # tokens, of the longer side where there are two
    batches: Callable[[Sequence[ExampleT], int, int, ModelConfig], Iterator[BatchT]]  # batch_tokens, seed
    count: Callable[[BatchT, int], int]  # the padding's id
    training_loss: Callable[[ModelT, BatchT, float], Tensor]  # label smoothing; nats
    validation_loss: Callable[[ModelT, BatchT], Tensor]  # nats
