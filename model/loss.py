"""Cross-entropy through the output projection without ever holding (tokens x vocabulary) numbers at once.

At a vocabulary of thousands the logits and their gradient are by far the largest tensors of a training step. Taking
some hundred rows at a time keeps them in the processor's cache; the gradient is formed in the forward pass, since it
is known as soon as the softmax is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
        vocab_size = weight.size(0)
        loss = hidden.new_zeros(())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for start in range(0, hidden.size(0), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            target = targets[rows].unsqueeze(1)  # (C, 1)
            logits = hidden[rows] @ weight.T  # (C, V)
            normalizer = logits.logsumexp(dim=1, keepdim=True)  # (C, 1)
            # -sum_v q_v log p_v with q = (1 - smoothing) at the target plus smoothing / V everywhere.
            mean_logit = logits.mean(dim=1, keepdim=True)
            loss += (normalizer - (1 - smoothing) * logits.gather(1, target) - smoothing * mean_logit).sum()
            grad = logits.sub_(normalizer).exp_().sub_(smoothing / vocab_size)  # p - q, the buffer reused
            grad.scatter_add_(1, target, target.new_full(target.shape, -1, dtype=grad.dtype) * (1 - smoothing))
            grad_hidden[rows] = grad @ weight
            grad_weight.addmm_(grad.T, hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None


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
