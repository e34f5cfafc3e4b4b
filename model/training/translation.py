"""Translation task: pairs of texts, and the cross-entropy of target tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sightline.model.architectures.factory import TranslationModel
from sightline.model.architectures.transformer import Transformer
from sightline.model.data.batches import Batch, make_batch
from sightline.model.data.examples import Example
from sightline.model.evaluation.bleu import evaluate_translation
from sightline.model.precision import at_least_float32
from sightline.model.training.loss import output_cross_entropy
from sightline.model.training.task import Task

ALIGNMENT_WEIGHT = 0.1  # of the loss of an alignment


@dataclass(frozen=True)
class GuidedBatch(Batch):
    """Batch with the share of each source token in the links of a target token, in the row of the
    step that reads it: (B, T, S), of which rows without links are 0.
    """

    alignment: Tensor


def guided_batch(batch: Batch, links: Sequence[Example]) -> GuidedBatch:
    """Add the links of each example, indices of source and target tokens, to a batch. No step reads
    the last target token.
    """
    alignment = torch.zeros(*batch.target_input.shape, batch.source.size(1))
    for row, pairs in enumerate(links):
        for source, target in zip(*pairs, strict=True):
            if target + 1 < alignment.size(1):
                alignment[row, target + 1, source] = 1.0
    alignment /= alignment.sum(dim=-1, keepdim=True).clamp_min(1.0)
    return GuidedBatch(batch.source, batch.source_lengths, batch.target_input, batch.target_output, alignment)


def alignment_loss(weights: Tensor, alignment: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of the rows with links, in nats, given the weights of a
    head (B, T, S).
    """
    smallest = torch.finfo(torch.float32).tiny
    return -(alignment * at_least_float32(weights).clamp_min(smallest).log()).sum()


def count_targets(batch: Batch, pad_id: int) -> int:
    return int((batch.target_output != pad_id).sum())


def cross_entropy(model: TranslationModel, batch: Batch, smoothing: float) -> Tensor:
    """Return the sum of the cross-entropies over the real target tokens, in nats, and of an
    alignment, if the batch has one.
    """
    memory: Any  # its type depends on the model
    memory, _ = model.encode(batch.source, batch.source_lengths)
    alignment: Tensor | float = 0.0
    if isinstance(model, Transformer) and isinstance(batch, GuidedBatch):
        decoded, weights = model.decode_guided(batch.target_input, memory, batch.source_lengths)
        alignment = ALIGNMENT_WEIGHT * alignment_loss(weights, batch.alignment)
    else:
        decoded, _, _ = model.decode(batch.target_input, memory, batch.source_lengths)
    features, targets = decoded.flatten(0, 1), batch.target_output.flatten()
    return output_cross_entropy(model, features, targets, smoothing, model.config.pad_id) + alignment


TRANSLATION: Task[Batch, TranslationModel] = Task(
    name="translation",
    make_batch=make_batch,
    count=count_targets,
    training_loss=cross_entropy,
    evaluate=evaluate_translation,
    sizes=lambda lengths: lengths[:, ::-1],  # examples are sorted by the target first
)
