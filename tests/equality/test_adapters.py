"""Tests of the adapters: all three programs of the equality tests have the shipped weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lab.bench.weights import dequantize, read_model
from sightline.base.bundle_files import read_manifest
from sightline.export.check.sessions import encode, open_sessions
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.options import QuantizationRecipe
from sightline.model.architectures.transformer import Transformer
from sightline.model.rounding import Reference
from tests.equality.conftest import SHIPPED
from tests.rounding import assert_within_rounding
from tests.support.training_runs import verify_bundle


def test_the_model_read_from_a_bundle_is_the_one_that_was_exported(model: Transformer, float_bundle: Path) -> None:
    read = read_model(float_bundle)
    assert read.config == model.config
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("recipe", "largest"), [(QuantizationRecipe(8), 0.015), (QuantizationRecipe(4), 0.15)], ids=str
)
def test_the_model_read_from_a_quantised_bundle_has_the_rounded_weights_that_it_multiplies_by(
    recipe: QuantizationRecipe,
    largest: float,
    model: Transformer,
    float_bundle: Path,
    sources: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    quantize_bundle(float_bundle, tmp_path / "quantised", recipe, text=None)
    read = read_model(tmp_path / "quantised")
    for name, tensor in model.state_dict().items():
        moved = torch.linalg.vector_norm(read.state_dict()[name] - tensor) / torch.linalg.vector_norm(tensor)
        if name == "embedding.weight" and recipe.bits == 8:
            assert moved < largest, "that of the shipped bundle may lie in the same blocks already"
        else:
            assert (0 < moved < largest) == (tensor.dim() == 2), "matrices are rounded, vectors are not"
    if recipe.bits == 4:  # with 8 bits the rounding of activations is as large as that of weights
        served = served_hidden(tmp_path / "quantised", sources[0])
        apart, apart_from_float = (np.abs(served - hidden(one, sources[0])).max() for one in (read, model))
        assert apart < apart_from_float / 3


def test_the_shipped_bundle_encodes_as_the_model_read_from_it(
    model: Transformer, models: Reference[Transformer], sources: list[tuple[int, ...]]
) -> None:
    served = served_hidden(SHIPPED, sources[0])
    if read_manifest(SHIPPED).dtype == "float32":
        assert_within_rounding(models, lambda one: {"hidden": hidden(one, sources[0])}, {"hidden": served})
    else:  # it also rounds what it multiplies its weights by
        np.testing.assert_allclose(served, hidden(model, sources[0]), atol=0.2)


@pytest.mark.slow
def test_the_export_accepts_the_shipped_model_on_every_sentence(float_bundle: Path, sentences: list[str]) -> None:
    found = verify_bundle(float_bundle, float_bundle.with_name("checkpoint"), sentences)
    assert found.sentences == len(sentences)
    assert found.different_generations == 0


def served_hidden(bundle: Path, source: Sequence[int]) -> NDArray[np.float32]:
    """Return the output of the encoder (S, M) in ONNX Runtime."""
    states: NDArray[np.float32] = encode(open_sessions(bundle, read_manifest(bundle)), [source])["hidden"][0]
    return states


def hidden(model: Transformer, source: Sequence[int]) -> NDArray[np.float32]:
    """Return the output of the encoder (S, M) in PyTorch."""
    with torch.inference_mode():
        encoded, _ = model.encode(torch.tensor([source]), torch.tensor([len(source)]))
    states: NDArray[np.float32] = encoded[0].numpy()
    return states


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_stand_for_multiples_of_their_scale(bits: int) -> None:
    steps = np.arange(-8, 8, dtype=np.float32) * (1 if bits == 4 else 16)  # one block of 16
    codes = (steps + (1 << (bits - 1))).astype(np.uint8)
    packed = codes[::2] | codes[1::2] << 4 if bits == 4 else codes
    rows = dequantize(np.stack([packed, packed])[None], np.array([[0.5, -2.0]], np.float32), bits)
    np.testing.assert_array_equal(rows, [np.concatenate([steps * 0.5, steps * -2.0])])


def test_marian_gives_the_logits_of_our_model(
    model: Transformer, models: Reference[Transformer], marian: Any, sources: list[tuple[int, ...]]
) -> None:
    for source in sources[:3]:
        ids, target = torch.tensor([source]), torch.tensor([[model.config.bos_id, *sources[7]]])

        def compute(
            model: Transformer, ids: torch.Tensor = ids, target: torch.Tensor = target
        ) -> dict[str, NDArray[Any]]:
            with torch.inference_mode():
                return {"logits": model(ids, torch.tensor([ids.size(1)]), target).numpy()}

        with torch.inference_mode():
            given = marian(input_ids=ids, decoder_input_ids=target).logits.numpy()
        assert_within_rounding(models, compute, {"logits": given})
