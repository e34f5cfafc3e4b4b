"""The similarity graph: correct, without own weights, and accurate in all schemes."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from sightline.base.bundle_files import read_bundle, write_manifest
from sightline.export.check.sessions import Array, open_sessions
from sightline.export.convert.conversions import half_bundle, quantize_bundle
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.model import similar_graph
from sightline.export.import_errors import VerificationError
from sightline.export.options import QuantizationRecipe
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model
from sightline.service.runtime.device import DeviceRunner
from sightline.service.runtime.ort import OnnxRunner
from tests.export.products import everywhere
from tests.export.verified import verify_trained
from tests.rounding import rounding_bound
from tests.support.training_runs import verify_bundle

IDS = np.array([5, 300, 17], np.int64)


def compared(folder: Path) -> Array:
    (cosines,) = open_sessions(folder, read_bundle(folder)).similar.run(["cosines"], {"token_ids": IDS})
    return np.asarray(cosines)


def test_cosines_equal_those_of_single_pairs_in_pytorch(bundle: Path, model: Transformer) -> None:
    rows = model.embedding.weight.detach().double().tolist()

    def product(left: list[float], right: list[float]) -> float:
        return sum(one * other for one, other in zip(left, right, strict=True))

    expected = [
        [product(rows[id_], row) / (product(rows[id_], rows[id_]) * product(row, row)) ** 0.5 for row in rows]
        for id_ in IDS
    ]
    # Rounding errors of three sums of d_model products: the product and two norms.
    np.testing.assert_allclose(compared(bundle), expected, rtol=0, atol=3 * rounding_bound(model.config.d_model))


def test_a_row_of_zeros_has_no_similarity(tmp_path: Path) -> None:
    with WeightFile(tmp_path / "weights.bin") as weights:
        graph = similar_graph(np.array([[3.0, 4.0], [0.0, 0.0], [4.0, -3.0]], np.float32), weights)
    onnx.save_model(graph, tmp_path / "similar.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "similar.onnx", providers=["CPUExecutionProvider"])
    (cosines,) = session.run(None, {"token_ids": np.array([0, 1], np.int64)})
    np.testing.assert_allclose(cosines, [[1, 0, 0], [0, 0, 0]], rtol=0, atol=3 * rounding_bound(2))


@pytest.mark.parametrize(
    ("recipe", "largest"),
    [
        (QuantizationRecipe(8), 0.03),
        (QuantizationRecipe(4), 0.3),
        (everywhere("per-token"), 0.03),
        (everywhere("per-tensor"), 0.03),
        (everywhere("float32"), 0.0),
    ],
    ids=str,
)
def test_the_quantised_graph_reads_the_shared_table(
    bundle: Path, tmp_path: Path, toy_sentences: list[str], recipe: QuantizationRecipe, largest: float
) -> None:
    out = tmp_path / "small"
    quantize_bundle(bundle, out, recipe, None, calibration=toy_sentences[:2])
    assert np.abs(compared(out) - compared(bundle)).max() <= largest
    read = {name: tensor_locations(out / name) for name in ("encoder.onnx", "step.onnx", "similar.onnx")}
    assert read["similar.onnx"]
    assert read["similar.onnx"] <= read["encoder.onnx"] | read["step.onnx"]


def tensor_locations(graph: Path) -> set[tuple[str, ...]]:
    """Return the positions of a graph's weights in the weight file."""
    tensors = onnx.load_model(graph, load_external_data=False).graph.initializer
    return {tuple(entry.value for entry in tensor.external_data) for tensor in tensors if tensor.external_data}


def test_the_float32_graph_adds_no_weights(bundle: Path) -> None:
    assert tensor_locations(bundle / "similar.onnx") < tensor_locations(bundle / "step.onnx")


def test_a_runner_of_each_kind_compares(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "half"
    half_bundle(bundle, out, None)
    expected = compared(bundle)
    runner = OnnxRunner(bundle, read_bundle(bundle), num_threads=1)
    np.testing.assert_array_equal(runner.compare(IDS), expected)
    on_device = DeviceRunner(out, read_bundle(out), provider="cpu", num_threads=1)
    given = on_device.compare(IDS)
    assert given.dtype == np.float16
    np.testing.assert_allclose(given, expected, atol=3e-3)


def test_verification_finds_a_wrong_table(bundle: Path, checkpoint: Path) -> None:
    model, tokenizer = load_model(checkpoint)
    assert isinstance(model, Transformer)
    with torch.no_grad():
        model.embedding.weight[-1] = -model.embedding.weight[-1]  # no sentence has this token
    with pytest.raises(VerificationError, match="cosines of tokens differ"):
        verify_trained(bundle, model, tokenizer, ["a"])


def test_a_bundle_without_the_graph_is_verified_and_rewritten_as_it_is(
    copied: Path, checkpoint: Path, tmp_path: Path
) -> None:
    manifest = read_bundle(copied)
    files = {name: record for name, record in manifest.files.items() if name != "similar.onnx"}
    tasks = ("generate", "encode", "attention")
    older = manifest.model_copy(update={"similar": None, "tasks": tasks, "files": files})
    write_manifest(copied, older)
    assert verify_bundle(copied, checkpoint, ["A man sleeps."]).sentences == 1
    quantize_bundle(copied, tmp_path / "small", QuantizationRecipe(8), None)
    half_bundle(copied, tmp_path / "half", None)
    for name in ("small", "half"):
        rewritten = read_bundle(tmp_path / name)
        assert (rewritten.similar, rewritten.tasks) == (None, tasks)
        assert "similar.onnx" not in rewritten.files
