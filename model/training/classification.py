"""Classification task: labelled texts, and the cross-entropy of their labels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from model.architectures.classifier import Classifier
from model.config import ModelConfig
from model.data.batches import LabelledBatch, make_labelled_batch
from model.data.examples import Example
from model.evaluation.accuracy import evaluate_classification
from model.training.task import Task


def _sizes(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the lengths of the texts (N, 1), without the numbers of labels."""
    return lengths[:, :1]


def _make_batch(examples: Sequence[Example], config: ModelConfig) -> LabelledBatch:
    return make_labelled_batch(examples, config.pad_id)


def _count(batch: LabelledBatch, pad_id: int) -> int:
    return len(batch.labels)


def label_loss(model: Classifier, batch: LabelledBatch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the label-smoothed cross-entropies of a batch, in nats."""
    logprobs = model(batch.source, batch.source_lengths)  # (B, C); softmax does not change log-probabilities
    return functional.cross_entropy(logprobs, batch.labels, label_smoothing=smoothing, reduction="sum")


CLASSIFICATION: Task[LabelledBatch, Classifier] = Task(
    name="classification",
    sizes=_sizes,
    make_batch=_make_batch,
    count=_count,
    training_loss=label_loss,
    validation_loss=label_loss,
    evaluate=evaluate_classification,
)
