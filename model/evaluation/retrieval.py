"""Recall and reciprocal rank of an encoder that finds the other text of a pair."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sightline.model.architectures.encoder import TextEncoder
from sightline.model.architectures.pretrained import PretrainedEncoder
from sightline.model.data.records import PairRecord, Record, texts_of
from sightline.model.evaluation.length_groups import device_of, encode_truncated, grouped, padded
from sightline.model.evaluation.ranking import metrics_of_scores
from sightline.model.evaluation.result import Evaluation, Method, shortened
from sightline.model.evaluation.share import Share

MAX_PAIRS = 1000
NUM_SAMPLES, NUM_NEIGHBOURS = 3, 2


@torch.inference_mode()
def text_vectors(model: TextEncoder | PretrainedEncoder, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return the vectors (N, M) of texts, each of length 1, on the CPU. Texts that are too long are
    truncated.
    """
    config, device = model.config, device_of(model)
    rows = encode_truncated(tokenizer, texts, config.max_positions)
    order, vectors = list[int](), list[Tensor]()
    for group in grouped(list(map(len, rows))):
        order += group
        vectors.append(model(*padded([rows[index] for index in group], config.pad_id, device)).cpu())
    return torch.cat(vectors)[torch.tensor(order).argsort()]


def ranks(sources: Tensor, candidates: Tensor, pairs: Sequence[PairRecord], targets: Sequence[str]) -> list[int]:
    """Return the rank of the best right target of each source, 1 for the best, given vectors of the
    sources of all pairs (N, M) and of `targets` (C, M).

    The targets of all pairs with the same source are right. A target that is the source itself is
    no candidate. Wrong targets with the score of the right one rank before it, so that a model with
    equal vectors for all texts is not perfect. `targets` are different texts, which include those
    of the pairs.
    """
    right: dict[str, set[int]] = defaultdict(set)
    index_of = {target: index for index, target in enumerate(targets)}
    for pair in pairs:
        right[pair.source].add(index_of[pair.target])
    source_ranks = []
    for vector, pair in zip(sources, pairs, strict=True):
        row = candidates @ vector  # (C,)
        is_right = torch.zeros(len(targets), dtype=torch.bool)
        is_right[list(right[pair.source])] = True
        is_wrong = ~is_right
        if pair.source in index_of:
            is_wrong[index_of[pair.source]] = False
        source_ranks.append(1 + int((row[is_wrong] >= row[is_right].max()).sum()))
    return source_ranks


def retrieval_fields(
    model: TextEncoder | PretrainedEncoder, tokenizer: Tokenizer, pairs: Sequence[PairRecord]
) -> dict[str, Any]:
    """Return recall and mean reciprocal rank in percent as fields of a report; each source is
    compared with the targets and negatives of all pairs. Pairs with scores have the correlation of
    scores and cosines instead.
    """
    scores = [pair.score for pair in pairs if pair.score is not None]
    if scores:
        one, other = (text_vectors(model, tokenizer, list(side)) for side in zip(*map(texts_of, pairs), strict=True))
        cosines = (one * other).sum(dim=1).tolist()
        samples = [
            f"{shortened(pair.source, 60)} | {shortened(pair.target, 60)} | score {pair.score:g} | cosine {cosine:.2f}"
            for pair, cosine in zip(pairs[:NUM_SAMPLES], cosines, strict=False)
        ]
        rows = [
            {"source": pair.source, "target": pair.target, "score": pair.score, "cosine": cosine}
            for pair, cosine in zip(pairs, cosines, strict=True)
        ]
        metrics = metrics_of_scores(cosines, scores)
        return {"pairs": len(pairs), "metrics": metrics, "predictions": rows, "samples": samples}
    targets = list(dict.fromkeys(text for pair in pairs for text in texts_of(pair)[1:]))
    sources, candidates = (
        text_vectors(model, tokenizer, [pair.source for pair in pairs]),
        text_vectors(model, tokenizer, targets),
    )
    nearest = [int((candidates @ vector).argmax()) for vector in sources]  # all scores at once may not fit in memory
    source_ranks = ranks(sources, candidates, pairs, targets)
    first = Share(sum(rank == 1 for rank in source_ranks), len(source_ranks))
    return {
        "pairs": len(pairs),
        "targets": len(targets),
        "recall_at_1": round(100 * first.value, 2),
        "interval_95": [round(100 * end, 2) for end in first.interval],
        "recall_at_10": round(100 * sum(rank <= 10 for rank in source_ranks) / len(source_ranks), 2),
        "mrr": round(100 * sum(1 / rank for rank in source_ranks) / len(source_ranks), 2),
        "predictions": [
            {"source": pair.source, "target": pair.target, "nearest": targets[best], "rank": rank}
            for pair, best, rank in zip(pairs, nearest, source_ranks, strict=True)
        ],
        "samples": _neighbours(sources[:NUM_SAMPLES] @ candidates.T, pairs, targets),
    }


def _neighbours(scores: Tensor, pairs: Sequence[PairRecord], targets: Sequence[str]) -> list[str]:
    lines = []
    for row, pair in zip(scores, pairs, strict=False):
        best = row.topk(min(NUM_NEIGHBOURS, len(targets)))
        nearest = [
            f"{shortened(targets[index], 60)} ({score:.2f})"
            for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        lines.append(
            f"source: {shortened(pair.source, 60)} | expected: {shortened(pair.target, 60)} | "
            f"nearest: {', '.join(nearest)}"
        )
    return lines


def evaluate_encoder(
    model: TextEncoder | PretrainedEncoder, tokenizer: Tokenizer, records: Sequence[Record]
) -> Evaluation:
    """Return recall@1 and the mean reciprocal rank of the first `MAX_PAIRS` pairs, in percent."""
    pairs = [record for record in records if isinstance(record, PairRecord)][:MAX_PAIRS]
    if not pairs:
        return Evaluation({})
    fields = retrieval_fields(model, tokenizer, pairs)
    metrics = fields.get("metrics") or {"recall@1": fields["recall_at_1"], "MRR": fields["mrr"]}
    return Evaluation(metrics, tuple(fields["samples"]), dict.fromkeys(metrics, Method(len(pairs))))
