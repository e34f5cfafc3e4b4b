"""Guided alignment: its loss and its links equal slow computations, and a head learns to align."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sightline.model.architectures.transformer import Transformer
from sightline.model.config import TransformerConfig, read_model_config
from sightline.model.data.batches import make_batch
from sightline.model.data.examples import Example, MemoryExamples, TrainingData
from sightline.model.data.tokenizer_training import train_tokenizer
from sightline.model.training import guided
from sightline.model.training.guided import GuidedTrainer, find_links
from sightline.model.training.translation import ALIGNMENT_WEIGHT, TRANSLATION, cross_entropy, guided_batch
from tests.model.training.toys import CONFIG, VOCABULARY, assert_same_run

MODEL = TransformerConfig(
    VOCABULARY, d_model=16, num_heads=2, d_ff=16, max_positions=32, encoder_layers=1, decoder_layers=2, dropout=0.0
)


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(MODEL).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def inputs(source: Sequence[int], target: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[MODEL.bos_id, *target[:-1]]])


def test_the_loss_adds_the_cross_entropy_of_the_links_at_the_step_that_reads_each_token(model: Transformer) -> None:
    pairs: list[Example] = [([5, 6, 7, 2], [9, 8, 7, 6, 2]), ([4, 2], [3, 2]), ([8, 9, 2], [5, 5, 2])]
    links: list[Example] = [([0, 1, 2, 3], [0, 0, 3, 4]), ([], []), ([1], [1])]  # no step reads the last token
    expected = 0.0
    for pair, (sources, targets) in zip(pairs, links, strict=True):
        weights = model.attention_maps(*inputs(*pair))["cross"][0, 0, 0].tolist()  # of the first of two layers
        for row in set(targets) - {4}:
            linked = [one for one, other in zip(sources, targets, strict=True) if other == row]
            expected -= sum(math.log(weights[row + 1][one]) / len(linked) for one in linked)
    batch = make_batch(pairs, MODEL)
    added = cross_entropy(model, guided_batch(batch, links), 0.1) - cross_entropy(model, batch, 0.1)
    assert added.item() == pytest.approx(ALIGNMENT_WEIGHT * expected, rel=1e-4)


def test_own_links_are_those_of_the_prediction_difference(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "LOGITS_TOKENS", 12)
    monkeypatch.setattr(guided, "MAX_ALIGNED", 3)
    rng = np.random.default_rng(1)
    pairs: list[Example] = [([*rng.integers(3, 30, 5).tolist(), 2], [5, 7, 6, 9, 2]) for _ in range(4)]
    found = find_links(model, MODEL, MemoryExamples(pairs))
    assert found[1::2] == [((), ())] * 2  # of many examples, not all have links

    def log_prob(source: list[int], target: Sequence[int], row: int) -> float:
        return float(model(*inputs(source, target))[0, row].detach().log_softmax(0)[target[row]])

    for (source, target), links in list(zip(pairs, found, strict=True))[::2]:
        ids, expected = list(source), []
        lost = [
            [
                max(0.0, log_prob(ids, target, row) - log_prob(ids[:one] + ids[one + 1 :], target, row))
                for row in range(4)
            ]
            for one in range(5)
        ]
        for row in range(4):
            shares = [lost[one][row] ** 2 / (sum(lost[one]) or 1.0) for one in range(5)]
            expected += [(shares.index(max(shares)), row)] if max(shares) else []
        assert list(zip(*links, strict=True)) == expected
    assert not model.training


def reversals(seed: int, count: int) -> list[Example]:
    """Return pairs whose target is the source in the reverse order."""
    rng = np.random.default_rng(seed)
    words = [rng.choice(np.arange(3, 30), rng.integers(2, 8), replace=False).tolist() for _ in range(count)]
    return [([*ids, 2], [*ids[::-1], 2]) for ids in words]


def trainer(run: Path, links: MemoryExamples | None = None, **changes: Any) -> GuidedTrainer:
    train, tokenizer = MemoryExamples(reversals(1, 60)), train_tokenizer(["a b c"], VOCABULARY)
    data = TrainingData(tokenizer, train, MemoryExamples(reversals(2, 6)), digest="toy")
    config = CONFIG.model_copy(update={"learning_rate": 1e-2, "checkpoint_steps": 0, **changes})
    return GuidedTrainer(run, config, TRANSLATION, data, MODEL, links=links, device=torch.device("cpu"))


def test_a_head_learns_the_links_of_a_file(tmp_path: Path) -> None:
    links = [(list(range(len(ids) - 1)), list(range(len(ids) - 1))[::-1]) for ids, _ in reversals(1, 60)]
    own = trainer(tmp_path / "run", MemoryExamples(links), epochs=12)
    for _ in range(12):
        own.train_epoch()
        own.progress.finish_epoch()
    right = list[bool]()
    for source, target in reversals(3, 20):
        best = own.model.eval().attention_maps(*inputs(source, target))["cross"][0, 0, 0].argmax(dim=-1)
        right += (best[1:].flip(0) == torch.arange(len(source) - 1)).tolist()
    assert np.mean(right) > 0.8  # by chance 0.2


def test_a_resumed_run_has_the_same_links_and_checkpoints_state_a_guided_head_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, states = tmp_path / "run", []
    trainer(tmp_path / "unbroken", epochs=3).fit()  # after 7 of 18 updates
    for number in range(3):
        part = trainer(run, epochs=3)
        part.train_epoch()
        part._finish_epoch(is_whole=True)
        config = read_model_config(run / "averaged" / "config.json")
        states.append(isinstance(config, TransformerConfig) and config.guided_alignment)
        if number == 1:  # the links of the folder are used
            monkeypatch.setattr(guided, "find_links", None)
    assert states == [False, True, True]
    assert_same_run(tmp_path / "unbroken", run)
    assert trainer(run, epochs=9)._first_phase == 7  # as before
    assert trainer(run, epochs=9)._first_phase == 7  # stays if the run becomes longer
