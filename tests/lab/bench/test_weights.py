"""Tests that weights read back from a bundle are correct for every quantization scheme."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lab.bench.weights import read_model
from sightline.base.bundle import QuantScheme
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.convert.quantize import quantize_columns
from sightline.export.options import BundleMetadata, QuantizationRecipe
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model, save_checkpoint
from sightline.model.config import TransformerConfig
from sightline.model.data.tokenizer_training import read_tokenizer
from tests.support.training_runs import export_bundle

FORMS: tuple[QuantScheme, ...] = ("group-wise", "per-token", "per-tensor")


def read_quantized(bundle: Path, out: Path, recipe: QuantizationRecipe) -> dict[str, torch.Tensor]:
    quantize_bundle(bundle, out, replace(recipe, states="float32"), None, calibration=["A man sleeps."])
    return read_model(out).state_dict()


def by_columns(weight: torch.Tensor) -> NDArray[np.float32]:
    """Quantize a layer's weight (N, K) with one scale for each of its outputs."""
    codes, scales = quantize_columns(weight.numpy().T)
    return (codes * scales).T


def test_a_float32_bundle_gives_the_checkpoint(checkpoint: Path, bundle: Path) -> None:
    model, _ = load_model(checkpoint)
    read = read_model(bundle)
    assert read.config == model.config
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["per-token", "per-tensor"])
def test_weights_of_integer_products_are_dequantized_by_column(
    checkpoint: Path, bundle: Path, tmp_path: Path, form: QuantScheme
) -> None:
    read = read_quantized(bundle, tmp_path / "small", QuantizationRecipe(8, 16, form, form, form))
    for name, tensor in load_model(checkpoint)[0].state_dict().items():
        expected = by_columns(tensor) if tensor.dim() == 2 and name != "embedding.weight" else tensor.numpy()
        tolerance = 0.01 if name == "embedding.weight" else 1e-6  # the lookup table has one scale for 32 weights
        assert read[name].numpy() == pytest.approx(expected, abs=tolerance), name


def test_an_embedding_in_float32_is_the_checkpoints_own(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    read = read_quantized(bundle, tmp_path / "small", QuantizationRecipe(8, 16, projection="float32"))
    expected = load_model(checkpoint)[0].state_dict()["embedding.weight"]
    torch.testing.assert_close(read["embedding.weight"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_are_no_multiple_of_a_block_are_read_completely(
    checkpoint: Path, toy_sentences: list[str], tmp_path: Path, bits: Literal[4, 8]
) -> None:
    tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
    config = TransformerConfig(tokenizer.get_vocab_size(), d_model=24, num_heads=3, d_ff=16, encoder_layers=1)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Transformer(config).eval()
    save_checkpoint(tmp_path / "narrow", config, model.state_dict(), checkpoint / "tokenizer.json", {})
    export_bundle(tmp_path / "narrow", tmp_path / "float32", BundleMetadata("narrow"), toy_sentences[:1], check=False)
    read = [
        read_quantized(tmp_path / "float32", tmp_path / form, QuantizationRecipe(bits, 16, projection=form))[
            "embedding.weight"
        ]
        for form in FORMS
    ]
    for other in read[1:]:  # from the group-wise product, and from the lookup table
        torch.testing.assert_close(read[0], other, rtol=0, atol=0)
    weight = model.state_dict()["embedding.weight"]
    moved = torch.linalg.vector_norm(read[0] - weight) / torch.linalg.vector_norm(weight)
    assert 0 < moved < {8: 0.01, 4: 0.15}[bits]
