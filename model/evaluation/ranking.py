"""Metrics of rankings and scores: those of a reranker, and correlations."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer

from sightline.model.architectures.pretrained import PretrainedReranker
from sightline.model.data.records import PairRecord, Record
from sightline.model.data.similar_texts import documents_of, encode_pairs_of_texts, limits_of, scaled
from sightline.model.evaluation.length_groups import device_of, grouped, padded
from sightline.model.evaluation.result import Evaluation, Method, shortened

MAX_RECORDS = 100  # of an evaluation during a training, if they have no scores
NUM_CANDIDATES = 10  # documents of a query whose documents have no scores
NUM_SAMPLES = 3
CUT = 10  # of nDCG


def ranked(scores: ArrayLike, gains: ArrayLike) -> NDArray[np.float64]:
    """Return gains in the order of scores, best first. Of equal scores, the worse gain is first."""
    values = np.asarray(gains, np.float64)
    return values[np.lexsort((values, -np.asarray(scores)))]


def ndcg(gains: NDArray[np.float64]) -> float:
    """Return the normalized discounted cumulative gain of the first `CUT` documents of a ranking
    (Järvelin and Kekäläinen 2002), with linear gains.
    """
    discounts = 1 / np.log2(np.arange(2, min(CUT, len(gains)) + 2))
    return float(gains[:CUT] @ discounts / (np.sort(gains)[::-1][:CUT] @ discounts))


def reciprocal_rank(gains: NDArray[np.float64]) -> float:
    """Return 1 / rank of the first of the best documents of a ranking."""
    return 1 / (1 + int(gains.argmax()))


def average_precision(gains: NDArray[np.float64]) -> float:
    """Return the mean over the ranks of right pairs, which have the largest gain, of the precision
    up to there.
    """
    is_right = gains == gains.max()
    return float((np.cumsum(is_right) / np.arange(1, len(gains) + 1))[is_right].mean())


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Return the correlation of ranks, of which equal numbers have the mean; 0 if all are equal."""
    ranks = []
    for values in (first, second):
        _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        if len(counts) == 1:
            return 0.0
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def metrics_of_scores(predicted: ArrayLike, expected: ArrayLike) -> dict[str, float]:
    """Return metrics of predicted scores in percent; the first is the average precision if pairs
    are only right or wrong.
    """
    metrics = {"Spearman": round(100 * spearman(predicted, expected), 2)}
    if len(np.unique(np.asarray(expected))) == 2:
        return {"average precision": round(100 * average_precision(ranked(predicted, expected)), 2), **metrics}
    return metrics


@torch.inference_mode()
def ranking_fields(model: PretrainedReranker, tokenizer: Tokenizer, records: Sequence[PairRecord]) -> dict[str, Any]:
    """Return metrics in percent as fields of a report: nDCG and mean reciprocal rank, if most
    queries have documents of different gains, and for scores also those of all pairs together.
    """
    known = [record.score for record in records if record.score is not None]
    documents: dict[str, dict[str, float]] = defaultdict(dict)  # gains by query and document
    for index, record in enumerate(records):
        found = [] if record.score is None else [(record.target, scaled(record.score, limits_of(known)))]
        for text, gain in found or documents_of(records, index, NUM_CANDIDATES):
            documents[record.source][text] = max(gain, documents[record.source].get(text, 0.0))
    pairs = [(query, text) for query, texts in documents.items() for text in texts]
    rows, device = encode_pairs_of_texts(tokenizer, pairs, model.config.max_positions), device_of(model)
    logits = np.zeros(len(rows))
    for group in grouped(list(map(len, rows))):
        logits[group] = model(*padded([rows[index] for index in group], model.config.pad_id, device)).cpu().numpy()
    start, rankings, samples, metrics = 0, list[NDArray[np.float64]](), list[str](), dict[str, float]()
    for query, texts in documents.items():
        scores, start = logits[start : start + len(texts)], start + len(texts)
        rankings.append(ranked(scores, [*texts.values()]))
        best = [*texts][int(scores.argmax())]
        samples.append(
            f"query: {shortened(query, 60)} | best of {len(texts)}: {shortened(best, 60)} | score {texts[best]:.3g}, "
            f"predicted {1 / (1 + math.exp(-scores.max())):.2f}"
        )
    useful = [gains for gains in rankings if gains.max() > gains.min()]
    if len(useful) > len(rankings) / 2:
        for name, metric in ((f"nDCG@{CUT}", ndcg), ("MRR", reciprocal_rank)):
            metrics[name] = round(100 * float(np.mean([*map(metric, useful)])), 2)
    if known:
        metrics |= metrics_of_scores(logits, [gain for texts in documents.values() for gain in texts.values()])
    rows_of_pairs = [
        {"query": query, "document": text, "score": documents[query][text], "predicted": 1 / (1 + math.exp(-logit))}
        for (query, text), logit in zip(pairs, logits.tolist(), strict=True)
    ]
    return {
        "pairs": len(pairs),
        "queries": len(documents),
        "metrics": metrics,
        "predictions": rows_of_pairs,
        "samples": samples[:NUM_SAMPLES],
    }


def evaluate_reranking(model: PretrainedReranker, tokenizer: Tokenizer, records: Sequence[Record]) -> Evaluation:
    """Return the metrics of records, at most `MAX_RECORDS` without scores."""
    pairs = [record for record in records if isinstance(record, PairRecord)]
    fields = ranking_fields(model, tokenizer, pairs if pairs[0].score is not None else pairs[:MAX_RECORDS])
    metrics = fields["metrics"]
    return Evaluation(metrics, tuple(fields["samples"]), dict.fromkeys(metrics, Method(fields["pairs"])))
