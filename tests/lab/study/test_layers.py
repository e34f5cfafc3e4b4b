import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.bench.weights import read_model
from lab.study.bleu import SEED
from lab.study.layers import Damage, damage_weights, translations
from lab.zoo.systems import MULTI30K
from sightline.base.bundle_files import read_manifest
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model
from sightline.model.evaluation.bleu import translate

SHIPPED = Path("bundles", MULTI30K.name)


@torch.no_grad()
def damage_model(model: Transformer, damage: Damage) -> None:
    """Damage the same linear maps as a bundle's."""
    stack = model.encoder if damage.part.startswith("encoder") else model.decoder
    for number in damage.layers:
        layer = stack[number]
        maps = {
            "encoder self-attention": ["self_attention.output"],
            "decoder self-attention": ["self_attention.output"],
            "cross-attention": ["cross_attention.output"],
            "encoder layer": ["self_attention.output", "feed_forward.outer"],
            "decoder layer": ["self_attention.output", "cross_attention.output", "feed_forward.outer"],
        }[damage.part]
        for name in maps:
            linear = layer.get_submodule(name)
            assert isinstance(linear, torch.nn.Linear)
            order = torch.from_numpy(np.random.default_rng(SEED).permutation(model.config.d_model))
            for parameter in (linear.weight, linear.bias):
                parameter.copy_(torch.zeros_like(parameter) if damage.fault == "zero" else parameter[order])


@pytest.mark.parametrize(
    "damage",
    [None, Damage("encoder layer", [0], "zero"), Damage("cross-attention", [1], "shuffled")],
    ids=["whole", "zero", "shuffled"],
)
def test_a_damaged_bundle_translates_like_the_damaged_model_in_pytorch(
    damage: Damage | None, checkpoint: Path, bundle: Path, toy_sentences: list[str]
) -> None:
    model, tokenizer = load_model(checkpoint)
    assert isinstance(model, Transformer)
    whole = translate(model, tokenizer, toy_sentences, 1, 1.0)
    if damage:
        damage_model(model, damage)
    expected = translate(model, tokenizer, toy_sentences, 1, 1.0)
    assert (expected == whole) == (damage is None)
    assert translations(bundle, damage, toy_sentences) == expected


@pytest.mark.parametrize(
    "damage", [Damage("decoder layer", [1, 3], "zero"), Damage("encoder self-attention", [2], "shuffled")], ids=str
)
def test_of_a_quantized_bundle_only_the_damaged_linear_maps_change(damage: Damage, tmp_path: Path) -> None:
    expected, copy = read_model(SHIPPED), tmp_path / "copy"
    shutil.copytree(SHIPPED, copy)
    assert damage_weights(copy, read_manifest(copy), damage) == {"weights.bin"}
    damage_model(expected, damage)
    for name, tensor in read_model(copy).state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=0, atol=0)
