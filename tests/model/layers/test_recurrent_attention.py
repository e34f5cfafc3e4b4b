"""Scores and windows equal the equations of the papers, one row and position at a time."""

import math

import pytest
import torch
from torch import Tensor

from sightline.model.config import RecurrentConfig
from sightline.model.layers.recurrent_attention import SCORES, PredictedPosition, ScoreFunction, align

B, S = 3, 5
SIZES = {"encoder_size": 3, "decoder_size": 6, "attention_size": 4, "max_positions": 7}


def made(attention: str) -> tuple[ScoreFunction, Tensor, Tensor]:
    """Return a score function with states (B, H) and annotations (B, S, A)."""
    torch.manual_seed(0)
    query = "previous" if attention == "additive" else "current"
    config = RecurrentConfig(20, attention=attention, query=query, **SIZES)  # type: ignore[arg-type]
    return SCORES[attention](config).double(), torch.randn(B, 6).double(), torch.randn(B, S, 6).double()


def literal(attention: str, score: ScoreFunction, h: Tensor, hs: Tensor, position: int) -> Tensor:
    """Compute one score of a state (H,) and an annotation (A,) by the equation."""
    weights = dict(score.named_parameters())
    if attention == "dot":
        return h @ hs
    if attention == "general":
        return h @ weights["annotation.weight"] @ hs
    if attention == "reduced_rank":
        product = weights["state.weight"].T @ weights["annotation.weight"]  # U^T V
        return h @ product @ hs
    if attention == "location":
        return (weights["state.weight"] @ h + weights["state.bias"])[position]
    if attention == "concat":
        both = torch.cat((weights["state.weight"], weights["annotation.weight"]), dim=1)  # W
        return weights["weights.weight"][0] @ (both @ torch.cat((h, hs)) + weights["state.bias"]).tanh()
    inner = weights["state.weight"] @ h + weights["state.bias"] + weights["annotation.weight"] @ hs
    return weights["weights.weight"][0] @ inner.tanh()


@pytest.mark.parametrize("attention", SCORES)
@torch.no_grad()
def test_a_score_equals_its_equation(attention: str) -> None:
    score, states, annotations = made(attention)
    expected = [
        [literal(attention, score, state, hs, position) for position, hs in enumerate(row)]
        for state, row in zip(states, annotations, strict=True)
    ]
    given = score(states, score.keys(annotations))
    torch.testing.assert_close(given, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("attention", [name for name in SCORES if name not in ("dot", "location")])
def test_keys_have_the_width_that_the_score_requires(attention: str) -> None:
    score, _, annotations = made(attention)
    assert score.annotation is not None
    assert score.keys(annotations).shape == (B, S, score.annotation.out_features)


LENGTHS = torch.tensor([5, 3, 1])


@torch.no_grad()
def test_without_a_window_the_weights_are_a_softmax_over_the_real_source() -> None:
    scores = torch.randn(B, S)
    weights = align(scores, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        torch.testing.assert_close(weights[row, :length], scores[row, :length].softmax(0))
        assert not weights[row, length:].any()


@torch.no_grad()
def test_a_window_is_normalised_within_itself() -> None:
    """Luong et al. 2015, section 3.2: [p - D, p + D], what is outside the sentence ignored."""
    scores, centres = torch.randn(B, S), torch.tensor([2.0, 0.0, 0.0])
    weights = align(scores, LENGTHS, centres, radius=1)
    torch.testing.assert_close(weights[0, 1:4], scores[0, 1:4].softmax(0))
    torch.testing.assert_close(weights[1, :2], scores[1, :2].softmax(0))
    assert weights[2].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert not weights[0, [0, 4]].any()
    assert not weights[1, 2:].any()


@torch.no_grad()
def test_the_gaussian_is_centred_on_a_real_position_and_comes_after_the_softmax() -> None:
    scores, centres, radius = torch.randn(1, S), torch.tensor([1.7]), 2
    weights = align(scores, torch.tensor([S]), centres, radius, is_gaussian=True)
    inside = [s for s in range(S) if abs(s - 1.7) <= radius]
    total = sum(math.exp(scores[0, s]) for s in inside)
    sigma = radius / 2
    for s in range(S):
        expected = 0.0
        if s in inside:
            expected = math.exp(scores[0, s]) / total * math.exp(-((s - 1.7) ** 2) / (2 * sigma**2))
        assert weights[0, s].item() == pytest.approx(expected, abs=1e-6)
    assert weights.sum() < 1


@torch.no_grad()
def test_a_predicted_position_equals_its_equation_and_lies_within_the_source() -> None:
    torch.manual_seed(0)
    module, states = PredictedPosition(6), 5 * torch.randn(B, 6)
    w, v = module.inner.weight, module.outer.weight[0] / 6
    for row, length in enumerate(LENGTHS.tolist()):
        expected = length / (1 + math.exp(-(v @ (w @ states[row]).tanh())))
        given = module(states, LENGTHS)[row].item()
        assert given == pytest.approx(expected, abs=1e-5)
        assert 0 <= given <= length
