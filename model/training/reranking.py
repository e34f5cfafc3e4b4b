"""Reranking task: a model reads a query and a document together, and predicts their score.

The loss is the binary cross-entropy of the score (Nogueira and Cho 2019, "Passage Re-ranking with
BERT"), which may also be between 0 and 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.pretrained import PretrainedReranker
from sightline.model.config import ArchitectureConfig
from sightline.model.data.batches import LabelledBatch, pad
from sightline.model.data.examples import Example
from sightline.model.data.similar_texts import SCORE_UNIT
from sightline.model.evaluation.ranking import evaluate_reranking
from sightline.model.training.classification import count_texts
from sightline.model.training.task import Task


def make_batch(examples: Sequence[Example], config: ArchitectureConfig) -> LabelledBatch:
    """Return a batch of pairs, whose labels (B,) are their scores."""
    sources = [source for source, _ in examples]
    scores = torch.tensor([score / SCORE_UNIT for _, (score,) in examples])
    return LabelledBatch(pad(sources, config.pad_id), torch.tensor(list(map(len, sources))), scores)


def score_loss(model: PretrainedReranker, batch: LabelledBatch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the binary cross-entropies of a batch, in nats. With label smoothing, a
    target is nearer to one half.
    """
    targets = batch.labels * (1 - smoothing) + smoothing / 2
    logits = model(batch.source, batch.source_lengths)
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")


RERANKING: Task[LabelledBatch, PretrainedReranker] = Task(
    name="reranking",
    make_batch=make_batch,
    count=count_texts,
    training_loss=score_loss,
    evaluate=evaluate_reranking,
)
