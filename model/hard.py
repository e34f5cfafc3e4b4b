"""Hard attention: one position a step instead of a mixture, and the two ways to train it.

Shapes are those of `model.recurrent`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from model.data import Batch
from model.loss import smoothed_cross_entropy
from model.precision import at_least_float32
from model.recurrent import RecurrentModel

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
    logits = at_least_float32(model.logits(torch.stack(features, dim=1)))  # (B, T, V)
    targets = batch.target_output
    counted = targets != config.pad_id
    costs = functional.cross_entropy(logits.detach().transpose(1, 2), targets, reduction="none")
    cost = (costs * counted).sum(dim=1)  # (B,)
    loss = smoothed_cross_entropy(logits.flatten(0, 1), targets.flatten(), smoothing, config.pad_id)
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


def marginal_loss(model: RecurrentModel, batch: Batch) -> Tensor:
    """-sum_t log sum_s a_ts p(y_t | y_<t, s): every position's prediction, weighed (Deng et al. 2018, equation 1).

    Exact, since no later state depends on which position was looked at.
    """
    memory, _ = model.encode(batch.source, batch.source_lengths)
    state = model.begin(memory)
    loss = batch.target_input.new_zeros((), dtype=torch.float32)
    for position, embedded in enumerate(model.embed_steps(batch.target_input)):
        target = batch.target_output[:, position]
        rows = (target != model.config.pad_id).nonzero().squeeze(1)
        hidden, cell = model.advance(embedded, state)
        state = state._replace(hidden=hidden, cell=cell)
        weights = model.weigh(hidden, position, memory, batch.source_lengths)[rows]  # (R, S)
        size = weights.size(1)
        read = model.readout(
            hidden[rows].repeat_interleave(size, dim=0),
            memory.annotations[rows].flatten(0, 1),
            embedded[rows].repeat_interleave(size, dim=0),
        )
        logits = at_least_float32(model.logits(model.features(read)))  # (R * S, V)
        log_likely = -functional.cross_entropy(logits, target[rows].repeat_interleave(size), reduction="none")
        log_weights = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
        loss = loss - torch.logsumexp(log_weights + log_likely.view(-1, size), dim=1).sum()
    return loss
