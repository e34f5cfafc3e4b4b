"""Losses for hard attention, which selects one source position per step.

There are two: REINFORCE, and the exact marginal likelihood. Shapes are those of
`sightline.model.architectures.recurrent`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.factory import TranslationModel
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.data.batches import Batch
from sightline.model.training import translation
from sightline.model.training.loss import projected_costs, projected_mixture
from sightline.model.training.task import Task
from sightline.model.training.translation import cross_entropy

ENTROPY_WEIGHT = 0.002  # lambda_e
REWARD_WEIGHT = 0.1  # lambda_r
EXPECTED_PROBABILITY = 0.5  # probability that a batch uses the expected context instead of a sampled one
BASELINE_MOMENTUM = 0.9


def reinforce_loss(model: RecurrentModel, batch: Batch, smoothing: float) -> Tensor:
    """Compute the REINFORCE loss (Xu et al. 2015, equations 11 to 13): the sum of cross-entropies,
    policy-gradient terms and entropy terms over the batch, in nats.

    Each step samples one source position. The decoder is trained with the cross-entropy given the
    sampled positions. The attention weights are trained with an entropy bonus and the difference
    between the cost of the sentence and a moving average of costs (`model.baseline`). With
    probability 0.5, a batch uses the expected context instead. The constants are those of the
    authors' code.
    """
    config, baseline = model.config, model.baseline
    memory, _ = model.encode(batch.source, batch.source_lengths)
    state = model.initial_state(memory)
    is_expected = bool(torch.rand(()) < EXPECTED_PROBABILITY)
    features, log_probabilities, entropies = [], [], []
    for position, embedded in enumerate(model.embed_steps(batch.target_input)):
        sampler = _PositionSampler(is_expected)
        step = model.step(embedded, position, state, memory, batch.source_lengths, select=sampler)
        state = step.state
        features.append(step.features)
        log_probabilities.append(sampler.log_probability)
        entropies.append(sampler.entropy)
    targets, decoded = batch.target_output, torch.stack(features, dim=1)  # (B, T), (B, T, E)
    counted = targets != config.pad_id
    loss, costs = projected_costs(
        decoded.flatten(0, 1), model.embedding.weight, targets.flatten(), smoothing, config.pad_id
    )
    cost = costs.view_as(targets).sum(dim=1)  # (B,)
    if not is_expected:
        advantage = REWARD_WEIGHT * (cost - baseline)  # (B,)
        loss = loss + (advantage.unsqueeze(1) * torch.stack(log_probabilities, dim=1) * counted).sum()
        baseline.mul_(BASELINE_MOMENTUM).add_((1 - BASELINE_MOMENTUM) * cost.mean())
    return loss - ENTROPY_WEIGHT * (torch.stack(entropies, dim=1) * counted).sum()


class _PositionSampler:
    """Sampler of one position per step that keeps its log-probability and the entropy."""

    def __init__(self, is_expected: bool) -> None:
        self._is_expected = is_expected
        self.log_probability = torch.zeros(())  # (B,)
        self.entropy = torch.zeros(())  # (B,)

    def __call__(self, weights: Tensor) -> Tensor:
        logs = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
        self.entropy = -(weights * logs).sum(dim=1)
        positions = torch.multinomial(weights, 1)  # (B, 1)
        self.log_probability = logs.gather(1, positions).squeeze(1)
        if self._is_expected:
            return weights
        return functional.one_hot(positions.squeeze(1), weights.size(1)).to(weights.dtype)


def marginal_loss(model: RecurrentModel, batch: Batch, smoothing: float) -> Tensor:
    """Compute the exact marginal negative log-likelihood of a batch, in nats (Deng et al. 2018,
    equation 1): -sum_t log sum_s a_ts p(y_t | y_<t, s).

    The loss is exact because no later state depends on the selected position. With label smoothing,
    which the paper does not use, p is exp(-c) with the smoothed cross-entropy c.
    """
    memory, _ = model.encode(batch.source, batch.source_lengths)
    state = model.initial_state(memory)
    steps, states, weights = model.embed_steps(batch.target_input), [], []
    for position, embedded in enumerate(steps):
        hidden, cell = model.update_state(embedded, state)
        state = state._replace(hidden=hidden, cell=cell)
        states.append(hidden)
        weights.append(model.attention_weights(hidden, position, memory, batch.source_lengths))
    counted = batch.target_output != model.config.pad_id  # (B, T)
    annotations = memory.annotations[counted.nonzero()[:, 0]]  # (N, S, A)
    num_targets_and_positions = annotations.shape[:2]

    def repeated(parts: Sequence[Tensor]) -> Tensor:
        """Stack T tensors (B, D), keep the N real targets and repeat each S times: (N * S, D)."""
        return (
            torch.stack(tuple(parts), dim=1)[counted].unsqueeze(1).expand(*num_targets_and_positions, -1).flatten(0, 1)
        )

    readout = model.readout(repeated(states), annotations.flatten(0, 1), repeated(steps))
    features = model.features(readout).view(*num_targets_and_positions, -1)  # (N, S, E)
    counted_weights = torch.stack(weights, dim=1)[counted]  # (N, S)
    log_weights = counted_weights.clamp_min(torch.finfo(counted_weights.dtype).tiny).log()
    targets = batch.target_output[counted]
    return projected_mixture(features, log_weights, model.embedding.weight, targets, smoothing)[0]


def training_loss(model: TranslationModel, batch: Batch, smoothing: float) -> Tensor:
    """Return the training loss: a sum over the real target tokens of a batch, in nats."""
    if isinstance(model, RecurrentModel) and model.config.selection == "reinforce":
        return reinforce_loss(model, batch, smoothing)
    if isinstance(model, RecurrentModel) and model.config.selection == "marginal":
        return marginal_loss(model, batch, smoothing)
    return cross_entropy(model, batch, smoothing)


class _HardAttentionTask(Task[Batch, TranslationModel]):
    """Task whose validation loss is the cross-entropy, by which all systems are compared."""

    def validation_loss(self, model: TranslationModel, batch: Batch) -> Tensor:
        return cross_entropy(model, batch, 0.0)


TRANSLATION = _HardAttentionTask(**{**vars(translation.TRANSLATION), "training_loss": training_loss})
