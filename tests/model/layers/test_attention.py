"""Attention equals published examples and the functions of PyTorch."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sightline.model.layers.multi_head_attention import (
    AttentionWithoutWeights,
    MultiHeadAttention,
    causal_mask,
    length_mask,
    masked_softmax,
    scaled_dot_product_attention,
)

# "pool beats badminton", one row a word: an example from "Intuition Behind the Attention Head of
# Transformers".
WORDS = torch.tensor([[0.5, 0.1, 0.1, 0.2], [0.1, 0.5, 0.2, 0.1], [0.5, 0.1, 0.2, 0.1]])


def test_similarities_of_pool_beats_badminton_are_the_published_ones() -> None:
    expected = torch.tensor([[0.31, 0.14, 0.30], [0.14, 0.31, 0.15], [0.30, 0.15, 0.31]])
    torch.testing.assert_close(WORDS @ WORDS.T, expected)


def test_pool_beats_badminton_enriched_is_the_published_matrix() -> None:
    # The example has no factor 1 / sqrt(d).
    enriched = masked_softmax(WORDS @ WORDS.T) @ WORDS
    expected = torch.tensor([[0.38, 0.22, 0.16, 0.14], [0.35, 0.25, 0.17, 0.13], [0.38, 0.22, 0.17, 0.13]])
    torch.testing.assert_close(enriched.round(decimals=2), expected)


def test_pool_beats_badminton_with_the_scale_undone_is_scaled_attention() -> None:
    queries = WORDS * math.sqrt(WORDS.size(1))
    enriched, weights = scaled_dot_product_attention(queries, WORDS, WORDS)
    torch.testing.assert_close(weights, masked_softmax(WORDS @ WORDS.T))
    torch.testing.assert_close(enriched, functional.scaled_dot_product_attention(queries, WORDS, WORDS))


def test_causal_head_equals_the_head_written_with_minus_infinity() -> None:
    """The published head calls softmax without `dim`; it must be the axis of the keys.

    Without `dim`, PyTorch takes the first axis of a 3-D tensor, the batch: rows then would not sum
    to 1.
    """
    torch.manual_seed(0)
    x = torch.randn(2, 5, 10)
    to_key, to_query, to_value = (torch.nn.Linear(10, 4) for _ in range(3))
    k, q, v = to_key(x), to_query(x), to_value(x)  # (2, 5, 4)
    scores = q @ k.transpose(1, 2) / k.size(-1) ** 0.5
    weights = scores.masked_fill(torch.ones(5, 5).tril() == 0, -math.inf).softmax(dim=-1)
    ours, our_weights = scaled_dot_product_attention(q, k, v, causal_mask(5))
    torch.testing.assert_close(our_weights, weights)
    torch.testing.assert_close(ours, weights @ v)
    torch.testing.assert_close(ours, functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    torch.testing.assert_close(our_weights.sum(-1), torch.ones(2, 5))
    assert (our_weights.triu(diagonal=1) == 0).all()


@pytest.mark.parametrize("lengths", [[2, 3], [[1, 3], [2, 4]]], ids=["one an example", "one a query"])
def test_masked_softmax_over_valid_lengths_equals_the_one_with_minus_a_million(lengths: list[int]) -> None:
    torch.manual_seed(0)
    scores = torch.rand(2, 2, 4)
    valid = torch.tensor(lengths)
    per_query = valid if valid.dim() == 2 else valid.unsqueeze(1).expand(2, 2)
    expected = scores.masked_fill(torch.arange(4) >= per_query.unsqueeze(-1), -1e6).softmax(dim=-1)
    torch.testing.assert_close(masked_softmax(scores, length_mask(per_query, 4)), expected)


@pytest.mark.parametrize("lengths", [[0, 3], [[0, 3], [4, 0]]], ids=["one an example", "one a query"])
def test_a_valid_length_of_zero_gives_zeros_and_finite_gradients(lengths: list[int]) -> None:
    """A softmax over only -inf would give NaN weights and gradients."""
    scores = torch.rand(2, 2, 4, requires_grad=True)
    valid = torch.tensor(lengths)
    per_query = valid if valid.dim() == 2 else valid.unsqueeze(1).expand(2, 2)
    weights = masked_softmax(scores, length_mask(per_query, 4))
    assert (weights[per_query == 0] == 0).all()
    torch.testing.assert_close(weights.sum(-1), (per_query > 0).float())
    (gradient,) = torch.autograd.grad(weights.square().sum(), scores)
    assert gradient.isfinite().all()
    assert (gradient[per_query == 0] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_scaled_dot_product_equals_the_one_with_minus_nine_quadrillion_and_pytorch(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 6)
    mask = torch.rand(2, 1, 5, 7) < 0.5 if masked else None
    if mask is not None:
        mask[..., 0] = True
    logits = q @ k.transpose(-2, -1) / math.sqrt(8)
    weights = (logits if mask is None else logits.masked_fill(mask == 0, -9e15)).softmax(dim=-1)
    ours, our_weights = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(our_weights, weights)
    torch.testing.assert_close(ours, weights @ v)
    torch.testing.assert_close(ours, functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_scaled_dot_product_stays_finite_where_half_precision_would_overflow_exp() -> None:
    q = torch.full((1, 2, 4), 100.0)
    result, weights = scaled_dot_product_attention(q, q, q, torch.tensor([[True, False], [True, True]]))
    torch.testing.assert_close(weights, torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]))
    assert result.isfinite().all()


def copied_heads(ours: MultiHeadAttention, d_model: int) -> torch.nn.MultiheadAttention:
    theirs = torch.nn.MultiheadAttention(d_model, ours.num_heads, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    return theirs


@pytest.fixture
def cross_inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 4, 12), torch.randn(3, 6, 12), length_mask(torch.tensor([6, 1, 3]), 6)[:, None, None]


def test_multi_head_cross_attention_equals_pytorch_with_copied_weights(
    cross_inputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    queries, keys, mask = cross_inputs
    ours = MultiHeadAttention(12, 3)
    result, weights = ours(queries, keys, mask, need_weights=True)
    expected, expected_weights = copied_heads(ours, 12)(
        queries, keys, keys, key_padding_mask=~mask[:, 0, 0], average_attn_weights=False
    )
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_multi_head_gives_the_same_with_its_weights_as_without(cross_inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    queries, keys, mask = cross_inputs
    attention = MultiHeadAttention(12, 3)
    with_weights, weights = attention(queries, keys, mask, need_weights=True)
    without, none = attention(queries, keys, mask)
    torch.testing.assert_close(with_weights, without)
    assert none is None
    assert weights.shape == (3, 3, 4, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 3, 4))


def test_multi_head_rejects_a_width_that_its_heads_do_not_divide() -> None:
    with pytest.raises(ValueError, match="multiple of num_heads"):
        MultiHeadAttention(10, 3)


def test_attention_without_weights_enriches_pool_beats_badminton_as_published() -> None:
    # Embeddings times the fourth root of d cancel the factor 1 / sqrt(d); results are scaled
    # equally.
    root = WORDS.size(1) ** 0.25
    enriched, weights = AttentionWithoutWeights()(WORDS[None] * root, WORDS[None] * root, need_weights=True)
    expected = torch.tensor([[0.38, 0.22, 0.16, 0.14], [0.35, 0.25, 0.17, 0.13], [0.38, 0.22, 0.17, 0.13]])
    torch.testing.assert_close((enriched[0] / root).round(decimals=2), expected)
    torch.testing.assert_close(weights[0, 0], (WORDS @ WORDS.T).softmax(dim=-1))


def test_attention_without_weights_is_the_equation_written_out() -> None:
    torch.manual_seed(0)
    x, lengths = torch.randn(2, 5, 8), [5, 3]
    attention = AttentionWithoutWeights()
    result, weights = attention(x, x, length_mask(torch.tensor(lengths), 5)[:, None, None], need_weights=True)
    assert list(attention.parameters()) == []
    for row, length in enumerate(lengths):
        for query in range(5):
            scores = [sum(a * b for a, b in zip(x[row, query].tolist(), key, strict=True)) for key in x[row].tolist()]
            exponentials = [math.exp(score / math.sqrt(8)) for score in scores[:length]]
            expected = torch.tensor([e / sum(exponentials) for e in exponentials])
            torch.testing.assert_close(weights[row, 0, query, :length], expected)
            torch.testing.assert_close(result[row, query], expected @ x[row, :length])
    assert (weights[1, ..., 3:] == 0).all()


def test_attention_without_weights_gives_the_same_with_its_map_as_without() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 8), length_mask(torch.tensor([5, 3]), 5)[:, None, None]
    result, none = AttentionWithoutWeights()(x, x, mask)
    assert none is None
    torch.testing.assert_close(result, AttentionWithoutWeights()(x, x, mask, need_weights=True)[0])


def test_single_head_attention_is_three_matrices_attention_and_a_linear_layer() -> None:
    torch.manual_seed(0)
    attention, x = MultiHeadAttention(8, 1), torch.randn(2, 5, 8)
    q, k, v = (layer(x) for layer in (attention.query, attention.key, attention.value))
    expected, expected_weights = scaled_dot_product_attention(q, k, v)
    result, weights = attention(x, x, need_weights=True)
    torch.testing.assert_close(result, attention.output(expected))
    torch.testing.assert_close(weights[:, 0], expected_weights)
