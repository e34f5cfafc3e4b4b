"""Classification task with any number of labels for a text: the binary cross-entropy of each."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from model.architectures.classifier import Classifier
from model.config import ClassifierConfig, ModelConfig, PretrainedConfig
from model.data.batches import LabelledBatch, pad
from model.data.examples import Example
from model.evaluation.accuracy import evaluate_classification
from model.training.task import Task


def make_batch(examples: Sequence[Example], config: ModelConfig) -> LabelledBatch:
    """Return the batch; its labels are (B, C), 1 for each label of a text and 0 for the others."""
    assert isinstance(config, ClassifierConfig | PretrainedConfig)
    labels = torch.zeros(len(examples), len(config.labels))
    for row, (_, indices) in zip(labels, examples, strict=True):
        row[list(indices)] = 1.0
    sources = [ids for ids, _ in examples]
    return LabelledBatch(pad(sources, config.pad_id), torch.tensor([len(ids) for ids in sources]), labels)


def multi_label_loss(model: Classifier, batch: LabelledBatch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the binary cross-entropies over texts and labels, in nats.

    With label smoothing, a target is `smoothing / 2` instead of 0, and `1 - smoothing / 2` instead
    of 1.
    """
    targets = batch.labels * (1 - smoothing) + smoothing / 2
    logits = model(batch.source, batch.source_lengths)  # (B, C)
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")


def count_texts(batch: LabelledBatch, pad_id: int) -> int:
    return len(batch.labels)


def sizes(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    return lengths[:, :1]


MULTI_LABEL: Task[LabelledBatch, Classifier] = Task(
    name="classification",
    sizes=sizes,
    make_batch=make_batch,
    count=count_texts,
    training_loss=multi_label_loss,
    validation_loss=multi_label_loss,
    evaluate=evaluate_classification,
)
