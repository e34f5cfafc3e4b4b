"""Diagnostics equal what plain code computes, and change nothing."""

import math
from collections.abc import Sequence

import pytest
import torch

from lab.zoo.diagnostics import diagnose, layer_of
from sightline.model.architectures.factory import build_model
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.architectures.transformer import Transformer
from sightline.model.config import ArchitectureConfig, RecurrentConfig, TransformerConfig
from sightline.model.data.batches import Batch, make_batch
from sightline.model.training.translation import TRANSLATION

SIZES = {"embedding_size": 8, "encoder_size": 8, "decoder_size": 16, "attention_size": 8}
MODELS: dict[str, ArchitectureConfig] = {
    "transformer": TransformerConfig(20, d_model=8, num_heads=2, d_ff=8, encoder_layers=1, decoder_layers=1),
    "recurrent": RecurrentConfig(20, attention="dot", query="current", scaled=True, **SIZES),  # type: ignore[arg-type]
}
PAIRS = [([5, 6, 7, 2], [8, 9, 2]), ([5, 9, 2], [8, 2])]


def batches() -> Sequence[Batch]:
    return [make_batch([pair], ArchitectureConfig(20)) for pair in PAIRS]


@pytest.mark.parametrize("name", MODELS)
def test_gradient_norms_are_those_of_the_mean_loss(name: str) -> None:
    torch.manual_seed(2)
    model = build_model(MODELS[name])
    found = diagnose(model, TRANSLATION, batches(), 0)["gradients"]
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert isinstance(model, Transformer | RecurrentModel)
    total = torch.stack([TRANSLATION.validation_loss(model, batch) for batch in batches()]).sum() / 5
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    for layer, norm in found.items():
        own = [one for key, one in zip(parameters, gradients, strict=True) if layer_of(key) == layer]
        expected = math.sqrt(sum(float(one.square().sum()) for one in own if one is not None))
        assert norm == pytest.approx(expected, rel=1e-4), layer


def test_scores_are_those_before_the_softmax() -> None:
    torch.manual_seed(2)
    model = build_model(MODELS["transformer"]).eval()
    assert isinstance(model, Transformer)
    found = diagnose(model, TRANSLATION, batches()[:1], 0)["scores"]["decoder.0.cross_attention"]
    with torch.inference_mode():
        maps = model.attention_maps(*torch_inputs())["cross"][0]
    # The softmax keeps differences of scores, and so their standard deviation.
    assert found["spread"] == pytest.approx(float(maps.log().std(dim=-1, correction=0).mean()), rel=1e-3)


def test_scores_of_a_recurrent_decoder_are_scaled() -> None:
    torch.manual_seed(2)
    model = build_model(MODELS["recurrent"]).eval()
    assert isinstance(model, RecurrentModel)
    found = diagnose(model, TRANSLATION, batches()[:1], 0)["scores"]["score"]
    source, lengths, target = torch_inputs()
    with torch.inference_mode():
        memory, _ = model.encode(source, lengths)
        maps = model.decode(target, memory, lengths, need_weights=True)[2]
    assert maps is not None
    assert found["spread"] == pytest.approx(float(maps.log().std(dim=-1, correction=0).mean()), rel=1e-3)


def torch_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (source, target), *_ = PAIRS
    return torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[1, *target[:-1]]])


def test_layers_are_named_by_their_number() -> None:
    assert layer_of("encoder.0.feed_forward.inner.weight") == "encoder.0"
    assert layer_of("embedding.weight") == "embedding"
    assert layer_of("encoder.weight_ih_l0") == "encoder"
