"""Interface of a training task.

A task has the parts of training that differ between translation, classification, language models,
encoders and tagging; `sightline.model.training.trainer` has the common parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from sightline.model.config import ArchitectureConfig
from sightline.model.data.batches import TensorBatch
from sightline.model.data.examples import Example, Examples
from sightline.model.data.records import Record, TaskName
from sightline.model.evaluation.result import Evaluation as Evaluation

BatchT = TypeVar("BatchT", bound=TensorBatch)
ModelT = TypeVar("ModelT")
Metric = Callable[[Any, Tokenizer, Sequence[Record]], Evaluation]  # model in evaluation mode, tokenizer, records


@dataclass(frozen=True)
class Task(Generic[BatchT, ModelT]):
    """Functions that form batches and compute losses and metrics. A loss is a sum over a batch, in
    nats; `count` returns the number of terms, by which the trainer divides it.
    """

    name: TaskName
    make_batch: Callable[[Sequence[Example], ArchitectureConfig], BatchT]
    count: Callable[[BatchT, int], int]  # batch, padding id
    training_loss: Callable[[ModelT, BatchT, float], Tensor]  # model, batch, label smoothing
    evaluate: Metric | None = None
    # Maps lengths (N, 2) of examples to their sizes in tokens (N, K). Examples are sorted by the
    # first column, then by the others; the largest column limits a batch. By default, the size is
    # the length of the first list, of token ids.
    sizes: Callable[[NDArray[np.int32]], NDArray[np.int32]] = lambda lengths: lengths[:, :1]
    # Sets weights of a new model that depend on the training examples.
    initialise: Callable[[ModelT, Examples], None] | None = None

    def validation_loss(self, model: ModelT, batch: BatchT) -> Tensor:
        """Return the loss without label smoothing."""
        return self.training_loss(model, batch, 0.0)
