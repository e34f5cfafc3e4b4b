"""Encoder task: vectors by which a text finds the other text of its pair.

The loss is multiple negatives ranking (Henderson et al. 2017, "Efficient Natural Language Response
Suggestion for Smart Reply", section 4.4): each source is compared with the targets of all pairs of
its batch, and each target with all sources. Shapes use B pairs, S and T tokens, M width of the
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.encoder import TextEncoder
from sightline.model.config import ArchitectureConfig
from sightline.model.data.batches import TensorBatch, pad
from sightline.model.data.examples import Example
from sightline.model.evaluation.retrieval import evaluate_encoder
from sightline.model.training.task import Task

SCALE = 20.0  # by which cosines are multiplied, as in sentence-transformers


@dataclass(frozen=True)
class PairBatch(TensorBatch):
    """Padded token ids of both sides of pairs, (B, S) and (B, T), and their lengths (B,).
    `is_negative` (B, B) is True where the target of a column is a wrong one for the source of a
    row.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    is_negative: Tensor


def make_batch(examples: Sequence[Example], config: ArchitectureConfig) -> PairBatch:
    sources, targets = ([tuple(example[side]) for example in examples] for side in (0, 1))
    numbers = {text: number for number, text in enumerate({*sources, *targets})}
    source, target = (torch.tensor([numbers[text] for text in side]) for side in (sources, targets))  # (B,)
    # Equal texts are no negatives: targets of equal sources, equal targets, and the source itself.
    is_equal = (source[:, None] == source) | (target[:, None] == target) | (source[:, None] == target)  # (B, B)
    return PairBatch(
        pad(sources, config.pad_id),
        torch.tensor(list(map(len, sources))),
        pad(targets, config.pad_id),
        torch.tensor(list(map(len, targets))),
        ~is_equal,
    )


def ranking_loss(model: TextEncoder, batch: PairBatch, smoothing: float = 0.0) -> Tensor:
    """Return the sum over pairs of the mean cross-entropy of both directions, in nats. Smoothing is
    ignored, because the softmax is over the texts of a batch and not over labels.
    """
    sources = model(batch.source, batch.source_lengths)  # (B, M)
    targets = model(batch.target, batch.target_lengths)
    # bfloat16 would round the scaled cosines to steps of an eighth.
    with torch.autocast(sources.device.type, enabled=False):
        scores = SCALE * sources.float() @ targets.float().T  # (B, B)
    is_counted = batch.is_negative | torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    return sum_of_directions(scores, is_counted)


def sum_of_directions(scores: Tensor, is_counted: Tensor) -> Tensor:
    """Return half the sum of the cross-entropies of the diagonal over rows and over columns. The
    softmax of a row or column is over its own counted scores.
    """
    own = torch.arange(len(scores), device=scores.device)
    total = scores.new_zeros(())
    for logits, kept in ((scores, is_counted), (scores.T, is_counted.T)):
        total = total + functional.cross_entropy(logits.masked_fill(~kept, -torch.inf), own, reduction="sum")
    return total / 2


def count_pairs(batch: PairBatch, pad_id: int) -> int:
    """Return the number of pairs that have another one to be compared with, and so a loss."""
    return int((batch.is_negative.any(dim=0) | batch.is_negative.any(dim=1)).sum())


def sizes(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the lengths of both texts."""
    return lengths


ENCODER: Task[PairBatch, TextEncoder] = Task(
    name="encoder",
    make_batch=make_batch,
    count=count_pairs,
    training_loss=ranking_loss,
    evaluate=evaluate_encoder,
    sizes=sizes,
)
