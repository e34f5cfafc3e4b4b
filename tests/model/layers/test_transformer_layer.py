import torch

from model.layers.transformer_layer import AddNorm, FeedForward


def test_add_norm_normalises_the_sum() -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    total = x + y
    deviation = total.var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
    torch.testing.assert_close(AddNorm(8, 0.3).eval()(x, y), (total - total.mean(-1, keepdim=True)) / deviation)


def test_pre_norm_normalises_only_the_input_of_the_sublayer() -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    layer = AddNorm(8, 0.3, pre_norm=True).eval()
    deviation = x.var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
    torch.testing.assert_close(layer.sublayer_input(x), (x - x.mean(-1, keepdim=True)) / deviation)
    torch.testing.assert_close(layer(x, y), x + y)
    assert AddNorm(8, 0.3).sublayer_input(x) is x


def test_feed_forward_is_two_maps_around_a_relu_at_each_position() -> None:
    layer, x = FeedForward(4, 6), torch.randn(2, 3, 4)
    expected = (x @ layer.inner.weight.T + layer.inner.bias).clamp(min=0) @ layer.outer.weight.T + layer.outer.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x)[:, 1], layer(x[:, 1]))
