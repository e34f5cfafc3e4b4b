"""Log-probabilities, alternatives and scores are those of the PyTorch model, whatever shaped the choice of tokens."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from model.transformer import Transformer
from service.engine.request import DecodingParameters, GenerateRequest, Target
from service.runtime.ort import OnnxRunner
from tests.equality.comparing import forced_log_probs
from tests.equality.running import make_request, run

SHAPED: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 15}
PREFIX = (268, 301)  # two tokens like any other
SEARCHES = {
    "greedy": DecodingParameters(),
    "shaped greedy": DecodingParameters(**SHAPED),
    "sampled": DecodingParameters(do_sample=True, seed=5, temperature=1.5, top_p=0.95),
    "shaped sampled": DecodingParameters(do_sample=True, seed=6, top_k=50, **SHAPED),
    "beams": DecodingParameters(num_beams=4, num_return_sequences=3, length_penalty=0.6),
    "shaped beams": DecodingParameters(num_beams=4, num_return_sequences=4, length_penalty=2.0, **SHAPED),
}


def assert_model_says(model: Transformer, request: GenerateRequest, target: Target) -> list[float]:
    """Compare every token's numbers, prefix included; returns PyTorch's log-probabilities."""
    ids = tuple(token.id for token in target.tokens)
    rows = forced_log_probs(model, replace(request, target_prefix=()), ids)  # (T, V)
    expected = rows[np.arange(len(ids)), ids]
    np.testing.assert_allclose([token.logprob for token in target.tokens], expected, atol=1e-4)
    for row, token in zip(rows, target.tokens, strict=True):
        others, logprobs = zip(*token.alternatives, strict=True)
        np.testing.assert_allclose(logprobs, np.sort(row)[: -len(others) - 1 : -1], atol=1e-4)
        np.testing.assert_allclose(logprobs, row[list(others)], atol=1e-4)
        assert len(set(others)) == len(others)
    return [float(value) for value in expected]


@pytest.mark.parametrize("prefix", [(), PREFIX])
@pytest.mark.parametrize("search", SEARCHES)
def test_tokens_have_the_models_own_log_probabilities(
    search: str,
    prefix: tuple[int, ...],
    model: Transformer,
    runner: OnnxRunner,
    sources: list[tuple[int, ...]],
) -> None:
    parameters = replace(SEARCHES[search], top_logprobs=5)
    requests = [make_request(source, parameters=parameters, target_prefix=prefix) for source in sources[:20]]
    power = parameters.length_penalty if parameters.num_beams > 1 else 0.0
    for request, result in zip(requests, run(runner, requests), strict=True):
        for target in result.targets:
            generated = assert_model_says(model, request, target)[len(prefix) :]
            assert target.score == pytest.approx(sum(generated) / len(generated) ** power, abs=1e-3)


def test_a_forced_target_scores_what_pytorch_sums(
    model: Transformer, runner: OnnxRunner, sources: list[tuple[int, ...]]
) -> None:
    """Each sentence with another's source ids as its target, which ends with the end token."""
    parameters = DecodingParameters(max_new_tokens=0, top_logprobs=2)
    requests = [
        make_request(source, parameters=parameters, target_prefix=target) for source, target in pairwise(sources[:60])
    ]
    for request, result in zip(requests, run(runner, requests), strict=True):
        (target,) = result.targets
        assert target.finish_reason == "forced"
        assert tuple(token.id for token in target.tokens) == request.target_prefix
        expected = assert_model_says(model, request, target)
        assert sum(token.logprob for token in target.tokens) == pytest.approx(sum(expected), rel=1e-5)
