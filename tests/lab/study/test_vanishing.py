"""Gradients by distance and by decoder step."""

from typing import Literal

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from lab.study.vanishing import DISTANCES, STEPS, by_distance, by_step, gradients, ratios
from sightline.model.architectures.factory import build_model
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.config import RecurrentConfig

SOURCE, TARGET = [5, 6, 7, 8, 9, 10, 11, 2], [12, 13, 14, 2]


@pytest.mark.parametrize(("attention", "feeds_context"), [("additive", True), ("none", True), ("none", False)])
def test_gradients_are_those_of_finite_differences(attention: Literal["additive", "none"], feeds_context: bool) -> None:
    torch.manual_seed(1)
    config = RecurrentConfig(
        vocab_size=20,
        attention=attention,
        feeds_context=feeds_context,
        embedding_size=8,
        encoder_size=6,
        decoder_size=10,
        attention_size=6,
    )
    model = build_model(config).eval().double()
    assert isinstance(model, RecurrentModel)
    found = gradients(model, SOURCE, TARGET)
    assert found.shape == (len(TARGET), len(SOURCE))
    lengths, embed, step = torch.tensor([len(SOURCE)]), model.embed, 1e-6

    def losses(change: torch.Tensor) -> torch.Tensor:
        """Return the losses (T,) after a change of the embeddings of the source (S, E)."""
        model.embed = lambda ids: embed(ids) + change * config.embedding_size**0.5  # type: ignore[method-assign]
        memory, _ = model.encode(torch.tensor([SOURCE]), lengths)
        model.embed = embed  # type: ignore[method-assign]
        features, *_ = model.decode(torch.tensor([[config.bos_id, *TARGET[:-1]]]), memory, lengths)
        return cross_entropy(model.logits(features[0]), torch.tensor(TARGET), reduction="none")

    with torch.no_grad():
        before, slopes = losses(torch.zeros(1)), np.zeros((len(TARGET), len(SOURCE), config.embedding_size))
        for place in np.ndindex(len(SOURCE), config.embedding_size):
            change = torch.zeros(len(SOURCE), config.embedding_size, dtype=torch.double)
            change[place] = step
            slopes[:, *place] = (losses(change) - before) / step
    np.testing.assert_allclose(found, np.linalg.norm(slopes, axis=-1), rtol=1e-3, atol=1e-8)


def test_groups_hold_each_value_once() -> None:
    norms = np.random.default_rng(1).random((14, 15))
    distances, steps = by_distance(norms), by_step(norms)
    # Two source tokens at each distance but the largest, which the token in the middle has.
    assert distances[:, 0].tolist() == [14 * 4, 14 * 4, 14 * 4, 14 * 3]
    assert distances[0, 1] == pytest.approx(norms[:, [0, 1, 13, 14]].sum())
    assert steps[:, 0].tolist() == [15 * 4, 15 * 4, 15 * 4, 15 * 2]
    assert steps[3, 1] == pytest.approx(norms[12:].sum())
    assert len(distances) == len(DISTANCES) - 1 and len(steps) == len(STEPS) - 1


def test_ratios_divide_means_by_that_of_the_first_group() -> None:
    groups = np.array([[[4, 8.0], [2, 1.0]], [[4, 8.0], [2, 3.0]]])
    first, second = ratios(groups)
    assert first == {"value": 1.0, "interval": [1.0, 1.0]}
    # The means are 2 and 1; samples with one sentence twice have 0.5 and 1.5 in place of 1.
    assert second == {"value": 0.5, "interval": [0.25, 0.75]}
