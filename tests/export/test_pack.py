"""Bundles whose matrices are stored in 8 bits."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from sightline.base.bundle import BundleError, Manifest
from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import onnx_steps, open_sessions
from sightline.export.convert.conversions import pack_bundle, quantize_bundle
from sightline.export.convert.pack import MIN_SIZE, round_matrix
from sightline.export.options import BundleMetadata, QuantizationRecipe
from tests.export.folders import BUNDLE_FILES, names
from tests.support.training_runs import export_bundle, verify_bundle

SOURCE = [11, 52, 90, 33, 2]


def with_rounded_matrices(bundle: Path, folder: Path) -> Path:
    """Copy a float32 bundle and round its matrices in place: the slow reference of `pack_graph`."""
    shutil.copytree(bundle, folder)
    for file in ("encoder.onnx", "step.onnx"):
        model = onnx.load_model(folder / file)
        rounded = {}
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor)
            if array.ndim > 1 and array.size >= MIN_SIZE and array.dtype == np.float32:
                codes, scales = round_matrix(array)
                rounded[tensor.name] = (codes * scales).astype(np.float32)
        for tensor in model.graph.initializer:
            if tensor.name in rounded:
                tensor.CopyFrom(numpy_helper.from_array(rounded[tensor.name], tensor.name))
        onnx.save_model(model, folder / file)
    return folder


def outputs(folder: Path, manifest: Manifest | None = None) -> NDArray[np.float32]:
    sessions = open_sessions(folder, manifest or read_bundle(folder))
    logits: NDArray[np.float32] = onnx_steps(sessions, SOURCE)([[1, 45, 67, 12]])[0]
    return logits


def test_a_packed_bundle_computes_with_the_rounded_matrices(bundle: Path, tmp_path: Path) -> None:
    given = pack_bundle(bundle, tmp_path / "packed", None)
    manifest, original = read_bundle(tmp_path / "packed"), read_bundle(bundle)
    twin = with_rounded_matrices(bundle, tmp_path / "twin")
    np.testing.assert_array_equal(outputs(tmp_path / "packed"), outputs(twin, original))
    assert 0 < np.abs(outputs(tmp_path / "packed") - outputs(bundle)).max() < 0.1
    assert names(tmp_path / "packed") == BUNDLE_FILES
    assert (manifest.dtype, manifest.stored_dtype, manifest.quantization) == ("float32", "int8", given)
    assert manifest.files["weights.bin"].bytes < 0.35 * original.files["weights.bin"].bytes
    assert 0.8 * original.loaded_bytes < manifest.loaded_bytes < 1.5 * original.loaded_bytes


def test_float16_weights_are_packed_and_nothing_is_packed_twice_or_verified(
    bundle: Path, checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    label = BundleMetadata("half")
    export_bundle(checkpoint, tmp_path / "half", label, toy_sentences[:1], half_weights=True, check=False)
    pack_bundle(tmp_path / "half", tmp_path / "packed", None)
    pack_bundle(bundle, tmp_path / "from-float32", None)
    assert np.abs(outputs(tmp_path / "packed") - outputs(tmp_path / "from-float32")).max() < 0.05
    with pytest.raises(BundleError, match="has weights of 8 bits already"):
        pack_bundle(tmp_path / "packed", tmp_path / "again", None)
    with pytest.raises(BundleError, match="has weights of 8 bits already"):
        quantize_bundle(tmp_path / "packed", tmp_path / "again", QuantizationRecipe(8), None)
    with pytest.raises(BundleError, match="intentionally differs from its checkpoint"):
        verify_bundle(tmp_path / "packed", checkpoint, toy_sentences[:1])


@pytest.mark.parametrize("axis", [-1, -2])
def test_scales_are_for_rows_or_columns_whichever_is_nearer(axis: int) -> None:
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=(2, 40, 30)).astype(np.float32)
    matrix *= np.exp(3 * rng.normal(size=np.abs(matrix).max(axis=axis, keepdims=True).shape)).astype(np.float32)
    matrix[0, 0] = 0
    codes, scales = round_matrix(matrix)
    assert scales.shape == ((2, 40, 1) if axis == -1 else (2, 1, 30))
    assert (np.abs(codes * scales - matrix) <= 0.5001 * scales).all()
    assert np.abs(codes).max() == 127
