import pytest
import torch

from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.factory import TranslationModel, build_model
from sightline.model.config import ArchitectureConfig, CausalConfig, RecurrentConfig, TransformerConfig
from sightline.model.decoding import continue_greedily, one_thread, translate_batch
from tests.support.reference_decoding import beam, greedy, pytorch_steps

TRANSFORMER = TransformerConfig(
    9, d_model=16, num_heads=2, d_ff=32, encoder_layers=1, decoder_layers=2, max_positions=24
)
GRU = RecurrentConfig(9, embedding_size=12, encoder_size=8, decoder_size=12, attention_size=8, max_positions=24)
LSTM = RecurrentConfig(
    40, cell="lstm", embedding_size=12, encoder_size=8, decoder_size=16, attention="general", query="current",
    input_feeding=True, max_positions=24,
)  # fmt: skip
CAUSAL = CausalConfig(9, d_model=16, num_heads=2, d_ff=16, layers=2, max_positions=24)
SOURCES = [[5, 2], [6, 7, 8, 3, 4, 5, 2], [4, 4, 2], [6, 2], [3, 8, 7, 6, 2]]


def random_model(config: ArchitectureConfig, seed: int) -> torch.nn.Module:
    """Return a model whose outputs depend on its inputs and sometimes end."""
    torch.manual_seed(seed)
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# With these seeds, some outputs of greedy decoding end and others do not.
@pytest.mark.parametrize(("num_beams", "length_penalty"), [(1, 0.0), (1, 1.0), (3, 1.0), (5, 0.0), (5, 2.0), (4, -1.0)])
@pytest.mark.parametrize(("config", "seed"), [(TRANSFORMER, 9), (TRANSFORMER, 11), (GRU, 3), (LSTM, 6)])
def test_translations_of_a_batch_equal_those_of_each_sentence(
    config: ArchitectureConfig, seed: int, num_beams: int, length_penalty: float
) -> None:
    model = random_model(config, seed)
    assert isinstance(model, TranslationModel)
    found = translate_batch(model, SOURCES, 8, num_beams, length_penalty)
    alone = [beam(pytorch_steps(model, one), 1, 2, 8, num_beams, length_penalty)[0].ids for one in SOURCES]
    assert [tuple(ids) for ids in found] == alone
    if num_beams == 1:
        assert alone == [greedy(pytorch_steps(model, one), 1, 2, 8).ids for one in SOURCES]
        assert {ids[-1] == 2 for ids in found} == {True, False}


@pytest.mark.parametrize("seed", [2, 8])
def test_continuations_of_a_batch_equal_those_of_each_prompt(seed: int) -> None:
    model = random_model(CAUSAL, seed)
    assert isinstance(model, CausalModel)
    found = continue_greedily(model, SOURCES, (2, 3), 8)
    alone = [greedy(pytorch_steps(model, prompt), prompt[-1], (2, 3), 8).ids for prompt in SOURCES]
    assert [tuple(ids) for ids in found] == alone
    assert {ids[-1] in (2, 3) for ids in found} == {True, False}


def test_a_continuation_ends_at_the_positions_of_the_model() -> None:
    model = random_model(CAUSAL, 1)
    assert isinstance(model, CausalModel)
    assert [len(ids) for ids in continue_greedily(model, [[5] * 20, [5] * 24, [5] * 23], (), 10)] == [4, 0, 1]


def test_decoding_with_one_thread_restores_the_number_of_threads() -> None:
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
