"""Metrics of rankings and scores: those of an encoder that finds the other text of a pair, and of a
reranker.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer
from torch import Tensor

from sightline.model.architectures.encoder import TextEncoder
from sightline.model.architectures.pretrained import PretrainedEncoder, PretrainedReranker
from sightline.model.data.records import PairRecord, Record, texts_of
from sightline.model.data.similar_texts import documents_of, encode_pairs_of_texts, limits_of, scaled
from sightline.model.evaluation.length_groups import encode_truncated, outputs_of
from sightline.model.evaluation.result import Evaluation, Method, Share, only, sample_lines

MAX_RECORDS = 100  # of an evaluation of a reranker during a training, if they have no scores
MAX_PAIRS = 1000  # of an evaluation of an encoder during a training
NUM_CANDIDATES = 10  # documents of a query whose documents have no scores
CUT = 10  # of nDCG and of recall


def rank_of_best(scores: ArrayLike, gains: ArrayLike) -> int:
    """Return the rank, by scores, of the first text with the largest gain. Others with its score
    rank before it, so that a model with equal scores for all texts is not perfect.
    """
    values, is_best = np.asarray(scores), np.asarray(gains) == np.max(gains)
    return 1 + int((values[~is_best] >= values[is_best].max()).sum())


def ranked(scores: ArrayLike, gains: ArrayLike) -> NDArray[np.float64]:
    """Return gains in the order of scores, best first. Of equal scores, the worse gain is first."""
    values = np.asarray(gains, np.float64)
    return values[np.lexsort((values, -np.asarray(scores)))]


def ndcg(scores: ArrayLike, gains: ArrayLike) -> float:
    """Return the normalized discounted cumulative gain of the first `CUT` documents of a ranking
    (Järvelin and Kekäläinen 2002), with linear gains.
    """
    found, best = ranked(scores, gains)[:CUT], ranked(gains, gains)[:CUT]
    discounts = 1 / np.log2(np.arange(2, len(found) + 2))
    return float(found @ discounts / (best @ discounts))


def average_precision(scores: ArrayLike, gains: ArrayLike) -> float:
    """Return the mean over the ranks of right pairs, which have the largest gain, of the precision
    up to there.
    """
    is_right = ranked(scores, gains) == np.max(gains)
    return float((np.cumsum(is_right) / np.arange(1, len(is_right) + 1))[is_right].mean())


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
    metrics = {"Spearman": 100 * spearman(predicted, expected)}
    if len(np.unique(np.asarray(expected))) == 2:
        return {"average precision": 100 * average_precision(predicted, expected), **metrics}
    return metrics


def text_vectors(model: TextEncoder | PretrainedEncoder, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return the vectors (N, M) of texts, each of length 1, on the CPU. Texts that are too long are
    truncated.
    """
    return torch.stack(outputs_of(model, encode_truncated(tokenizer, texts, model.config.max_positions)))


def ranks(sources: Tensor, candidates: Tensor, pairs: Sequence[PairRecord], targets: Sequence[str]) -> list[int]:
    """Return the rank of the best right target of each source, given vectors of the sources of all
    pairs (N, M) and of `targets` (C, M), which are different texts and include those of the pairs.

    The targets of all pairs with the same source are right. A target that is the source itself is
    no candidate.
    """
    right: dict[str, set[int]] = defaultdict(set)
    index_of = {target: index for index, target in enumerate(targets)}
    for pair in pairs:
        right[pair.source].add(index_of[pair.target])
    source_ranks = []
    for vector, pair in zip(sources, pairs, strict=True):
        scores, gains = (candidates @ vector).numpy(), np.zeros(len(targets))  # (C,)
        gains[list(right[pair.source])] = 1
        own = {index_of[pair.source]} if pair.source in index_of else set[int]()
        scores[list(own - right[pair.source])] = -np.inf
        source_ranks.append(rank_of_best(scores, gains))
    return source_ranks


def evaluate_encoder(
    model: TextEncoder | PretrainedEncoder,
    tokenizer: Tokenizer,
    records: Sequence[Record],
    max_pairs: int | None = MAX_PAIRS,
) -> Evaluation:
    """Return recall and mean reciprocal rank of the first pairs, in percent; each source is
    compared with the targets and negatives of all. Pairs with scores have the correlation of scores
    and cosines instead.
    """
    pairs = only(records, PairRecord)[:max_pairs]
    sources = text_vectors(model, tokenizer, [pair.source for pair in pairs])
    scores = [pair.score for pair in pairs if pair.score is not None]
    if scores:
        cosines = (sources * text_vectors(model, tokenizer, [pair.target for pair in pairs])).sum(dim=1).tolist()
        predictions = [
            {"source": pair.source, "target": pair.target, "score": pair.score, "cosine": round(cosine, 4)}
            for pair, cosine in zip(pairs, cosines, strict=True)
        ]
        metrics = metrics_of_scores(cosines, scores)
        methods = dict.fromkeys(metrics, Method(len(pairs)))
        return Evaluation(metrics, sample_lines(predictions), methods, predictions)
    targets = list(dict.fromkeys(text for pair in pairs for text in texts_of(pair)[1:]))
    candidates = text_vectors(model, tokenizer, targets)
    nearest = [int((candidates @ vector).argmax()) for vector in sources]  # all scores at once may not fit in memory
    source_ranks = ranks(sources, candidates, pairs, targets)
    predictions = [
        {"source": pair.source, "target": pair.target, "nearest": targets[best], "rank": rank}
        for pair, best, rank in zip(pairs, nearest, source_ranks, strict=True)
    ]
    first, early = (Share(sum(rank <= most for rank in source_ranks), len(pairs)) for most in (1, CUT))
    metrics = {"recall@1": 100 * first.value, f"recall@{CUT}": 100 * early.value}
    metrics["MRR"] = 100 * float(np.mean([1 / rank for rank in source_ranks]))
    methods = dict.fromkeys(metrics, Method(len(pairs)))
    methods |= {"recall@1": Method(len(pairs), interval=first.percent_interval)}
    return Evaluation(metrics, sample_lines(predictions), methods, predictions, {"targets": len(targets)})


def evaluate_reranking(
    model: PretrainedReranker, tokenizer: Tokenizer, records: Sequence[Record], max_records: int | None = MAX_RECORDS
) -> Evaluation:
    """Return metrics of the first records, in percent: nDCG and mean reciprocal rank, if most
    queries have documents of different gains. If records have scores, all are used, and there are
    metrics of all pairs together.
    """
    pairs = only(records, PairRecord)
    known = [pair.score for pair in pairs if pair.score is not None]
    pairs = pairs if known else pairs[:max_records]
    documents: dict[str, dict[str, float]] = defaultdict(dict)  # gains by query and document
    for index, record in enumerate(pairs):
        found = [] if record.score is None else [(record.target, scaled(record.score, limits_of(known)))]
        for text, gain in found or documents_of(pairs, index, NUM_CANDIDATES):
            documents[record.source][text] = max(gain, documents[record.source].get(text, 0.0))
    read = [(query, text) for query, texts in documents.items() for text in texts]
    logits = torch.stack(outputs_of(model, encode_pairs_of_texts(tokenizer, read, model.config.max_positions)))
    gains = [documents[query][text] for query, text in read]
    predictions = [
        {"query": query, "document": text, "score": gain, "predicted": round(predicted, 4)}
        for (query, text), gain, predicted in zip(read, gains, logits.double().sigmoid().tolist(), strict=True)
    ]
    parts = logits.split_with_sizes([len(texts) for texts in documents.values()])
    rankings = [(scores, [*texts.values()]) for scores, texts in zip(parts, documents.values(), strict=True)]
    useful = [one for one in rankings if max(one[1]) > min(one[1])]
    metrics = dict[str, float]()
    if len(useful) > len(rankings) / 2:
        metrics[f"nDCG@{CUT}"] = 100 * float(np.mean([ndcg(*one) for one in useful]))
        metrics["MRR"] = 100 * float(np.mean([1 / rank_of_best(*one) for one in useful]))
    if known:
        metrics |= metrics_of_scores(logits, gains)
    methods = dict.fromkeys(metrics, Method(len(read)))
    return Evaluation(metrics, sample_lines(predictions), methods, predictions, {"queries": len(documents)})
