"""Log-probabilities, alternatives and scores equal those of PyTorch for all decoding parameters."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.model.architectures.transformer import Transformer
from sightline.model.rounding import Reference
from sightline.service.engine.request import GenerateRequest, Target
from sightline.service.parameters import FORCED, GenerateParameters
from sightline.service.runtime.ort import OnnxRunner
from tests.equality.comparing import forced_log_probs
from tests.equality.running import make_request, pairs, run
from tests.rounding import assert_within_rounding, rounding_bound

SHAPED: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 15}
PREFIX = (268, 301)  # two tokens like any other
SEARCHES = {
    "greedy": GenerateParameters(),
    "shaped greedy": GenerateParameters(**SHAPED),
    "sampled": GenerateParameters(do_sample=True, seed=5, temperature=1.5, top_p=0.95),
    "shaped sampled": GenerateParameters(do_sample=True, seed=6, top_k=50, **SHAPED),
    "beams": GenerateParameters(num_beams=4, num_return_sequences=3, length_penalty=0.6),
    "shaped beams": GenerateParameters(num_beams=4, num_return_sequences=4, length_penalty=2.0, **SHAPED),
}

# Pairs only in the slow tests; each search keeps one case, and greedy search keeps both.
SLOW = {
    *((search, "plain") for search in ("shaped greedy", "shaped sampled", "shaped beams")),
    *((search, "prefixed") for search in ("sampled", "beams")),
}


def largest(rows: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the largest values of each row, in descending order."""
    return np.sort(np.partition(rows, -count, axis=1)[:, -count:], axis=1)[:, ::-1]


def assert_model_says(models: Reference[Transformer], given: Sequence[tuple[GenerateRequest, Target]]) -> None:
    """Compare the numbers of every token, including prefixes, with PyTorch.

    All targets have one limit, because the error of the few tokens of one target in two random
    directions can be small by chance.
    """
    tokens = [token for _, target in given for token in target.tokens]
    others = np.array([[id_ for id_, _ in token.alternatives] for token in tokens])  # (T, N)
    assert all(len(set(row)) == len(row) for row in others.tolist())

    def compute(model: Transformer) -> dict[str, NDArray[Any]]:
        rows = np.concatenate(
            [
                forced_log_probs(model, replace(request, target_prefix=()), tuple(token.id for token in target.tokens))
                for request, target in given
            ]
        )  # (T, V)
        return {
            "logprobs": rows[np.arange(len(tokens)), [token.id for token in tokens]],
            "best": largest(rows, others.shape[1]),
            "others": np.take_along_axis(rows, others, axis=1),
        }

    alternatives = np.array([[logprob for _, logprob in token.alternatives] for token in tokens])
    numbers = {"logprobs": np.array([token.logprob for token in tokens]), "best": alternatives, "others": alternatives}
    assert_within_rounding(models, compute, numbers)


@pytest.mark.parametrize(("search", "prefix"), pairs(SEARCHES, {"plain": (), "prefixed": PREFIX}, SLOW))
def test_tokens_have_the_models_own_log_probabilities(
    search: str,
    prefix: tuple[int, ...],
    models: Reference[Transformer],
    runner: OnnxRunner,
    sources: list[tuple[int, ...]],
) -> None:
    parameters = SEARCHES[search].model_copy(update={"top_logprobs": 5})
    requests = [make_request(source, parameters=parameters, target_prefix=prefix) for source in sources[:6]]
    power = parameters.length_penalty if parameters.num_beams > 1 else 0.0
    results = run(runner, requests)
    given = [(request, target) for request, result in zip(requests, results, strict=True) for target in result.targets]
    assert_model_says(models, given)
    for _, target in given:
        own = np.array([token.logprob for token in target.tokens[len(prefix) :]])
        expected = own.sum() / len(own) ** power
        assert target.score == pytest.approx(expected, rel=0, abs=rounding_bound(len(own), -expected))


def test_a_forced_target_scores_what_pytorch_sums(
    models: Reference[Transformer], runner: OnnxRunner, sources: list[tuple[int, ...]]
) -> None:
    """Score each sentence with the source ids of another one as its target."""
    parameters = FORCED.model_copy(update={"top_logprobs": 2})
    requests = [
        make_request(source, parameters=parameters, target_prefix=target) for source, target in pairwise(sources[:30])
    ]
    given = []
    for request, result in zip(requests, run(runner, requests), strict=True):
        (target,) = result.targets
        assert target.finish_reason == "forced"
        assert tuple(token.id for token in target.tokens) == request.target_prefix
        given.append((request, target))
    assert_model_says(models, given)
