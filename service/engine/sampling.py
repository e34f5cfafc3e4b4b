"""Sampling of the next token of a row."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.runner import Array

BLOCK = 64  # tokens per block in searches that process whole blocks before single tokens


class Sampler:
    """Samples tokens with its own random generator, independent of the rest of the batch.

    Temperature, `top_k`, `top_p`, `min_p` and `typical_p` have the semantics of Hugging Face
    Transformers. `top_k` also keeps tokens that tie with the k-th logit. `top_p` keeps a token if
    the more probable tokens have a total probability below `top_p`.
    """

    def __init__(self, parameters: GenerateParameters, seed: int) -> None:
        self._parameters = parameters
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def draw(self, logits: Array) -> int:
        """Sample a token id from logits (V,), never one with a logit of minus infinity."""
        parameters = self._parameters
        ids, weights = weigh_tokens(logits, parameters)
        total = float(weights.sum())
        if parameters.min_p > 0:
            kept = weights >= parameters.min_p * weights.max()
            ids, weights = ids[kept], weights[kept]
        if parameters.typical_p < 1.0:
            indices = typical_indices(weights, parameters.top_p * total, parameters.typical_p)
            return draw_token(ids[indices], weights[indices], 1.0, self._generator.random)
        return draw_token(ids, weights, parameters.top_p, self._generator.random, total)


def typical_indices(weights: NDArray[np.float64], limit: float, typical_p: float) -> NDArray[np.int64]:
    """Return the indices of the most typical tokens in ascending order.

    A token is more typical the closer its information content is to the entropy of the distribution
    (Meister et al. 2023, Locally Typical Sampling, section 4). The total probability of the tokens
    is at least `typical_p`. Only the heaviest tokens up to the total weight `limit` are considered,
    as with `top_p`. `weights` is (N,), non-negative, not all 0.
    """
    heaviest = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[heaviest]) - weights[heaviest]
    considered = heaviest[(before < limit) & (weights[heaviest] > 0)]
    probabilities = weights[considered] / weights[considered].sum()
    information = -np.log(probabilities)
    distance = np.abs(information - probabilities @ information)
    order = np.argsort(distance, kind="stable")
    last = min(int((probabilities[order].cumsum() < typical_p).sum()), len(order) - 1)
    return np.sort(considered[distance <= distance[order[last]]])


def weigh_tokens(logits: Array, parameters: GenerateParameters) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Apply `top_k` and temperature to logits (V,).

    Returns token ids in ascending order and their weights, which are proportional to the
    probabilities. Both have the shape (N,), N <= V.
    """
    ids = np.arange(len(logits))
    # Temperature does not change the order of logits, so `top_k` can be applied first.
    if 0 < parameters.top_k < len(logits):
        ids = np.flatnonzero(logits >= _largest(logits, parameters.top_k))
        logits = logits[ids]
    exponents = logits.astype(np.float64)
    exponents -= exponents.max()
    with np.errstate(over="ignore"):  # at temperatures near 0 all exponents but the largest become -inf
        exponents /= parameters.temperature
    return ids, np.exp(exponents)


def draw_token(
    ids: NDArray[np.int64],
    weights: NDArray[np.float64],
    top_p: float,
    random: Callable[[], float],
    total: float | None = None,
) -> int:
    """Sample one token id with nucleus filtering (`top_p`), without sorting the weights.

    A token is sampled from all tokens until it is in the nucleus: the smallest set of the heaviest
    tokens whose total weight is at least `top_p` of all weight. After a rejected token, all tokens
    that rank below it are excluded from the next draw, because they cannot be in the nucleus
    either. Rejection does not change the relative probabilities within the nucleus.

    Args:
        ids: (N,), ascending. Of tokens with equal weights, the first ranks highest.
        weights: (N,), non-negative, not all 0.
        top_p: greater than 0; 1 keeps all tokens.
        random: returns random numbers in [0, 1).
        total: total weight before other filters removed tokens; the sum of `weights` if None.
    """
    limit = top_p * (weights.sum() if total is None else total)
    while True:
        index = _index_at(weights, random())
        if top_p >= 1.0:
            return int(ids[index])
        is_better = weights > weights[index]
        is_better[:index] |= weights[:index] == weights[index]
        better = weights[is_better]
        if better.sum() < limit:
            return int(ids[index])
        ids, weights = ids[is_better], better


def best_indices(values: Array, count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest values; ties are ordered by index."""
    indices = np.flatnonzero(values >= _largest(values, min(count, len(values))))
    return indices[np.argsort(-values[indices], kind="stable")][:count]


def _largest(values: Array, rank: int) -> Any:
    """Return the value with a rank in descending order; the largest value has rank 1."""
    maxima = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    # At least `rank` values are greater than or equal to the block maximum of that rank, so smaller
    # values can be skipped.
    if rank <= len(maxima):
        values = values[values >= np.partition(maxima, -rank)[-rank]]
    return np.partition(values, -rank)[-rank]


def _index_at(weights: NDArray[np.float64], share: float) -> int:
    """Return the first index at which the cumulative sum exceeds `share` of the total weight.

    The weight at this index is never 0.
    """
    # Search in blocks first: a cumulative sum over the vocabulary would take most of a draw's time.
    block_weights = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK))
    block, rest = _locate(block_weights, share * block_weights.sum())
    start = block * BLOCK
    return start + _locate(weights[start : start + BLOCK], rest)[0]


def _locate(weights: NDArray[np.float64], weight: float) -> tuple[int, float]:
    """Return the first index at which the cumulative sum exceeds `weight`, and `weight` minus the
    sum of the weights before it.
    """
    sums = weights.cumsum()
    # Rounding can make `weight` equal to the total.
    index = int(sums.searchsorted(min(weight, np.nextafter(sums[-1], 0.0)), side="right"))
    return index, weight - (sums[index - 1] if index else 0.0)
