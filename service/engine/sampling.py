"""Draws the next token of a row."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.parameters import GenerateParameters

Array = NDArray[Any]

BLOCK = 64  # tokens of a vocabulary that are summed, or compared, before they are looked at one by one


class Sampler:
    """Draws tokens with the request's own generator: the same seed draws the same tokens in any company.

    Temperature, then `top_k`, `top_p`, `min_p` and `typical_p`, each as Hugging Face defines it: `top_k` keeps what
    ties with the k-th logit, `top_p` keeps a token while those more probable than it hold less than `top_p` together.
    """

    def __init__(self, parameters: GenerateParameters, seed: int) -> None:
        self._parameters = parameters
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def draw(self, logits: Array) -> int:
        """A token by its logits (V,); minus infinity is never drawn."""
        parameters = self._parameters
        ids, weights = weigh_tokens(logits, parameters)
        total = float(weights.sum())
        if parameters.min_p > 0:
            kept = weights >= parameters.min_p * weights.max()
            ids, weights = ids[kept], weights[kept]
        if parameters.typical_p < 1.0:
            places = typical_places(weights, parameters.top_p * total, parameters.typical_p)
            return draw_token(ids[places], weights[places], 1.0, self._generator.random)
        return draw_token(ids, weights, parameters.top_p, self._generator.random, total)


def typical_places(weights: NDArray[np.float64], limit: float, typical_p: float) -> NDArray[np.int64]:
    """Return the places of the most typical tokens, rising (Meister et al. 2023, Locally Typical Sampling, section 4).

    A token is the more typical the closer its information is to the entropy of the distribution.

    Args:
        weights: (N,) above or equal to 0, not all 0.
        limit: only the heaviest tokens are considered that hold this weight together, as `top_p` keeps them.
        typical_p: probability that the tokens hold together.
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
    """The tokens that `top_k` leaves and what each one's probability is proportional to, both (N,), ids rising."""
    ids = np.arange(len(logits))
    # Temperature does not change the order, so the few that `top_k` leaves are found first.
    if 0 < parameters.top_k < len(logits):
        ids = np.flatnonzero(logits >= _largest(logits, parameters.top_k))
        logits = logits[ids]
    exponents = logits.astype(np.float64)
    exponents -= exponents.max()
    with np.errstate(over="ignore"):  # next to no temperature: all but the best go to minus infinity, and the best is 0
        exponents /= parameters.temperature
    return ids, np.exp(exponents)


def draw_token(
    ids: NDArray[np.int64],
    weights: NDArray[np.float64],
    top_p: float,
    random: Callable[[], float],
    total: float | None = None,
) -> int:
    """Draw one of `ids` by its weight, among the fewest and heaviest that hold `top_p` of all weight.

    Nothing is sorted: tokens are drawn from all until one belongs to those few. Whatever ranks behind a token that does
    not is left out of the next draw, so draws are few, and their odds among those that belong never change.

    Args:
        ids: (N,) rising; of tokens that weigh the same the first ranks before the others.
        weights: (N,) above or equal to 0, not all 0.
        top_p: above 0; 1 keeps every token.
        random: gives numbers of [0, 1).
        total: all weight, where other filters have left out lighter tokens.
    """
    limit = top_p * (weights.sum() if total is None else total)
    while True:
        place = _place_at(weights, random())
        if top_p >= 1.0:
            return int(ids[place])
        is_better = weights > weights[place]
        is_better[:place] |= weights[:place] == weights[place]
        better = weights[is_better]
        if better.sum() < limit:
            return int(ids[place])
        ids, weights = ids[is_better], better


def best_places(values: Array, count: int) -> NDArray[np.int64]:
    """Where the `count` largest of all values are, the largest first and of equals the first."""
    places = np.flatnonzero(values >= _largest(values, min(count, len(values))))
    return places[np.argsort(-values[places], kind="stable")][:count]


def _largest(values: Array, rank: int) -> Any:
    """The value of that rank from 1, the largest first."""
    maxima = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    if rank <= len(maxima):  # as many values are no smaller than the maximum of this rank: the others need no look
        values = values[values >= np.partition(maxima, -rank)[-rank]]
    return np.partition(values, -rank)[-rank]


def _place_at(weights: NDArray[np.float64], share: float) -> int:
    """The place at which the running sum of the weights passes `share` of the whole; never one that weighs nothing."""
    # Of blocks first, then within one: a running sum over a whole vocabulary takes longer than all else in a draw.
    block_weights = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK))
    block, rest = _pass(block_weights, share * block_weights.sum())
    start = block * BLOCK
    return start + _pass(weights[start : start + BLOCK], rest)[0]


def _pass(weights: NDArray[np.float64], weight: float) -> tuple[int, float]:
    """The place at which the running sum passes `weight`, and what of it the places before leave."""
    sums = weights.cumsum()
    # Rounding may carry what is asked for up to the sum itself.
    place = int(sums.searchsorted(min(weight, np.nextafter(sums[-1], 0.0)), side="right"))
    return place, weight - (sums[place - 1] if place else 0.0)
