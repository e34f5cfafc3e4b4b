import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sightline.model.training.loss import CHUNK_TOKENS, projected_costs, projected_mixture


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float, ignore_id: int) -> Tensor:
    """Compute the loss with PyTorch."""
    return functional.cross_entropy(logits, targets, ignore_index=ignore_id, label_smoothing=smoothing, reduction="sum")


@pytest.mark.parametrize("rows", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunked_loss_equals_the_obvious_one_in_value_and_gradients(rows: int, smoothing: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, 9, (rows,))
    chunked = projected_costs(hidden, weight, targets, smoothing, ignore_id=0)[0]
    gradients = torch.autograd.grad(3 * chunked, (hidden, weight))
    obvious = smoothed_cross_entropy(hidden @ weight.T, targets, smoothing, ignore_id=0)
    torch.testing.assert_close(chunked, obvious)
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * obvious, (hidden, weight)))


def test_costs_are_the_unsmoothed_losses_of_each_row() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(CHUNK_TOKENS + 1, 4, requires_grad=True), torch.randn(9, 4)
    targets = torch.randint(9, (CHUNK_TOKENS + 1,))
    _, costs = projected_costs(hidden, weight, targets, 0.1, ignore_id=0)
    obvious = functional.cross_entropy(hidden @ weight.T, targets, ignore_index=0, reduction="none")
    torch.testing.assert_close(costs, obvious.detach())
    assert not costs.requires_grad


@pytest.mark.parametrize("guesses", [1, 3, CHUNK_TOKENS + 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mixture_equals_the_obvious_one_in_value_and_gradients(guesses: int, smoothing: float) -> None:
    torch.manual_seed(0)
    rows = 2 * CHUNK_TOKENS // guesses + 1
    hidden = torch.randn(rows, guesses, 4, dtype=torch.float64, requires_grad=True)
    log_weights = torch.randn(rows, guesses, dtype=torch.float64).log_softmax(1).requires_grad_()
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(9, (rows,))
    logs = (hidden @ weight.T).log_softmax(2)  # (N, S, V)
    smoothed = (1 - smoothing) * functional.one_hot(targets, 9) + smoothing / 9  # (N, V)
    likelihoods = (logs * smoothed.unsqueeze(1)).sum(2).exp()  # (N, S), where nothing is smoothed p(target)
    obvious = -(log_weights.exp() * likelihoods).sum(1).log().sum()
    chunked, _ = projected_mixture(hidden, log_weights, weight, targets, smoothing)
    inputs = (hidden, log_weights, weight)
    torch.testing.assert_close(chunked, obvious)
    torch.testing.assert_close(torch.autograd.grad(3 * chunked, inputs), torch.autograd.grad(3 * obvious, inputs))


def test_padding_adds_no_loss_and_has_no_gradient() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(9, 4)
    targets = torch.tensor([3, 0, 5, 0, 0, 8])
    loss = projected_costs(hidden, weight, targets, 0.1, ignore_id=0)[0]
    torch.testing.assert_close(loss, smoothed_cross_entropy(hidden @ weight.T, targets, 0.1, ignore_id=0))
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert (gradient[targets == 0] == 0).all()
    assert (gradient[targets != 0] != 0).any(dim=1).all()


def test_a_batch_of_padding_alone_has_loss_zero() -> None:
    loss = projected_costs(torch.randn(2, 4), torch.randn(9, 4), torch.zeros(2, dtype=torch.long), 0.1, 0)[0]
    assert loss.item() == 0.0


def test_autocast_rounds_only_products() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2 * CHUNK_TOKENS, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(1, 50, (2 * CHUNK_TOKENS,))
    obvious = smoothed_cross_entropy(hidden @ weight.T, targets, 0.1, ignore_id=0)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = projected_costs(hidden, weight, targets, 0.1, ignore_id=0)[0]
    assert rounded.item() != obvious.item()
    torch.testing.assert_close(rounded, obvious, rtol=1e-3, atol=0)
    for ours, exact in zip(*(torch.autograd.grad(one, (hidden, weight)) for one in (rounded, obvious)), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() < 0.01 * exact.norm()  # a bfloat16 has 8 bits
