import contextlib
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from service.engine.request import DecodingParameters, GenerateRequest
from service.engine.sampling import ForcedPicker, SamplingPicker, draw_token, make_picker, pick_tokens, weigh_tokens

END = 2


def probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Slow and obvious: one filter after the other over sorted lists, as the words say."""
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
    return [weight / sum(weights) for weight in weights]


def weights_of_those_drawn(logits: NDArray[np.float32], parameters: DecodingParameters) -> NDArray[np.float64]:
    """(V,) what each token weighs if a draw from its middle gives it, else 0."""
    ids, weights = weigh_tokens(logits, parameters)
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    drawn = np.zeros(len(logits))
    for id_, weight, middle in zip(ids, weights, middles, strict=True):
        only_draw = iter([float(middle)])
        with contextlib.suppress(StopIteration):  # the token was refused, and another draw wanted
            if draw_token(ids, weights, parameters.top_p, only_draw.__next__) == id_:
                drawn[id_] = weight
    return drawn


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(4, 200),
    temperature=st.floats(0.05, 10),
    top_k=st.integers(0, 220),
    top_p=st.floats(0.01, 1.0),
)
def test_the_filters_are_the_obvious_ones(seed: int, size: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    parameters = DecodingParameters(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    filtered = weights_of_those_drawn(logits, parameters)
    filtered /= filtered.sum()
    expected = probabilities([float(x) for x in logits], temperature, top_k, top_p)
    np.testing.assert_allclose(filtered, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("logits", "parameters", "kept"),
    [
        ([1.0, 3.0, 3.0, 2.0], DecodingParameters(top_k=1), {1, 2}),  # what ties with the k-th stays
        ([1.0, 3.0, 3.0, 2.0], DecodingParameters(top_k=3), {1, 2, 3}),
        ([1.0, 3.0, 3.0, 2.0], DecodingParameters(top_k=9), {0, 1, 2, 3}),
        ([0.0, 0.0, 0.0, 0.0], DecodingParameters(top_p=0.5), {0, 1}),
        ([0.0, 0.0, 0.0, 0.0], DecodingParameters(top_p=0.51), {0, 1, 2}),
        ([0.0, 0.0, 0.0, 0.0], DecodingParameters(top_p=1e-300), {0}),  # never nothing
        ([0.0, 9.0, 0.0, 0.0], DecodingParameters(top_p=0.5), {1}),
        ([0.0, 1.0, 0.0, 0.0], DecodingParameters(temperature=1e-310), {1}),  # as good as greedy, and no overflow
    ],
)
def test_filters_keep_exactly(logits: list[float], parameters: DecodingParameters, kept: set[int]) -> None:
    weights = weights_of_those_drawn(np.array(logits, np.float32), parameters)
    assert set(np.flatnonzero(weights).tolist()) == kept


@pytest.mark.parametrize("top_k", [1, 2, 7, 8, 9, 70, 499])
def test_top_k_finds_the_best_wherever_they_lie_in_a_whole_vocabulary(top_k: int) -> None:
    logits = np.random.default_rng(top_k).normal(0, 3, 500).astype(np.float32)
    for arranged in (logits, np.sort(logits)):  # in order, the best lie side by side
        ids, _ = weigh_tokens(arranged, DecodingParameters(top_k=top_k))
        assert set(ids.tolist()) == set(np.argsort(-arranged)[:top_k].tolist())


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.8)])
def test_draws_follow_the_distribution(top_k: int, top_p: float) -> None:
    logits = np.array([0.5, -1.0, 1.5, 0.0, 1.0, -0.5], np.float32)
    parameters = DecodingParameters(do_sample=True, temperature=1.3, top_k=top_k, top_p=top_p, seed=3)
    picker, draws = SamplingPicker(parameters, END), 20_000
    counts = Counter(picker.pick(logits, place) for place in range(draws))
    expected = probabilities([float(x) for x in logits], 1.3, top_k, top_p)
    for token, probability in enumerate(expected):
        assert abs(counts[token] / draws - probability) < 0.015
        assert (counts[token] == 0) == (probability == 0)


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 300), share=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_token_whose_part_of_the_whole_holds_it(seed: int, size: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(size) < 0.5, rng.random(size), 0.0)
    weights[rng.integers(size)] = 1.0
    place = draw_token(np.arange(size), weights, 1.0, lambda: share)
    running, drawn = np.cumsum(weights), share * weights.sum()
    assert weights[place] > 0
    assert running[place] - weights[place] <= drawn + 1e-9
    assert drawn <= running[place] + 1e-9


@pytest.mark.parametrize("top_p", [0.05, 0.6, 1.0])
def test_draws_from_a_whole_vocabulary_follow_the_distribution(top_p: float) -> None:
    logits = np.random.default_rng(4).normal(0, 2, 500).astype(np.float32)
    picker, draws = SamplingPicker(DecodingParameters(do_sample=True, top_p=top_p, seed=8), END), 20_000
    counts = np.bincount([picker.pick(logits, place) for place in range(draws)], minlength=len(logits))
    expected = np.array(probabilities([float(x) for x in logits], 1.0, 0, top_p))
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    deviations = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(counts / draws - expected) <= 5 * deviations + 1e-12).all()


def test_the_end_token_is_not_drawn_before_its_time() -> None:
    logits = np.zeros(4, np.float32)
    logits[END] = 20.0
    picker = SamplingPicker(DecodingParameters(do_sample=True, min_new_tokens=5), END)
    drawn = [picker.pick(logits, place) for place in range(8)]
    assert END not in drawn[:5]
    assert drawn[5:] == [END] * 3


def test_picking_leaves_the_logits_as_they_are() -> None:
    logits = np.array([0.5, -1.0, 1.5, 0.0], np.float32)
    before = logits.copy()
    parameters = DecodingParameters(do_sample=True, min_new_tokens=5, top_k=2, top_p=0.5, temperature=2.0)
    SamplingPicker(parameters, END).pick(logits, 0)
    np.testing.assert_array_equal(logits, before)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest("r", (5, 6), 1e9, **fields)


def test_greedy_needs_no_picker_forcing_outranks_sampling() -> None:
    assert make_picker(request(), END) is None
    sampling = DecodingParameters(do_sample=True)
    assert isinstance(make_picker(request(parameters=sampling), END), SamplingPicker)
    assert isinstance(make_picker(request(parameters=sampling, forced_target=(3, END)), END), ForcedPicker)


def step_of(logits: list[list[float]]) -> dict[str, Any]:
    array = np.array(logits, np.float32)
    top_ids = np.argsort(-array, axis=1, kind="stable")[:, :2]
    return {
        "logits": array,
        "top_ids": top_ids,
        "top_logits": np.take_along_axis(array, top_ids, axis=1),
        "log_normalizer": np.log(np.exp(array).sum(axis=1)),
    }


def test_greedy_sampled_and_forced_rows_share_a_batch() -> None:
    logits = [[0.0, 1.0, 5.0, 2.0], [0.0, 1.0, 5.0, 2.0], [0.0, 9.0, 0.0, 0.0], [0.0, 1.0, 5.0, 2.0]]
    sampling = SamplingPicker(DecodingParameters(do_sample=True, top_k=1, temperature=0.1), END)
    pickers = [None, None, sampling, ForcedPicker([3, 0])]
    generated, minimum = np.array([0, 0, 4, 1], np.int32), np.array([0, 1, 0, 0], np.int32)
    ids, logprobs = pick_tokens(step_of(logits), pickers, generated, minimum, END)
    assert ids.tolist() == [2, 3, 1, 0]  # the second row may not end yet and takes the next best
    for row, id_ in enumerate(ids):  # before temperature and filters
        normalizer = math.log(sum(math.exp(logit) for logit in logits[row]))
        assert logprobs[row] == pytest.approx(logits[row][id_] - normalizer, abs=1e-6)


def test_rows_that_are_not_finite_say_so_and_touch_no_other() -> None:
    nan = math.nan
    outputs = step_of([[0.0, 1.0, 2.0, 3.0], [nan] * 4, [nan] * 4, [math.inf, 0.0, 0.0, 0.0]])
    sampling = SamplingPicker(DecodingParameters(do_sample=True), END)
    zeros = np.zeros(4, np.int32)
    _, logprobs = pick_tokens(outputs, [None, None, sampling, ForcedPicker([1])], zeros, zeros, END)
    assert np.isfinite(logprobs).tolist() == [True, False, False, False]
