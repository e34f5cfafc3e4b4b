"""Descriptions of trained models: they compute the same as PyTorch, and ignore nothing."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sightline.export.check.verify import ComparedTexts, reference_outputs
from sightline.export.families import trained
from sightline.export.families.values import sinusoids
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.model import Graphs, build_graphs
from sightline.export.import_errors import ImportFailedError
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.encoder import TextEncoder
from sightline.model.architectures.transformer import Transformer
from sightline.model.config import CausalConfig, ClassifierConfig, EncoderConfig, TransformerConfig
from sightline.model.layers.positions import sinusoidal_positions
from sightline.model.rounding import reference
from tests.equality.systems import MakeConfig, random_models, small, small_systems
from tests.support.tensors import state_tensors

FEW_KEYS = {"linformer_size": 5, "max_positions": 48}
SYSTEMS: dict[str, MakeConfig] = {
    "linformer-headwise": small("linformer", **FEW_KEYS, linformer_sharing="headwise"),
    "linformer-key-value": small("linformer", **FEW_KEYS, linformer_sharing="key-value", pre_norm=True),
    "narrow-heads": small("transformer", d_model=20, num_heads=4),
    "recurrent-decoder": small("transformer", decoder="ssru"),
    "recurrent-decoder-pre-norm": small("transformer", decoder="ssru", decoder_layers=1, pre_norm=True),
    "independent-labels": small("sentiment", labels=("a", "b", "c"), multi_label=True),
    "encoder": lambda vocab_size: EncoderConfig(vocab_size, d_model=32, num_heads=4, d_ff=64),
    **small_systems(TransformerConfig),
    **small_systems(ClassifierConfig),
    **small_systems(CausalConfig),
}
SOURCE, TARGET = [11, 52, 90, 33, 45, 67, 2], [1, 45, 67, 12]
# float64 rounds 2**29 times finer than float32, and both computations round.
FLOAT64_ROUNDING = 2 * 2.0**-29

Outputs = Mapping[str, NDArray[np.float64]]


Trained = Transformer | Classifier | TextEncoder | CausalModel


def build_trained(model: Trained, file: WeightFile) -> Graphs:
    tensors = state_tensors(model)
    graphs = build_graphs(*trained.describe(model.config, tensors), file)
    tensors.check_all_read()
    return graphs


def make_model(name: str, checkpoint: Path) -> Trained:
    (model,) = random_models({name: SYSTEMS[name]}, checkpoint / "tokenizer.json", noise=0.1).values()
    assert isinstance(model, Trained)
    return model


@torch.inference_mode()
def pytorch_outputs(model: Trained) -> Outputs:
    source, lengths, target = torch.tensor([SOURCE]), torch.tensor([len(SOURCE)]), torch.tensor([TARGET])
    if isinstance(model, CausalModel):
        hidden, maps = model.hidden_states(source, need_weights=True)
        assert maps is not None
        found = {"hidden": hidden, "decoder": maps.transpose(0, 1), "logits": model.logits(hidden)}
    elif isinstance(model, Classifier | TextEncoder):
        hidden, maps = model.encode(source, lengths, need_weights=True)
        assert maps is not None
        found = {"hidden": hidden, "encoder": maps.transpose(0, 1)}
        if isinstance(model, Classifier):
            found["labels"] = model(source, lengths)
    else:
        all_maps = model.attention_maps(source, lengths, target)
        found = {kind: all_maps[kind].transpose(0, 1) for kind in all_maps.keys() - {"encoder_slots"}}
        found["hidden"], found["logits"] = model.encode(source, lengths)[0], model(source, lengths, target)
    return {name: tensor[0].numpy() for name, tensor in found.items()}


def described_outputs(model: Trained) -> Outputs:
    description, weights = trained.describe(model.config, state_tensors(model))
    texts = ComparedTexts((tuple(SOURCE),), (tuple(SOURCE if description.is_decoder_only else TARGET),))
    outputs = reference_outputs(description, weights, texts)
    outputs.pop("encoder_slots.0", None)  # PyTorch returns the weights of tokens alone
    return {name.removesuffix(".0"): array for name, array in outputs.items()}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_description_computes_the_same_as_pytorch(name: str, checkpoint: Path) -> None:
    model = make_model(name, checkpoint)
    expected, limits = reference(model).limits(pytorch_outputs)
    given = described_outputs(model)
    assert given.keys() == expected.keys()
    for output, array in expected.items():
        atol = FLOAT64_ROUNDING * limits[output]
        np.testing.assert_allclose(given[output], array, rtol=0, atol=atol, err_msg=output)


@pytest.mark.parametrize("name", ["narrow-heads", "chat-gatt", "sentiment", "encoder"])
def test_a_weight_that_the_graphs_would_ignore_is_an_error(name: str, checkpoint: Path, tmp_path: Path) -> None:
    model = make_model(name, checkpoint)
    model.register_parameter("gate", torch.nn.Parameter(torch.ones(3)))
    with (
        WeightFile(tmp_path / "weights.bin") as file,
        pytest.raises(ImportFailedError, match="has 1 tensors that its architecture does not use: gate"),
    ):
        build_trained(model, file)


def test_a_key_that_the_description_would_ignore_is_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("narrow-heads", checkpoint)
    assert isinstance(model, Transformer)
    known = tuple(key for key in trained.HARMLESS_KEYS if key != "dropout")
    monkeypatch.setattr(trained, "HARMLESS_KEYS", known)
    with pytest.raises(ImportFailedError, match=r"config\.json has 1 keys that are not known .*: dropout"):
        trained.describe(copy.deepcopy(model.config), state_tensors(model))


@pytest.mark.parametrize(("layers", "layer"), [(1, 0), (2, 0), (6, 4)])
def test_a_guided_head_is_that_of_the_layer_before_the_last(layers: int, layer: int) -> None:
    config = TransformerConfig(40, d_model=16, num_heads=2, d_ff=16, encoder_layers=1, decoder_layers=layers)
    for is_guided, expected in ((False, None), (True, ("reads", layer, 0))):
        model = Transformer(dataclasses.replace(config, guided_alignment=is_guided))
        assert trained.describe(model.config, state_tensors(model))[0].guided_alignment == expected


@pytest.mark.parametrize(("positions", "width"), [(256, 64), (48, 20), (1024, 512)])
def test_positions_equal_those_of_pytorch(positions: int, width: int) -> None:
    np.testing.assert_array_equal(sinusoids(positions, width), sinusoidal_positions(positions, width).numpy())
