"""Picks the next token of each row: the largest logit, a draw, or the one that the request dictates."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from service.engine.request import DecodingParameters, GenerateRequest

Array = NDArray[Any]


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
        ids, weights = filter_tokens(logits, self._parameters)
        cumulative = np.cumsum(weights)
        drawn = self._generator.random() * cumulative[-1]
        # Rounding may carry the product up to the sum itself.
        place = min(int(np.searchsorted(cumulative, drawn, side="right")), len(ids) - 1)
        return int(ids[place])


def filter_tokens(logits: Array, parameters: DecodingParameters) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn and what each one's probability is proportional to, both (N,)."""
    ids = np.arange(len(logits))
    # Temperature does not change the order, so the few that `top_k` leaves are found first.
    if 0 < parameters.top_k < len(logits):
        ids = np.flatnonzero(logits >= np.partition(logits, -parameters.top_k)[-parameters.top_k])
    kept = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # next to no temperature: all but the best go to minus infinity, and the best is 0
        weights = np.exp((kept - kept.max()) / parameters.temperature)
    if parameters.top_p < 1.0:
        places = _top_p(weights, parameters.top_p)
        ids, weights = ids[places], weights[places]
    return ids, weights


def _top_p(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """The places of the smallest set of tokens that holds `top_p` of the weight, the heaviest first."""
    total = weights.sum()
    # What is left out here holds less than 1 - top_p all together, so it is surely outside: no need to sort it.
    candidates = np.flatnonzero(weights > 0.5 * (1.0 - top_p) * total / len(weights))
    falling = candidates[np.argsort(-weights[candidates])]
    held_by_better = np.concatenate(([0.0], np.cumsum(weights[falling])[:-1]))
    kept: NDArray[np.int64] = falling[held_by_better < top_p * total]
    return kept


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
