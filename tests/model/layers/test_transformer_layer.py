from dataclasses import replace

import torch

from sightline.model.config import StackConfig
from sightline.model.layers.transformer_layer import AddNorm, PositionwiseFeedForward

CONFIG = StackConfig(10, dropout=0.3, d_model=8, num_heads=2)


def test_without_the_residual_connection_only_the_output_is_normalised() -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    expected = (y - y.mean(-1, keepdim=True)) / y.var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
    config = replace(CONFIG, residual=False)
    torch.testing.assert_close(AddNorm(config).eval()(x, y), expected)
    torch.testing.assert_close(AddNorm(config, pre_norm=True).eval()(x, y), y)


def test_add_norm_normalises_the_sum() -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    total = x + y
    deviation = total.var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
    torch.testing.assert_close(AddNorm(CONFIG).eval()(x, y), (total - total.mean(-1, keepdim=True)) / deviation)


def test_pre_norm_normalises_only_the_input_of_the_sublayer() -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    layer = AddNorm(CONFIG, pre_norm=True).eval()
    deviation = x.var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
    torch.testing.assert_close(layer.sublayer_input(x), (x - x.mean(-1, keepdim=True)) / deviation)
    torch.testing.assert_close(layer(x, y), x + y)
    assert AddNorm(CONFIG).sublayer_input(x) is x


def test_feed_forward_is_two_maps_around_a_relu_at_each_position() -> None:
    layer, x = PositionwiseFeedForward(4, 6), torch.randn(2, 3, 4)
    expected = (x @ layer.inner.weight.T + layer.inner.bias).clamp(min=0) @ layer.outer.weight.T + layer.outer.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x)[:, 1], layer(x[:, 1]))
