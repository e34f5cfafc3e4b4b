"""Both losses of hard attention equal sums over all possible selections."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.zoo.hard_attention import (
    ENTROPY_WEIGHT,
    EXPECTED_PROBABILITY,
    REWARD_WEIGHT,
    TRANSLATION,
    marginal_loss,
    reinforce_loss,
    training_loss,
)
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.config import ArchitectureConfig, RecurrentConfig
from sightline.model.data.batches import Batch, make_batch
from sightline.model.training.translation import cross_entropy

PAIRS = [([5, 9, 2], [4, 6, 2]), ([7, 2], [12, 2])]


def made(selection: Any) -> RecurrentModel:
    torch.manual_seed(3)
    config = RecurrentConfig(
        15,
        embedding_size=4,
        encoder_size=3,
        decoder_size=6,
        attention="general",
        query="current",
        selection=selection,
        dropout=0.0,
    )
    model = RecurrentModel(config).train()
    with torch.no_grad():
        model.embedding.weight *= 3  # so that it matters which position is looked at
    return model


@pytest.fixture
def batch() -> Batch:
    return make_batch(PAIRS, ArchitectureConfig(15))


def chosen(
    model: RecurrentModel, batch: Batch, row: int, indices: tuple[int, ...], is_expected: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of tokens and selected positions, and the entropies.

    Each is (T,). Step t attends only to `indices[t]`, or uses the expected context.
    """
    one = Batch(*(getattr(batch, name)[row : row + 1] for name in batch.__dataclass_fields__))
    memory, _ = model.encode(one.source, one.source_lengths)
    embedded, state = model.embed(one.target_input), model.initial_state(memory)
    tokens, drawn, entropies = [], [], []
    for position, index in enumerate(indices):
        seen: list[Tensor] = []

        def select(weights: Tensor, index: int = index, seen: list[Tensor] = seen) -> Tensor:
            seen.append(weights)
            return weights if is_expected else torch.eye(weights.size(1))[[index]]

        step = model.step(embedded[:, position], position, state, memory, one.source_lengths, select)
        state = step.state
        logprobs = model.logits(step.features).log_softmax(-1)
        tokens.append(logprobs[0, one.target_output[0, position]])
        drawn.append(seen[0][0, index].log())
        own = seen[0][0, : int(one.source_lengths)]
        entropies.append(-(own * own.log()).sum())
    return torch.stack(tokens), torch.stack(drawn), torch.stack(entropies)


def test_the_marginal_is_the_sum_over_every_path(batch: Batch) -> None:
    """States do not depend on selections, so the sum over paths is a product of sums over steps."""
    model = made("marginal")
    expected = torch.zeros(())
    for row, (source, target) in enumerate(PAIRS):
        paths = itertools.product(range(len(source)), repeat=len(target))
        likelihoods = [torch.cat(chosen(model, batch, row, path)[:2]).sum() for path in paths]
        expected = expected - torch.stack(likelihoods).logsumexp(0)
    torch.testing.assert_close(marginal_loss(model, batch, 0.0), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(training_loss(model, batch, 0.1), marginal_loss(model, batch, 0.1))
    assert torch.equal(TRANSLATION.validation_loss(model, batch), cross_entropy(model, batch, 0.0))
    assert marginal_loss(model, batch, 0.1) != marginal_loss(model, batch, 0.0)


@pytest.mark.parametrize("is_expected", [False, True])
def test_reinforce_is_its_equation_for_the_sampled_positions(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, is_expected: bool
) -> None:
    """The loss and its gradients equal Xu et al. 2015, equations 11 to 13, with a large entropy."""
    model, baseline, entropy_weight = made("reinforce"), 5.0, 0.7
    paths = ((0, 2, 1), (1, 0))
    draws = iter([torch.tensor([[0], [1]]), torch.tensor([[2], [0]]), torch.tensor([[1], [0]])])  # the last is padding
    monkeypatch.setattr("lab.zoo.hard_attention.EXPECTED_PROBABILITY", float(is_expected))
    monkeypatch.setattr("lab.zoo.hard_attention.ENTROPY_WEIGHT", entropy_weight)
    monkeypatch.setattr(torch, "multinomial", lambda weights, count: next(draws))
    model.baseline.fill_(baseline)
    loss = reinforce_loss(model, batch, smoothing=0.0)
    expected, costs = torch.zeros(()), []
    for row, path in enumerate(paths):
        tokens, drawn, entropies = chosen(model, batch, row, path, is_expected)
        cost = -tokens.sum()
        reward = 0.0 if is_expected else REWARD_WEIGHT * (cost.detach() - baseline) * drawn.sum()
        expected = expected + cost + reward - entropy_weight * entropies.sum()
        costs.append(float(cost.detach()))
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), atol=1e-5, rtol=1e-4
    )
    followed = baseline if is_expected else 0.9 * baseline + 0.1 * sum(costs) / len(costs)
    assert float(model.baseline) == pytest.approx(followed, rel=1e-5)


def test_the_mean_gradient_of_reinforce_is_that_of_the_expectation(batch: Batch) -> None:
    """The mean over many samples equals the sum over all paths."""
    model, copies = made("reinforce"), 30
    many = make_batch(PAIRS * copies, ArchitectureConfig(15))  # each copy is a sample of its own
    assert model.score is not None and model.score.annotation is not None
    parameter = model.score.annotation.weight
    torch.manual_seed(0)
    total, draws = torch.zeros_like(parameter), 0
    while draws < 3000:
        model.baseline.fill_(5.0)
        before = torch.get_rng_state()
        if torch.rand(()) < EXPECTED_PROBABILITY:  # the other kind of batch, which draws nothing
            continue
        torch.set_rng_state(before)
        (gradient,) = torch.autograd.grad(reinforce_loss(model, many, smoothing=0.0), parameter)
        total, draws = total + gradient, draws + copies
    expected = _expected_gradient(model, batch, parameter, baseline=5.0)
    assert (total / draws - expected).norm() < 0.2 * expected.norm()


def _expected_gradient(model: RecurrentModel, batch: Batch, parameter: Tensor, baseline: float) -> Tensor:
    """Compute the exact gradient: a sum over all paths, weighted by their probabilities."""
    expected = torch.zeros_like(parameter)
    for row, (source, target) in enumerate(PAIRS):
        for path in itertools.product(range(len(source)), repeat=len(target)):
            tokens, drawn, entropies = chosen(model, batch, row, path)
            cost = -tokens.sum()
            reward = REWARD_WEIGHT * (cost.detach() - baseline) * drawn.sum()
            surrogate = drawn.sum().exp().detach() * (cost + reward - ENTROPY_WEIGHT * entropies.sum())
            (gradient,) = torch.autograd.grad(surrogate, parameter)
            expected = expected + gradient
    return expected


def test_the_baseline_follows_the_cost_of_a_sentence(batch: Batch) -> None:
    model = made("reinforce")
    torch.manual_seed(1)
    for _ in range(200):
        reinforce_loss(model, batch, smoothing=0.0)
    with torch.no_grad():
        mean_cost = float(cross_entropy(model, batch, smoothing=0.0)) / len(PAIRS)
    assert float(model.baseline) == pytest.approx(mean_cost, rel=0.3)
    assert "baseline" in model.state_dict()  # so that a resumed run goes on from it


@pytest.mark.parametrize("selection", ["reinforce", "marginal"])
def test_some_updates_bring_the_loss_down(selection: str, batch: Batch) -> None:
    model = made(selection)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    torch.manual_seed(2)
    with torch.no_grad():
        before = float(cross_entropy(model.eval(), batch, 0.0))
    for _ in range(80):
        optimizer.zero_grad()
        training_loss(model.train(), batch, 0.0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        assert float(cross_entropy(model.eval(), batch, 0.0)) < before / 2
