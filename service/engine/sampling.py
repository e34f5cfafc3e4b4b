"""Picks the next token of each row: the largest logit, a draw, or the one that the request dictates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from service.engine.request import DecodingParameters, GenerateRequest

Array = NDArray[Any]

BLOCK = 64  # tokens of a vocabulary that are summed, or compared, before they are looked at one by one


class TokenPicker(Protocol):
    """Picks one row's tokens from its full logits."""

    def pick(self, logits: Array, num_generated: int) -> int:
        """The token at place `num_generated` of the target; `logits` is (V,) and stays as it is."""
        ...


class ForcedPicker:
    """Picks the tokens of a given target."""

    def __init__(self, target: Sequence[int]) -> None:
        self._target = target

    def pick(self, logits: Array, num_generated: int) -> int:
        return self._target[num_generated]


class SamplingPicker:
    """Draws tokens with the request's own generator: the same seed draws the same tokens in any company.

    Temperature, then `top_k`, then `top_p`, each as Hugging Face defines it: `top_k` keeps what ties with the k-th
    logit, `top_p` keeps a token while those more probable than it hold less than `top_p` together.
    """

    def __init__(self, parameters: DecodingParameters, end_id: int) -> None:
        self._parameters = parameters
        self._end_id = end_id
        self._generator = np.random.Generator(np.random.PCG64(parameters.seed))

    def pick(self, logits: Array, num_generated: int) -> int:
        if num_generated < self._parameters.min_new_tokens:
            logits = logits.copy()
            logits[self._end_id] = -np.inf
        ids, weights = weigh_tokens(logits, self._parameters)
        return draw_token(ids, weights, self._parameters.top_p, self._generator.random)


def weigh_tokens(logits: Array, parameters: DecodingParameters) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
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


def draw_token(ids: NDArray[np.int64], weights: NDArray[np.float64], top_p: float, random: Callable[[], float]) -> int:
    """Draw one of `ids` by its weight, among the fewest and heaviest that hold `top_p` of all weight.

    Nothing is sorted: tokens are drawn from all until one belongs to those few. Whatever ranks behind a token that does
    not is left out of the next draw, so draws are few, and their odds among those that belong never change.

    Args:
        ids: (N,) rising; of tokens that weigh the same the first ranks before the others.
        weights: (N,) above or equal to 0, not all 0.
        top_p: above 0; 1 keeps every token.
        random: gives numbers of [0, 1).
    """
    limit = top_p * weights.sum()
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


def make_picker(request: GenerateRequest, end_id: int) -> TokenPicker | None:
    """The picker that a request needs; None where the largest logit is picked, for which the top ones are enough."""
    if request.forced_target is not None:
        return ForcedPicker(request.forced_target)
    if request.parameters.do_sample:
        return SamplingPicker(request.parameters, end_id)
    return None


def step_outputs(picker: TokenPicker | None) -> frozenset[str]:
    """The step's outputs from which a row's token is picked."""
    names = {"top_ids", "top_logits"} if picker is None else {"logits"}
    return frozenset(names | {"log_normalizer"})


def pick_tokens(
    outputs: Mapping[str, Array],
    pickers: Sequence[TokenPicker | None],
    num_generated: NDArray[np.int32],
    min_new_tokens: NDArray[np.int32],
    end_id: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Pick every row's next token.

    Args:
        outputs: the step's, with what `step_outputs` names for each row.
        pickers: (B,) None for a row that takes the largest logit.
        num_generated: (B,) tokens that each row has generated before.
        min_new_tokens: (B,) below that many tokens the end token is not picked.

    Returns:
        Token ids and their log-probabilities before temperature and filters, both (B,). A row whose logits are not
        finite has a log-probability that is not finite either.
    """
    log_normalizer = outputs["log_normalizer"].astype(np.float64)
    rows = np.arange(len(pickers))
    ids = np.zeros(len(pickers), np.int64)
    logits = np.full(len(pickers), np.nan)
    if "top_ids" in outputs:
        top_ids = outputs["top_ids"]
        end_is_first = (top_ids[:, 0] == end_id) & (num_generated < min_new_tokens)
        place = end_is_first.astype(np.int64)  # the second best where the best is the end and may not be
        ids[:] = top_ids[rows, place]
        logits[:] = outputs["top_logits"][rows, place]
    for row, picker in enumerate(pickers):
        if picker is not None and np.isfinite(log_normalizer[row]):
            ids[row] = picker.pick(outputs["logits"][row], int(num_generated[row]))
            logits[row] = outputs["logits"][row, ids[row]]
    with np.errstate(invalid="ignore"):  # infinity minus infinity: not finite, as promised
        return ids, logits - log_normalizer
