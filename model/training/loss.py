"""Cross-entropy of the output projection, computed in chunks.

With a vocabulary of thousands, the logits (tokens, V) and their gradient are by far the largest
tensors of a training step. Chunks of some hundred tokens fit into the processor's cache. The
forward pass also computes the gradient, because it follows from the softmax. Under autocast,
products and softmax have its type, and sums are float32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sightline.model.architectures.pretrained import PretrainedGenerator
from sightline.model.precision import at_least_float32, product_type

CHUNK_TOKENS = 512


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
    """Compute the loss of weighted predictions and its gradients.

    Args:
        hidden: (N, S, M), S predictions of each target.
        log_weights: (N, S), logarithms of the weights of the predictions.
        weight: (V, M), the output projection.
        targets: (N,) token ids.

    Returns:
        The loss, the cost of each prediction (N, S) in nats, and the gradients of hidden,
        log_weights and weight.
    """
    vocab_size, num_predictions = weight.size(0), hidden.size(1)
    loss, costs = weight.new_zeros(()), weight.new_empty(hidden.shape[:2])
    grad_hidden, grad_log_weights, grad_weight = map(torch.zeros_like, (hidden, log_weights, weight))
    rounded_weight, mean_weight = weight.to(dtype), weight.mean(dim=0)  # (V, M), (M,)
    chunk = max(CHUNK_TOKENS // num_predictions, 1)
    for start in range(0, hidden.size(0), chunk):
        rows = slice(start, start + chunk)
        features = hidden[rows].flatten(0, 1)  # (C, M)
        rounded = features.to(dtype)
        at_target = (
            torch.arange(features.size(0), device=targets.device),
            targets[rows].repeat_interleave(num_predictions),
        )
        logits = rounded @ rounded_weight.T  # (C, V)
        probabilities = logits.softmax(dim=1)
        # logsumexp of the logits is l - log p for every logit l. The largest logit has the most
        # accurate log p.
        normalizer = logits.amax(dim=1).to(loss.dtype) - probabilities.amax(dim=1).to(loss.dtype).log()  # (C,)
        costs[rows] = (normalizer - logits[at_target]).view(-1, num_predictions)
        # -sum_v q_v log p_v, where q is (1 - smoothing) at the target plus smoothing / V
        # everywhere.
        mean_cost = normalizer - features.to(loss.dtype) @ mean_weight
        smoothed = (1 - smoothing) * costs[rows] + smoothing * mean_cost.view(-1, num_predictions)
        joint = log_weights[rows] - smoothed
        loss -= joint.logsumexp(dim=1).sum()
        share = joint.softmax(dim=1)  # of each prediction in the target's likelihood, and so in the gradient
        grad_log_weights[rows] = -share
        grad = probabilities.sub_(smoothing / vocab_size)  # p - q, in the same buffer
        grad[at_target] -= 1 - smoothing
        share = share.view(-1, 1)
        grad_hidden[rows] = (share * (grad @ rounded_weight)).view_as(hidden[rows])
        grad_weight += grad.T @ (share * features).to(dtype)
    return loss, costs, grad_hidden, grad_log_weights, grad_weight


def output_cross_entropy(model: Any, features: Tensor, targets: Tensor, smoothing: float, ignore_id: int) -> Tensor:
    """Compute the sum of label-smoothed cross-entropies of `projected_costs` for the output layer
    of a model, which is its embedding for the models of this project.
    """
    if not isinstance(model, PretrainedGenerator):
        return projected_costs(features, model.embedding.weight, targets, smoothing, ignore_id)[0]
    if model.softcap is None:
        return projected_costs(*model.projection(features), targets, smoothing, ignore_id)[0]

    def loss(part: Tensor, expected: Tensor) -> Tensor:
        logits = at_least_float32(model.logits(part))
        return functional.cross_entropy(logits, expected, label_smoothing=smoothing, reduction="sum")

    counted, total = targets != ignore_id, features.new_zeros(())
    parts = (torch.split(one[counted], CHUNK_TOKENS) for one in (features, targets))
    for part, expected in zip(*parts, strict=True):
        total = total + checkpoint(loss, part, expected, use_reentrant=False, preserve_rng_state=False)
    return total


def projected_costs(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, ignore_id: int
) -> tuple[Tensor, Tensor]:
    """Compute the sum of label-smoothed cross-entropies (Szegedy et al. 2016, section 7) and the
    unsmoothed cost of each token.

    Args:
        hidden: (N, M), the last hidden states of the decoder.
        weight: (V, M), the output projection.
        targets: (N,) token ids, of which `ignore_id` is ignored.

    Returns:
        The smoothed sum in nats, with gradients for `hidden` and `weight`; and the costs (N,) in
        nats without smoothing and without gradients, 0 for ignored targets.
    """
    counted = targets != ignore_id
    predictions = hidden[counted].unsqueeze(1)
    loss, costs_of_counted = projected_mixture(
        predictions, predictions.new_zeros(predictions.shape[:2]), weight, targets[counted], smoothing
    )
    costs = costs_of_counted.new_zeros(targets.shape)
    costs[counted] = costs_of_counted.squeeze(1)
    return loss, costs


def projected_mixture(
    hidden: Tensor, log_weights: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Compute -sum_n log sum_s exp(log_weights_ns - c_ns), in nats, with gradients for `hidden`
    (N, S, M), the last hidden states of S predictions of each target, `log_weights` (N, S) and the
    output projection `weight` (V, M); and the cost of each prediction (N, S) without smoothing.

    c_ns is the label-smoothed cross-entropy of targets_n, token ids (N,), given hidden_ns. Without
    smoothing, exp(-c_ns) is p(targets_n | hidden_ns).
    """
    loss, costs = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, at_least_float32(log_weights), weight, targets, smoothing
    )
    return loss, costs
