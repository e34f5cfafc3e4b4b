"""Tests of the decoder-only model: causal mask and equations of its layers."""

import math

import pytest
import torch

from sightline.model.architectures.causal import CausalModel
from sightline.model.config import CausalConfig

VOCABULARY = 30


@pytest.fixture
def model() -> CausalModel:
    config = CausalConfig(VOCABULARY, d_model=16, num_heads=2, d_ff=24, layers=2, max_positions=12, dropout=0.2)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = CausalModel(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.inference_mode()
def test_no_position_attends_to_a_later_one(model: CausalModel) -> None:
    ids = torch.tensor([[1, 5, 9, 11, 4], [1, 5, 9, 12, 20]])
    logits = model(ids)
    torch.testing.assert_close(logits[0, :3], logits[1, :3])
    assert not torch.allclose(logits[0, 3:], logits[1, 3:])
    _, maps = model.hidden_states(ids, need_weights=True)
    assert maps is not None
    assert maps.shape == (2, 2, 2, 5, 5)
    assert not maps.triu(diagonal=1).any()
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(2, 2, 2, 5))


@torch.inference_mode()
def test_padding_on_the_right_changes_nothing(model: CausalModel) -> None:
    alone = model(torch.tensor([[1, 5, 9]]))
    padded = model(torch.tensor([[1, 5, 9, 0, 0], [1, 8, 7, 6, 5]]))
    torch.testing.assert_close(padded[:1, :3], alone)


@torch.inference_mode()
def test_a_layer_is_two_residual_sublayers_after_their_norms(model: CausalModel) -> None:
    """Layers follow Radford et al. 2019, section 2.3: x + f(LayerNorm(x)), and a final norm."""
    ids = torch.tensor([[1, 5, 9, 11]])
    x = model.embedding(ids) * math.sqrt(16) + model.positions[:4]
    for layer in model.layers:
        normed = layer.self_attention_norm.norm(x)  # type: ignore[operator]
        q, k, v = (getattr(layer.self_attention, name)(normed).view(1, 4, 2, 8) for name in ("query", "key", "value"))
        heads = []
        for head in range(2):
            scores = q[:, :, head] @ k[:, :, head].transpose(1, 2) / math.sqrt(8)
            scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[:, :, head])
        x = x + layer.self_attention.output(torch.cat(heads, dim=-1))  # type: ignore[union-attr, operator]
        x = x + layer.feed_forward(layer.feed_forward_norm.norm(x))  # type: ignore[operator]
    torch.testing.assert_close(model(ids), model.norm(x) @ model.embedding.weight.T)


def test_dropout_applies_only_in_training(model: CausalModel) -> None:
    ids = torch.tensor([[1, 5, 9, 11]])
    torch.testing.assert_close(model(ids), model(ids))
    model.train()
    assert not torch.allclose(model(ids), model(ids))


def test_more_tokens_than_positions_are_rejected(model: CausalModel) -> None:
    with pytest.raises(ValueError, match="13 tokens, but max_positions is"):
        model(torch.ones(1, 13, dtype=torch.int64))
