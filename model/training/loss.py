"""Cross-entropy through the output projection without ever holding (tokens x vocabulary) numbers at once.

At a vocabulary of thousands the logits and their gradient are by far the largest tensors of a training step. Taking
some hundred rows at a time keeps them in the processor's cache; the gradient is formed in the forward pass, since it
is known as soon as the softmax is. Under autocast the products and the softmax are of its type, the sums float32.
"""

from typing import Any

import torch
from torch import Tensor

from model.precision import at_least_float32, product_type

CHUNK_ROWS = 512


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, log_weights: Tensor, weight: Tensor, targets: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        dtype = product_type(weight)
        with torch.autocast(weight.device.type, enabled=False):
            loss, costs, *gradients = _loss_and_gradients(hidden, log_weights, weight, targets, smoothing, dtype)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(costs)
        return loss, costs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        grad_hidden, grad_log_weights, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_log_weights * grads[0], grad_weight * grads[0], None, None


def _loss_and_gradients(
    hidden: Tensor, log_weights: Tensor, weight: Tensor, targets: Tensor, smoothing: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of hidden (N, S, M) and log_weights (N, S): S guesses at each target, and how much each counts.

    Returns:
        The loss, each guess's cost (N, S) in nats, and the gradients of hidden, log_weights and weight.
    """
    vocab_size, guesses = weight.size(0), hidden.size(1)
    loss, costs = weight.new_zeros(()), weight.new_empty(hidden.shape[:2])
    grad_hidden, grad_log_weights, grad_weight = map(torch.zeros_like, (hidden, log_weights, weight))
    rounded_weight, mean_weight = weight.to(dtype), weight.mean(dim=0)  # (V, M), (M,)
    chunk = max(CHUNK_ROWS // guesses, 1)
    for start in range(0, hidden.size(0), chunk):
        rows = slice(start, start + chunk)
        features = hidden[rows].flatten(0, 1)  # (C, M)
        rounded = features.to(dtype)
        at_target = torch.arange(features.size(0), device=targets.device), targets[rows].repeat_interleave(guesses)
        logits = rounded @ rounded_weight.T  # (C, V)
        probabilities = logits.softmax(dim=1)
        # log sum exp of the logits is l - log p for every logit l; of the largest, log p is far from -inf.
        normalizer = logits.amax(dim=1).to(loss.dtype) - probabilities.amax(dim=1).to(loss.dtype).log()  # (C,)
        costs[rows] = (normalizer - logits[at_target]).view(-1, guesses)
        # -sum_v q_v log p_v with q = (1 - smoothing) at the target plus smoothing / V everywhere.
        mean_cost = normalizer - features.to(loss.dtype) @ mean_weight
        smoothed = (1 - smoothing) * costs[rows] + smoothing * mean_cost.view(-1, guesses)
        joint = log_weights[rows] - smoothed
        loss -= joint.logsumexp(dim=1).sum()
        share = joint.softmax(dim=1)  # of each guess in the target's likelihood, and so in its gradient
        grad_log_weights[rows] = -share
        grad = probabilities.sub_(smoothing / vocab_size)  # p - q, the buffer reused
        grad[at_target] -= 1 - smoothing
        share = share.view(-1, 1)
        grad_hidden[rows] = (share * (grad @ rounded_weight)).view_as(hidden[rows])
        grad_weight += grad.T @ (share * features).to(dtype)
    return loss, costs, grad_hidden, grad_log_weights, grad_weight


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, ignore_id: int
) -> Tensor:
    """Sum of the label-smoothed cross-entropies (Szegedy et al. 2016, section 7); arguments as of `projected_costs`."""
    return projected_costs(hidden, weight, targets, smoothing, ignore_id)[0]


def projected_costs(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, ignore_id: int
) -> tuple[Tensor, Tensor]:
    """The cross-entropy, and what it is the sum of.

    Args:
        hidden: (N, M) what the decoder ends with.
        weight: (V, M) the output projection.
        targets: (N,) ids.

    Returns:
        The smoothed sum over the rows that count, with gradients for `hidden` and `weight`; of each row (N,) the cost
        without smoothing, 0 where it does not count, and without gradients.
    """
    counted = targets != ignore_id
    guesses = hidden[counted].unsqueeze(1)
    loss, found = _project(guesses, guesses.new_zeros(guesses.shape[:2]), weight, targets[counted], smoothing)
    costs = found.new_zeros(targets.shape)
    costs[counted] = found.squeeze(1)
    return loss, costs


def projected_mixture(hidden: Tensor, log_weights: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """-sum_n log sum_s exp(log_weights_ns - c_ns), c the label-smoothed cross-entropy of targets_n and hidden_ns.

    Without smoothing exp(-c_ns) is p(targets_n | hidden_ns).

    Args:
        hidden: (N, S, M), what S guesses at each target end with.
        log_weights: (N, S), of the guesses.
        weight: (V, M) the output projection.
        targets: (N,) ids.

    Returns:
        The sum, with gradients for all but the targets.
    """
    return _project(hidden, log_weights, weight, targets, smoothing)[0]


def _project(
    hidden: Tensor, log_weights: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    loss, costs = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, at_least_float32(log_weights), weight, targets, smoothing
    )
    return loss, costs
