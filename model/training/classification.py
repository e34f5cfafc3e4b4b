"""Tasks with labels: classification of texts, and tagging of tokens. The loss is the cross-entropy
of the labels; if a text has any number of them, the binary cross-entropy of each label.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.factory import TaggingModel
from sightline.model.architectures.pretrained import PretrainedClassifier
from sightline.model.data.batches import LabelledBatch, make_labelled_batch, make_tagged_batch
from sightline.model.data.examples import Examples
from sightline.model.data.tags import NO_TAG
from sightline.model.evaluation.accuracy import evaluate_classification
from sightline.model.evaluation.entities import evaluate_tagging
from sightline.model.training.log_ratios import embed_log_ratios
from sightline.model.training.task import Task


def count_texts(batch: LabelledBatch, pad_id: int) -> int:
    return len(batch.labels)


def class_weights(texts: Mapping[str, int], total: int, *, multi_label: bool) -> Tensor:
    """Return the weights with which all labels count equally, given the number of texts of each.

    With one label for a text, their mean over the texts is 1. Otherwise, they weight the texts that
    have the label, so that these count as much as those that do not.
    """
    counts = torch.tensor(list(texts.values()), dtype=torch.float32)
    return (total - counts).clamp(min=1) / counts if multi_label else total / len(counts) / counts


def label_loss(
    model: Classifier | PretrainedClassifier,
    batch: LabelledBatch,
    smoothing: float = 0.0,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the sum of the label-smoothed cross-entropies of a batch, in nats. `weights` are those
    of the labels (C,), if there are any.

    With any number of labels, the sum is over texts and labels; with label smoothing, a target is
    `smoothing / 2` instead of 0, and `1 - smoothing / 2` instead of 1.
    """
    scores = model(batch.source, batch.source_lengths)  # (B, C), or (B, S, C) of tags
    if weights is not None:
        weights = weights.to(scores.device)
    if model.config.multi_label:  # scores are logits
        targets = batch.labels * (1 - smoothing) + smoothing / 2
        return functional.binary_cross_entropy_with_logits(scores, targets, pos_weight=weights, reduction="sum")
    # Scores are log-probabilities, which softmax does not change.
    scores, labels = scores.flatten(0, -2), batch.labels.flatten()
    return functional.cross_entropy(
        scores, labels, weights, ignore_index=NO_TAG - 1, label_smoothing=smoothing, reduction="sum"
    )


def initialise(model: Classifier | PretrainedClassifier, examples: Examples) -> None:
    """Let the token embeddings of one of our own models start with log-count ratios."""
    if isinstance(model, Classifier):
        embed_log_ratios(model, examples)


CLASSIFICATION: Task[LabelledBatch, Classifier | PretrainedClassifier] = Task(
    name="classification",
    make_batch=make_labelled_batch,
    count=count_texts,
    training_loss=label_loss,
    evaluate=evaluate_classification,
    initialise=initialise,
)

TAGGING: Task[LabelledBatch, TaggingModel] = Task(
    name="tagging",
    make_batch=make_tagged_batch,
    count=lambda batch, pad_id: int((batch.labels != NO_TAG - 1).sum()),
    training_loss=label_loss,
    evaluate=evaluate_tagging,
)
