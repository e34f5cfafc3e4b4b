import pytest
import torch

from sightline.model.layers.dropout import Dropout


def test_dropout_zeroes_its_share_and_scales_the_rest() -> None:
    torch.manual_seed(0)
    dropped = Dropout(0.3)(torch.ones(400, 501))
    share = (dropped == 0).float().mean().item()
    assert share == pytest.approx(77 / 256, abs=0.005)  # 0.3 in steps of 1/256
    torch.testing.assert_close(dropped[dropped != 0].unique(), torch.tensor([256 / (256 - 77)]))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.005)


def test_dropout_passes_the_gradient_of_what_it_kept() -> None:
    torch.manual_seed(0)
    x = torch.ones(100, requires_grad=True)
    dropped = Dropout(0.5)(x)
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient, dropped.detach())


def test_dropout_does_nothing_in_evaluation_and_at_zero() -> None:
    x = torch.randn(5, 3)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
