"""Tasks of texts that belong together: encoder and reranking.

An encoder computes vectors by which a text finds the other text of its pair. The loss is multiple
negatives ranking (Henderson et al. 2017, "Efficient Natural Language Response Suggestion for Smart
Reply", section 4.4): each source is compared with the targets of all pairs of its batch and with
all negatives, and each target with all sources. Pairs with scores have the loss CoSENT, which
sentence-transformers recommends for them: cosines of pairs with a larger score should be larger.

A reranker reads a query and a document together, and predicts their score. Its loss is the binary
cross-entropy of the score (Nogueira and Cho 2019, "Passage Re-ranking with BERT"), which may also
be between 0 and 1.

Shapes use B pairs, N negatives, S and T tokens, M width of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.encoder import TextEncoder
from sightline.model.architectures.pretrained import PretrainedReranker
from sightline.model.config import ArchitectureConfig
from sightline.model.data.batches import LabelledBatch, TensorBatch, pad
from sightline.model.data.examples import Example
from sightline.model.data.similar_texts import SCORE_UNIT, decode_similar
from sightline.model.evaluation.ranking import evaluate_encoder, evaluate_reranking
from sightline.model.training.classification import count_texts, label_loss
from sightline.model.training.task import Task

SCALE = 20.0  # by which cosines are multiplied, as in sentence-transformers


@dataclass(frozen=True)
class PairBatch(TensorBatch):
    """Padded token ids of sources (B, S), and of targets and then negatives (B + N, T), and their
    lengths. `is_negative` (B, B + N) is True where the text of a column is a wrong one for the
    source of a row. `scores` (B,) are between 0 and 1, or (0,) if the pairs have none.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    is_negative: Tensor
    scores: Tensor = field(default_factory=lambda: torch.empty(0))


def make_batch(examples: Sequence[Example], config: ArchitectureConfig) -> PairBatch:
    decoded = [decode_similar(example) for example in examples]
    sources, targets = ([tuple(texts[side]) for texts, _ in decoded] for side in (0, 1))
    targets += [tuple(text) for texts, _ in decoded for text in texts[2:]]
    numbers = {text: number for number, text in enumerate({*sources, *targets})}
    source, target = (torch.tensor([numbers[text] for text in side]) for side in (sources, targets))  # (B,), (B + N,)
    # Equal texts are no negatives: targets of equal sources, equal targets, and the source itself.
    is_equal = (target[: len(source), None] == target) | (source[:, None] == target)  # (B, B + N)
    is_equal[:, : len(source)] |= source[:, None] == source
    return PairBatch(
        pad(sources, config.pad_id),
        torch.tensor(list(map(len, sources))),
        pad(targets, config.pad_id),
        torch.tensor(list(map(len, targets))),
        ~is_equal,
        torch.tensor([score for _, score in decoded if score is not None]),
    )


def ranking_loss(model: TextEncoder, batch: PairBatch, smoothing: float = 0.0) -> Tensor:
    """Return the sum over pairs of the mean cross-entropy of both directions, in nats, or
    `score_loss` of pairs with scores. Smoothing is ignored, because the softmax is over the texts
    of a batch and not over labels.
    """
    sources = model(batch.source, batch.source_lengths)  # (B, M)
    targets = model(batch.target, batch.target_lengths)
    # bfloat16 would round the scaled cosines to steps of an eighth.
    with torch.autocast(sources.device.type, enabled=False):
        if len(batch.scores):
            return score_loss((sources.float() * targets.float()).sum(dim=1), batch.scores)
        scores = SCALE * sources.float() @ targets.float().T  # (B, B + N)
    is_counted = batch.is_negative | torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
    return sum_of_directions(scores, is_counted)


def sum_of_directions(scores: Tensor, is_counted: Tensor) -> Tensor:
    """Return half the sum of the cross-entropies of the diagonal over rows and over columns, of
    scores (B, B + N). The softmax of a row or column is over its own counted scores; columns of
    negatives have none.
    """
    own = torch.arange(len(scores), device=scores.device)
    total = scores.new_zeros(())
    columns = slice(len(scores))
    for logits, kept in ((scores, is_counted), (scores[:, columns].T, is_counted[:, columns].T)):
        total = total + functional.cross_entropy(logits.masked_fill(~kept, -torch.inf), own, reduction="sum")
    return total / 2


def score_loss(cosines: Tensor, scores: Tensor) -> Tensor:
    """Return CoSENT for the cosines (B,) of pairs with scores (B,), times B: the logarithm of 1 and
    the sum of exp(SCALE (cosine_j - cosine_i)) over all i and j with score_i > score_j.
    """
    terms = SCALE * (cosines - cosines[:, None])[scores[:, None] > scores]
    return len(cosines) * torch.cat([terms.new_zeros(1), terms]).logsumexp(dim=0)


def count_pairs(batch: PairBatch, pad_id: int) -> int:
    """Return the number of pairs that have another one to be compared with, and so a loss."""
    if len(batch.scores):
        return len(batch.scores) if batch.scores.min() < batch.scores.max() else 0
    is_negative, columns = batch.is_negative, slice(len(batch.source))
    return int((is_negative[:, columns].any(dim=0) | is_negative.any(dim=1)).sum())


ENCODER: Task[PairBatch, TextEncoder] = Task(
    name="encoder",
    make_batch=make_batch,
    count=count_pairs,
    training_loss=ranking_loss,
    evaluate=evaluate_encoder,
    sizes=lambda lengths: lengths,  # of both texts
)


def make_scored_batch(examples: Sequence[Example], config: ArchitectureConfig) -> LabelledBatch:
    """Return a batch of pairs, whose labels (B,) are their scores."""
    sources = [source for source, _ in examples]
    scores = torch.tensor([score / SCORE_UNIT for _, (score,) in examples])
    return LabelledBatch(pad(sources, config.pad_id), torch.tensor(list(map(len, sources))), scores)


RERANKING: Task[LabelledBatch, PretrainedReranker] = Task(
    name="reranking",
    make_batch=make_scored_batch,
    count=count_texts,
    training_loss=label_loss,
    evaluate=evaluate_reranking,
)
