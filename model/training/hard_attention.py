"""Losses of hard attention, which selects one source position per step: REINFORCE and the exact marginal.

Shapes are those of `model.architectures.recurrent`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from model.architectures.recurrent import RecurrentModel
from model.data.batches import Batch
from model.training.loss import projected_costs, projected_mixture

ENTROPY_WEIGHT = 0.002  # lambda_e
REWARD_WEIGHT = 0.1  # lambda_r
EXPECTED_PROBABILITY = 0.5  # how often a batch is given the expected context instead of a sampled one
BASELINE_MOMENTUM = 0.9


def reinforce_loss(model: RecurrentModel, batch: Batch, smoothing: float) -> Tensor:
    """REINFORCE with a moving baseline and entropy (Xu et al. 2015, equations 11 to 13; the settings are their code's).

    Each step draws one position. The decoder learns from what was drawn; the weights learn from how much better than
    the model's baseline, a moving mean, the sentence's cost became. With probability 0.5 a batch is given the expected
    context instead.

    Returns:
        The sum over the batch, in nats; it is not the cross-entropy alone.
    """
    config, baseline = model.config, model.baseline
    memory, _ = model.encode(batch.source, batch.source_lengths)
    state = model.begin(memory)
    is_expected = bool(torch.rand(()) < EXPECTED_PROBABILITY)
    features, log_drawn, entropies = [], [], []
    for position, embedded in enumerate(model.embed_steps(batch.target_input)):
        drawn = _Drawing(is_expected)
        step = model.step(embedded, position, state, memory, batch.source_lengths, select=drawn)
        state = step.state
        features.append(step.features)
        log_drawn.append(drawn.log_probability)
        entropies.append(drawn.entropy)
    targets, decoded = batch.target_output, torch.stack(features, dim=1)  # (B, T), (B, T, E)
    counted = targets != config.pad_id
    loss, costs = projected_costs(
        decoded.flatten(0, 1), model.embedding.weight, targets.flatten(), smoothing, config.pad_id
    )
    cost = costs.view_as(targets).sum(dim=1)  # (B,)
    if not is_expected:
        advantage = REWARD_WEIGHT * (cost - baseline)  # (B,)
        loss = loss + (advantage.unsqueeze(1) * torch.stack(log_drawn, dim=1) * counted).sum()
        baseline.mul_(BASELINE_MOMENTUM).add_((1 - BASELINE_MOMENTUM) * cost.mean())
    return loss - ENTROPY_WEIGHT * (torch.stack(entropies, dim=1) * counted).sum()


class _Drawing:
    """Selects from the weights of one step, and remembers with what probability."""

    def __init__(self, is_expected: bool) -> None:
        self._is_expected = is_expected
        self.log_probability = torch.zeros(())  # (B,)
        self.entropy = torch.zeros(())  # (B,)

    def __call__(self, weights: Tensor) -> Tensor:
        logs = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
        self.entropy = -(weights * logs).sum(dim=1)
        places = torch.multinomial(weights, 1)  # (B, 1)
        self.log_probability = logs.gather(1, places).squeeze(1)
        if self._is_expected:
            return weights
        return functional.one_hot(places.squeeze(1), weights.size(1)).to(weights.dtype)


def marginal_loss(model: RecurrentModel, batch: Batch, smoothing: float) -> Tensor:
    """-sum_t log sum_s a_ts p(y_t | y_<t, s): every position's prediction, weighed (Deng et al. 2018, equation 1).

    Exact, since no later state depends on which position was looked at. With label smoothing, which the paper does not
    have, p is exp(-c) of the smoothed cross-entropy c.
    """
    memory, _ = model.encode(batch.source, batch.source_lengths)
    state = model.begin(memory)
    steps, states, weights = model.embed_steps(batch.target_input), [], []
    for position, embedded in enumerate(steps):
        hidden, cell = model.advance(embedded, state)
        state = state._replace(hidden=hidden, cell=cell)
        states.append(hidden)
        weights.append(model.weigh(hidden, position, memory, batch.source_lengths))
    counted = batch.target_output != model.config.pad_id  # (B, T)
    annotations = memory.annotations[counted.nonzero()[:, 0]]  # (N, S, A)
    of_every_guess = annotations.shape[:2]

    def repeated(parts: Sequence[Tensor]) -> Tensor:
        """T times (B, D) to (N * S, D)."""
        return torch.stack(tuple(parts), dim=1)[counted].unsqueeze(1).expand(*of_every_guess, -1).flatten(0, 1)

    read = model.readout(repeated(states), annotations.flatten(0, 1), repeated(steps))
    features = model.features(read).view(*of_every_guess, -1)  # (N, S, E)
    counted_weights = torch.stack(weights, dim=1)[counted]  # (N, S)
    log_weights = counted_weights.clamp_min(torch.finfo(counted_weights.dtype).tiny).log()
    return projected_mixture(features, log_weights, model.embedding.weight, batch.target_output[counted], smoothing)
