"""Translation task: pairs of texts, and the cross-entropy of target tokens."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sightline.model.architectures.factory import TranslationModel
from sightline.model.architectures.pretrained import PretrainedTranslator
from sightline.model.data.batches import Batch, make_batch
from sightline.model.evaluation.bleu import evaluate_translation
from sightline.model.training.loss import generator_cross_entropy, projected_cross_entropy
from sightline.model.training.task import Task


def _sizes(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the lengths of target and source: examples are sorted by the target first."""
    return lengths[:, ::-1]


def count_targets(batch: Batch, pad_id: int) -> int:
    return int((batch.target_output != pad_id).sum())


def cross_entropy(model: TranslationModel, batch: Batch, smoothing: float) -> Tensor:
    """Return the sum of the cross-entropies over the real target tokens, in nats."""
    memory: Any  # its type depends on the model
    memory, _ = model.encode(batch.source, batch.source_lengths)
    decoded, _, _ = model.decode(batch.target_input, memory, batch.source_lengths)
    features, targets, pad_id = decoded.flatten(0, 1), batch.target_output.flatten(), model.config.pad_id
    if isinstance(model, PretrainedTranslator):
        return generator_cross_entropy(model, features, targets, smoothing, pad_id)
    return projected_cross_entropy(features, model.embedding.weight, targets, smoothing, pad_id)


TRANSLATION: Task[Batch, TranslationModel] = Task(
    name="translation",
    make_batch=make_batch,
    count=count_targets,
    training_loss=cross_entropy,
    evaluate=evaluate_translation,
    sizes=_sizes,
)
