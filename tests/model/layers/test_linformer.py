"""Linformer equals its equation in loops, and plain attention if E and F are identities."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.model.architectures.transformer import Transformer
from sightline.model.config import Sharing, TransformerConfig, matrix_indices
from sightline.model.layers.linformer import Projections, project, token_weights
from sightline.model.layers.multi_head_attention import MultiHeadAttention, length_mask

CONFIG = TransformerConfig(
    40,
    d_model=8,
    num_heads=2,
    d_ff=16,
    encoder_layers=3,
    decoder_layers=1,
    max_positions=9,
    encoder_attention="linformer",
    linformer_size=4,
    linformer_sharing="headwise",
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def literal_head(q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q (E K)^T / sqrt(d)) F V of one head and one source in loops.

    Args:
        q: queries (S, D); `k` and `v` are keys and values.
        e: (k, n); `f` as well.

    Returns:
        Results (S, D) and weights of projected keys (S, k).
    """

    def mix(matrix: Tensor, tokens: Tensor, slot: int, index: int) -> float:
        return sum(float(matrix[slot, j] * tokens[j, index]) for j in range(len(tokens)))

    (length, size), slots = q.shape, len(e)
    result, weights = torch.zeros(length, size), torch.zeros(length, slots)
    for i in range(length):
        products = [sum(float(q[i, d]) * mix(e, k, slot, d) for d in range(size)) for slot in range(slots)]
        exponentials = [math.exp(product / math.sqrt(size)) for product in products]
        for slot in range(slots):
            weights[i, slot] = exponentials[slot] / sum(exponentials)
        for d in range(size):
            result[i, d] = sum(float(weights[i, slot]) * mix(f, v, slot, d) for slot in range(slots))
    return result, weights


def attention_and_inputs() -> tuple[MultiHeadAttention, Tensor, Tensor, tuple[Tensor, Tensor]]:
    attention = MultiHeadAttention(8, 2)
    x, lengths = torch.randn(3, 6, 8), torch.tensor([6, 1, 4])
    return attention, x, lengths, Projections(CONFIG).for_layer(1)


@torch.inference_mode()
def test_linformer_equals_equation_7_written_out() -> None:
    attention, x, lengths, matrices = attention_and_inputs()
    result, weights = attention(x, x, length_mask(lengths, 6)[:, None, None], True, *matrices)
    parts = [attention.split_heads(part(x)) for part in (attention.query, attention.key, attention.value)]
    for row, length in enumerate(lengths.tolist()):
        heads = []
        for head in range(2):
            q, k, v = (part[row, head, :length] for part in parts)
            values, expected = literal_head(q, k, v, *matrices)
            torch.testing.assert_close(weights[row, head, :length], expected)
            heads.append(values)
        torch.testing.assert_close(result[row, :length], attention.output(torch.cat(heads, dim=-1)))


def test_the_result_is_the_same_without_returning_weights() -> None:
    attention, x, lengths, matrices = attention_and_inputs()
    mask = length_mask(lengths, 6)[:, None, None]
    result, none = attention(x, x, mask, False, *matrices)
    assert none is None
    torch.testing.assert_close(result, attention(x, x, mask, True, *matrices)[0])


def test_padding_does_not_change_the_projected_keys() -> None:
    attention, x, lengths, matrices = attention_and_inputs()
    alone, _ = attention(x[2:, :4], x[2:, :4], length_mask(lengths[2:], 4)[:, None, None], True, *matrices)
    x[2, 4:] = math.nan
    padded = project(matrices[0], x, length_mask(lengths, 6)[:, None, None])
    assert padded.isfinite().all()
    beside, _ = attention(x, x, length_mask(lengths, 6)[:, None, None], True, *matrices)
    torch.testing.assert_close(beside[2, :4], alone[0])


def test_the_map_over_tokens_times_the_values_is_the_heads_result() -> None:
    attention, x, lengths, (key_matrix, value_matrix) = attention_and_inputs()
    mask = length_mask(lengths, 6)[:, None, None]
    result, slots = attention(x, x, mask, True, key_matrix, value_matrix)
    pulled_back = token_weights(slots, value_matrix, mask)
    values = attention.split_heads(attention.value(x))
    torch.testing.assert_close(attention.output(attention.merge_heads(pulled_back @ values)), result)
    assert pulled_back.shape == (3, 2, 6, 6)
    assert (pulled_back[2, :, :, 4:] == 0).all()
    assert (pulled_back < 0).any()
    assert not torch.allclose(pulled_back.sum(-1), torch.ones(3, 2, 6), atol=0.1)


def test_with_one_projected_key_per_token_it_is_multi_head_attention() -> None:
    attention, x, _, _ = attention_and_inputs()
    plain = MultiHeadAttention(8, 2)
    plain.load_state_dict(attention.state_dict())
    mask = length_mask(torch.tensor([6, 6, 6]), 6)[:, None, None]
    result, weights = attention(x, x, mask, True, torch.eye(6), torch.eye(6))
    expected, expected_weights = plain(x, x, mask, True)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(token_weights(weights, torch.eye(6), mask), expected_weights)


@pytest.mark.parametrize(("sharing", "count"), [("headwise", 24), ("key-value", 12), ("layerwise", 1)])
def test_twelve_layers_have_the_papers_numbers_of_matrices(sharing: Sharing, count: int) -> None:
    projections = Projections(replace(CONFIG, encoder_layers=12, linformer_sharing=sharing))
    assert projections.matrices.shape == (count, 4, 9)
    used = {index for layer in range(12) for index in matrix_indices(sharing, layer)}
    assert used == set(range(count))
    key_matrix, value_matrix = projections.for_layer(5)
    assert torch.equal(key_matrix, value_matrix) == (sharing != "headwise")


@pytest.mark.parametrize("sharing", ["headwise", "key-value", "layerwise"])
def test_a_model_returns_both_maps_and_learns_its_projections(sharing: Sharing) -> None:
    model = Transformer(replace(CONFIG, linformer_sharing=sharing)).eval()
    source, lengths, target = torch.randint(3, 40, (2, 6)), torch.tensor([6, 3]), torch.randint(3, 40, (2, 5))
    maps = model.attention_maps(source, lengths, target)
    assert maps["encoder_slots"].shape == (3, 2, 2, 6, 4)
    torch.testing.assert_close(maps["encoder_slots"].sum(-1), torch.ones(3, 2, 2, 6))
    assert maps["encoder"].shape == (3, 2, 2, 6, 6)
    assert (maps["encoder"][:, 1, ..., 3:] == 0).all()
    model(source, lengths, target).square().sum().backward()
    assert model.projections is not None and model.projections.matrices.grad is not None
    # Only columns of positions that occur in a source have a gradient.
    assert (model.projections.matrices.grad[..., :6].abs().amax(dim=1) > 0).all()
    assert (model.projections.matrices.grad[..., 6:] == 0).all()


def test_padding_after_a_source_changes_nothing() -> None:
    model = Transformer(CONFIG).eval()
    source, lengths, target = torch.randint(3, 40, (1, 6)), torch.tensor([4]), torch.randint(3, 40, (1, 5))
    logits = model(source, lengths, target)
    source[0, 4:] = 7
    torch.testing.assert_close(model(source, lengths, target), logits)
    torch.testing.assert_close(model(source[:, :4], lengths, target), logits)


def test_more_projected_keys_than_tokens_are_rejected() -> None:
    change: dict[str, Any] = {"linformer_size": 10}
    with pytest.raises(ValueError, match=r"linformer_size must be at most max_positions \(9\), got 10"):
        replace(CONFIG, **change)
    assert replace(CONFIG, encoder_attention="multi-head", **change).linformer_size == 10
