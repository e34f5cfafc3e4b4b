import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sightline.service.engine.sampling import Sampler, draw_token, weigh_tokens
from sightline.service.parameters import GenerateParameters


def probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0, typical_p: float = 1.0
) -> list[float]:
    """Reference implementation: apply one filter after the other to sorted lists."""
    scaled = [logit / temperature for logit in logits]
    if top_k:
        kth = sorted(scaled, reverse=True)[min(top_k, len(scaled)) - 1]
        scaled = [logit if logit >= kth else -math.inf for logit in scaled]
    weights = [math.exp(logit - max(scaled)) for logit in scaled]
    if top_p < 1.0:
        total, held, kept = sum(weights), 0.0, set()
        for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
            if held < top_p * total:
                kept.add(token)
            held += weights[token]
        weights = [weight if token in kept else 0.0 for token, weight in enumerate(weights)]
    weights = [weight if weight >= min_p * max(weights) else 0.0 for weight in weights]
    if typical_p < 1.0:
        found = {token: weight / sum(weights) for token, weight in enumerate(weights) if weight}
        entropy = -sum(p * math.log(p) for p in found.values())
        held, last = 0.0, 0.0
        for token in sorted(found, key=lambda token: abs(-math.log(found[token]) - entropy)):
            if held < typical_p:
                last = abs(-math.log(found[token]) - entropy)
            held += found[token]
        weights = [
            weight if token in found and abs(-math.log(found[token]) - entropy) <= last else 0.0
            for token, weight in enumerate(weights)
        ]
    return [weight / sum(weights) for weight in weights]


def weights_of_those_drawn(logits: NDArray[np.float32], parameters: GenerateParameters) -> NDArray[np.float64]:
    """Return (V,): the weight of each token that can be drawn, 0 for other tokens."""
    ids, weights = weigh_tokens(logits, parameters)
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    drawn = np.zeros(len(logits))
    for id_, weight, middle in zip(ids, weights, middles, strict=True):
        only_draw = iter([float(middle)])
        with contextlib.suppress(StopIteration):  # the token was rejected and another draw requested
            if draw_token(ids, weights, parameters.top_p, only_draw.__next__) == id_:
                drawn[id_] = weight
    return drawn


def draw_many(
    logits: NDArray[np.float32], parameters: GenerateParameters, expected: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return how often each token was drawn, after a comparison with the expected probabilities."""
    sampler, draws = Sampler(parameters, 3), 5_000
    counts = np.bincount([sampler.draw(logits) for _ in range(draws)], minlength=len(logits))
    assert not counts[expected == 0].any()
    deviations = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(counts / draws - expected) <= 5 * deviations + 1e-12).all()
    return counts


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(4, 200),
    temperature=st.floats(0.05, 10),
    top_k=st.integers(0, 220),
    top_p=st.floats(0.01, 1.0),
)
def test_filters_equal_the_slow_twin(seed: int, size: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    parameters = GenerateParameters(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    filtered = weights_of_those_drawn(logits, parameters)
    filtered /= filtered.sum()
    expected = probabilities([float(x) for x in logits], temperature, top_k, top_p)
    np.testing.assert_allclose(filtered, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("logits", "parameters", "kept"),
    [
        ([1.0, 3.0, 3.0, 2.0], GenerateParameters(top_k=1), {1, 2}),  # what ties with the k-th stays
        ([1.0, 3.0, 3.0, 2.0], GenerateParameters(top_k=3), {1, 2, 3}),
        ([1.0, 3.0, 3.0, 2.0], GenerateParameters(top_k=9), {0, 1, 2, 3}),
        ([0.0, 0.0, 0.0, 0.0], GenerateParameters(top_p=0.5), {0, 1}),
        ([0.0, 0.0, 0.0, 0.0], GenerateParameters(top_p=0.51), {0, 1, 2}),
        ([0.0, 0.0, 0.0, 0.0], GenerateParameters(top_p=1e-300), {0}),  # never nothing
        ([0.0, 9.0, 0.0, 0.0], GenerateParameters(top_p=0.5), {1}),
        ([0.0, 1.0, 0.0, 0.0], GenerateParameters(temperature=1e-310), {1}),  # as good as greedy, and no overflow
    ],
)
def test_filters_keep_exactly_the_expected_tokens(
    logits: list[float], parameters: GenerateParameters, kept: set[int]
) -> None:
    weights = weights_of_those_drawn(np.array(logits, np.float32), parameters)
    assert set(np.flatnonzero(weights).tolist()) == kept


@pytest.mark.parametrize("top_k", [1, 2, 7, 8, 9, 70, 499])
def test_top_k_finds_the_best_tokens_anywhere_in_a_large_vocabulary(top_k: int) -> None:
    logits = np.random.default_rng(top_k).normal(0, 3, 500).astype(np.float32)
    for arranged in (logits, np.sort(logits)):  # in order, the best lie side by side
        ids, _ = weigh_tokens(arranged, GenerateParameters(top_k=top_k))
        assert set(ids.tolist()) == set(np.argsort(-arranged)[:top_k].tolist())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "typical_p"),
    [
        *[(0, 1.0, 0.0, 1.0), (3, 1.0, 0.0, 1.0), (0, 0.7, 0.0, 1.0), (5, 0.8, 0.0, 1.0)],
        *[(0, 1.0, 0.3, 1.0), (0, 0.7, 0.25, 1.0), (5, 0.95, 0.4, 1.0), (0, 1.0, 1.0, 1.0)],
        *[(0, 1.0, 0.0, 0.5), (0, 1.0, 0.0, 0.2), (4, 0.9, 0.2, 0.8), (0, 0.8, 0.0, 0.9)],
    ],
)
def test_draws_follow_the_distribution(top_k: int, top_p: float, min_p: float, typical_p: float) -> None:
    logits = np.array([0.5, -1.0, 1.5, 0.0, 1.0, -0.5], np.float32)
    parameters = GenerateParameters(
        do_sample=True, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p
    )
    expected = np.array(probabilities([float(x) for x in logits], 1.3, top_k, top_p, min_p, typical_p))
    assert ((draw_many(logits, parameters, expected) == 0) == (expected == 0)).all()


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 300), share=st.floats(0, 1, exclude_max=True))
def test_a_random_number_selects_the_token_by_cumulative_probability(seed: int, size: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(size) < 0.5, rng.random(size), 0.0)
    weights[rng.integers(size)] = 1.0
    index = draw_token(np.arange(size), weights, 1.0, lambda: share)
    running, drawn = np.cumsum(weights), share * weights.sum()
    assert weights[index] > 0
    assert running[index] - weights[index] <= drawn + 1e-9
    assert drawn <= running[index] + 1e-9


@pytest.mark.parametrize("top_p", [0.05, 0.6, 1.0])
def test_draws_from_a_large_vocabulary_follow_the_distribution(top_p: float) -> None:
    logits = np.random.default_rng(4).normal(0, 2, 500).astype(np.float32)
    expected = np.array(probabilities([float(x) for x in logits], 1.0, 0, top_p))
    draw_many(logits, GenerateParameters(do_sample=True, top_p=top_p), expected)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.99), (6, 0.5)])
def test_a_forbidden_token_is_never_drawn(top_k: int, top_p: float) -> None:
    """Also if `top_k` keeps more tokens than are allowed."""
    logits = np.array([-np.inf, 2.0, -np.inf, 0.0, -np.inf, -np.inf], np.float32)
    sampler = Sampler(GenerateParameters(do_sample=True, temperature=5.0, top_k=top_k, top_p=top_p), 0)
    assert {sampler.draw(logits) for _ in range(200)} == ({1} if top_p == 0.5 else {1, 3})


def test_equal_seeds_draw_equal_tokens_and_others_do_not() -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    one, same, other = (
        [sampler.draw(logits) for _ in range(20)]
        for sampler in (Sampler(GenerateParameters(do_sample=True), seed) for seed in (7, 7, 8))
    )
    assert one == same
    assert one != other


def test_drawing_does_not_change_the_logits() -> None:
    logits = np.array([0.5, -1.0, 1.5, 0.0], np.float32)
    before = logits.copy()
    Sampler(GenerateParameters(do_sample=True, top_k=2, top_p=0.5, temperature=2.0), 0).draw(logits)
    np.testing.assert_array_equal(logits, before)
