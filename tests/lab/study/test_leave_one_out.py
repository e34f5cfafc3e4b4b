"""Tests against a simple implementation that removes one token at a time and decodes one prefix at
a time.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lab.study.masking import kendall_tau
from sightline.model.architectures.factory import TranslationModel, build_model
from sightline.model.architectures.recurrent import Memory, RecurrentModel, RecurrentState
from sightline.model.config import RecurrentConfig, TransformerConfig
from sightline.model.decoding.reference import log_softmax, pytorch_steps
from sightline.model.layers.multi_head_attention import masked_softmax
from tests.support.leave_one_out import explain, hidden

SOURCE = [7, 5, 9, 11, 5, 2]
RECURRENT = RecurrentConfig(20, embedding_size=8, encoder_size=6, decoder_size=12, attention_size=6, dropout=0.0)
TRANSFORMER = TransformerConfig(20, d_model=8, num_heads=2, d_ff=16, encoder_layers=2, decoder_layers=2)


@pytest.fixture(params=[RECURRENT, TRANSFORMER], ids=["recurrent", "transformer"])
def model(request: pytest.FixtureRequest) -> TranslationModel:
    model: TranslationModel = _model(request.param)
    return model


def _model(config: RecurrentConfig | TransformerConfig) -> Any:
    torch.set_num_threads(1)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = build_model(config)
        assert isinstance(model, TranslationModel)
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        model.embedding.weight[config.eos_id] *= 0.1  # so that outputs do not end immediately
    return model.eval()


def expected_log_probs(
    model: TranslationModel, source: Sequence[int], target: Sequence[int]
) -> list[np.ndarray[Any, Any]]:
    """Return the log-probabilities (V,) of the token after each prefix of a target."""
    step = pytorch_steps(model, source)
    prefixes = [[model.config.bos_id, *target[:index]] for index in range(len(target))]
    return [log_softmax(step([prefix]))[0] for prefix in prefixes]


def test_the_translation_is_the_models_own(model: TranslationModel) -> None:
    explained = explain(model, SOURCE)
    for log_probs, token, own in zip(
        expected_log_probs(model, SOURCE, explained.target), explained.target, explained.log_probs, strict=True
    ):
        assert token == log_probs.argmax()
        assert own == pytest.approx(log_probs[token], abs=1e-5)
    assert len(explained.target) > 1


def test_a_deleted_token_is_not_in_the_source(model: TranslationModel) -> None:
    explained = explain(model, SOURCE)
    effect = explained.effects["deleted"]
    for index in range(len(SOURCE)):
        without = expected_log_probs(model, [*SOURCE[:index], *SOURCE[index + 1 :]], explained.target)
        for row, (log_probs, token) in enumerate(zip(without, explained.target, strict=True)):
            assert effect.predictions[row, index] == log_probs.argmax()
            expected = explained.log_probs[row] - log_probs[token]
            assert effect.drops[row, index] == pytest.approx(expected, abs=1e-4)


@torch.inference_mode()
def test_a_token_hidden_from_a_recurrent_decoder_gets_no_weight() -> None:
    model = _model(RECURRENT)
    assert isinstance(model, RecurrentModel) and model.score is not None
    explained = explain(model, SOURCE)
    lengths = torch.tensor([len(SOURCE)])
    memory, _ = model.encode(torch.tensor([SOURCE]), lengths)
    for index in range(len(SOURCE)):
        mask = torch.arange(len(SOURCE)) != index
        state, log_probs = model.initial_state(memory), []
        for token in [model.config.bos_id, *explained.target[:-1]]:
            # The step of Bahdanau's decoder with a mask.
            embedded = model.embed(torch.tensor([[token]]))[:, 0]
            weights = masked_softmax(model.score(state.hidden, memory.keys), mask)
            context = (weights.unsqueeze(1) @ memory.annotations).squeeze(1)
            state = RecurrentState(
                model.cell(torch.cat((embedded, context), dim=1), state.hidden), state.cell, state.feed
            )
            log_probs.append(model.logits(model.readout(state.hidden, context, embedded)).log_softmax(dim=-1)[0])
        _same(explained.effects["hidden"].drops[:, index], explained.log_probs, log_probs, explained.target)


@torch.inference_mode()
def test_a_token_hidden_from_a_transformer_decoder_gets_no_weight() -> None:
    model = _model(TRANSFORMER)
    explained = explain(model, SOURCE)
    memory, _ = model.encode(torch.tensor([SOURCE]), torch.tensor([len(SOURCE)]))
    size = len(explained.target)
    for index in range(len(SOURCE)):
        x = model.embed(torch.tensor([[model.config.bos_id, *explained.target[:-1]]]))
        mask = (torch.arange(len(SOURCE)) != index)[None, None, None]
        for layer in model.decoder:
            x, _, _ = layer(x, memory, torch.ones(size, size, dtype=torch.bool).tril(), mask)
        log_probs = list(model.logits(x).log_softmax(dim=-1)[0])
        _same(explained.effects["hidden"].drops[:, index], explained.log_probs, log_probs, explained.target)


def _same(drops: Any, before: Any, log_probs: Sequence[torch.Tensor], target: Sequence[int]) -> None:
    after = [float(row[token]) for row, token in zip(log_probs, target, strict=True)]
    np.testing.assert_allclose(drops, before - np.array(after), atol=1e-4)


def test_hiding_a_token_keeps_the_first_state_of_a_recurrent_decoder() -> None:
    model = _model(RECURRENT)
    whole, _ = model.encode(torch.tensor([SOURCE]), torch.tensor([len(SOURCE)]))
    memory = hidden(model, SOURCE)
    assert isinstance(memory, Memory)
    assert torch.equal(memory.state, whole.state.expand(len(SOURCE), -1))
    assert memory.annotations.shape == (len(SOURCE), len(SOURCE) - 1, model.config.annotation_size)


def test_tau_counts_the_pairs_that_agree() -> None:
    left = np.array([[1.0, 2.0, 3.0, 4.0]] * 4)
    right = np.array([[1.0, 2, 3, 4], [4, 3, 2, 1], [1, 2, 4, 3], [5, 5, 5, 5]])
    # One of six pairs is reversed: (5 - 1) / 6.
    assert kendall_tau(left, right) == pytest.approx([1, -1, 4 / 6, 0])
    # The right side has one tie: 5 agreeing pairs, divided by the root of 6 times 5.
    assert kendall_tau(left[:1], np.array([[1.0, 2, 3, 3]])) == pytest.approx([5 / 30**0.5])
