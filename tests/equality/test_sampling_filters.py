"""The tokens that sampling may draw are those that Hugging Face's logits processors keep."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sightline.service.engine.sampling import Sampler, typical_indices, weigh_tokens
from sightline.service.parameters import GenerateParameters

NUM_DRAWS = 4_000  # each token with a probability of at least 1 / NUM_DRAWS is drawn
CASES = (
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.9},
    {"min_p": 0.3, "top_k": 20, "temperature": 2.0},
    {"typical_p": 0.2},
    {"typical_p": 0.7, "temperature": 0.5},
    {"typical_p": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tokens_that_may_be_drawn_are_those_of_transformers(case: dict[str, float], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 400).astype(np.float32)
    parameters = GenerateParameters(do_sample=True, **case)  # type: ignore[arg-type]
    scores = torch.from_numpy(logits)[None].double()
    for warper in (
        TemperatureLogitsWarper(parameters.temperature),
        *([TopKLogitsWarper(parameters.top_k)] if parameters.top_k else []),
        TopPLogitsWarper(parameters.top_p),
        *([MinPLogitsWarper(parameters.min_p)] if parameters.min_p else []),
        *([TypicalLogitsWarper(parameters.typical_p)] if parameters.typical_p < 1 else []),
    ):
        scores = warper(torch.zeros((1, 1), dtype=torch.long), scores)
    expected = set(torch.nonzero(scores[0] > -torch.inf)[:, 0].tolist())
    assert possible_draws(logits, parameters) == expected


@dataclass
class SpreadNumbers:
    """Random numbers, of which the first of a draw is chosen so that no likely token is missed."""

    first: list[float]
    rest: Callable[[], float] = np.random.Generator(np.random.PCG64(7)).random

    def random(self) -> float:
        return self.first.pop() if self.first else self.rest()


def possible_draws(logits: np.ndarray, parameters: GenerateParameters) -> set[int]:
    """Return the tokens that sampling selects with numbers of the whole range, or that `typical_p`
    keeps.
    """
    if parameters.typical_p < 1:
        ids, weights = weigh_tokens(logits, parameters)
        total = weights.sum()
        kept = weights >= parameters.min_p * weights.max()
        ids, weights = ids[kept], weights[kept]
        return set(ids[typical_indices(weights, parameters.top_p * total, parameters.typical_p)].tolist())
    sampler, drawn = Sampler(parameters, 7), set[int]()
    for number in np.arange(0, 1, 1 / NUM_DRAWS).tolist():
        sampler._generator = SpreadNumbers([number])  # type: ignore[assignment]
        drawn.add(sampler.draw(logits))
    return drawn
