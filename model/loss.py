"""Cross-entropy through the output projection without ever holding (tokens x vocabulary) numbers at once.

At a vocabulary of thousands the logits and their gradient are by far the largest tensors of a training step. Taking
some hundred rows at a time keeps them in the processor's cache; the gradient is formed in the forward pass, since it
is known as soon as the softmax is. Under autocast the products and the softmax are of its type, the sums float32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from model.precision import product_type

CHUNK_ROWS = 512


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float, ignore_id: int) -> Tensor:
    """Sum of the label-smoothed cross-entropies (Szegedy et al. 2016, section 7), in nats: the slow, obvious form.

    Args:
        logits: (N, V).
        targets: (N,) ids; rows whose target is `ignore_id` count nothing.
    """
    return functional.cross_entropy(logits, targets, ignore_index=ignore_id, label_smoothing=smoothing, reduction="sum")


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        dtype = product_type(weight)
        with torch.autocast(weight.device.type, enabled=False):
            loss, *gradients = _loss_and_gradients(hidden, weight, targets, smoothing, dtype)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    vocab_size = weight.size(0)
    loss = weight.new_zeros(())
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    rounded_hidden, rounded_weight = hidden.to(dtype), weight.to(dtype)
    mean_weight = weight.mean(dim=0)  # (M,)
    for start in range(0, hidden.size(0), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        at_target = torch.arange(targets[rows].size(0), device=targets.device), targets[rows]
        logits = rounded_hidden[rows] @ rounded_weight.T  # (C, V)
        probabilities = logits.softmax(dim=1)
        # log sum exp of the logits is l - log p for every logit l; of the largest, log p is far from -inf.
        normalizer = logits.amax(dim=1).to(loss.dtype) - probabilities.amax(dim=1).to(loss.dtype).log()  # (C,)
        # -sum_v q_v log p_v with q = (1 - smoothing) at the target plus smoothing / V everywhere.
        mean_logit = hidden[rows].to(loss.dtype) @ mean_weight
        loss += (normalizer - (1 - smoothing) * logits[at_target] - smoothing * mean_logit).sum()
        grad = probabilities.sub_(smoothing / vocab_size)  # p - q, the buffer reused
        grad[at_target] -= 1 - smoothing
        grad_hidden[rows] = (grad @ rounded_weight).to(hidden.dtype)
        grad_weight += grad.T @ rounded_hidden[rows]
    return loss, grad_hidden, grad_weight


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, ignore_id: int
) -> Tensor:
    """`smoothed_cross_entropy(hidden @ weight.T, ...)`, in chunks of rows.

    Args:
        hidden: (N, M) what the decoder ends with.
        weight: (V, M) the output projection.
        targets: (N,) ids.

    Returns:
        The sum over the rows that count, with gradients for `hidden` and `weight`.
    """
    counted = targets != ignore_id
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden[counted], weight, targets[counted], smoothing
    )
    return loss
