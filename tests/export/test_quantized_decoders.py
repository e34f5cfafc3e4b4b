"""Imported decoder-only graphs in 8 and 4 bits: quantized products, and independent rows."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from sightline.base.bundle import Manifest
from sightline.export.check.verify import GraphRunner
from sightline.export.convert.products import product_inputs, products
from sightline.export.convert.quantize import quantize_graphs
from sightline.export.convert.smoothing import smoothing_factors
from sightline.export.graphs.builder import WeightFile
from sightline.export.options import QuantizationRecipe
from tests.zoo.comparing import Imported, import_folder
from tests.zoo.models import DECODERS

OUTPUTS = ("logits", "hidden")
RECIPES = (
    QuantizationRecipe(8, 32),
    QuantizationRecipe(4, 16),
    QuantizationRecipe(8, 16, projection="float32"),
    QuantizationRecipe(8, layers="per-token"),
)


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen3-windows", "gemma2"])
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Imported, Manifest]:
    folder = tmp_path_factory.mktemp(request.param)
    DECODERS[request.param].save(folder, scale=0.1)
    imported = import_folder(folder)
    return imported, imported.write_bundle()


def quantized(folder: Path, recipe: QuantizationRecipe, out: Path) -> onnx.ModelProto:
    graph = onnx.load(folder / "step.onnx", load_external_data=False)
    with WeightFile(out / "weights.bin") as file:
        (made,) = quantize_graphs([graph], folder, file, recipe, {})
    onnx.save_model(made, out / "step.onnx")
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_quantized_graphs(imported: tuple[Imported, Manifest], recipe: QuantizationRecipe, tmp_path: Path) -> None:
    (float32, manifest), model = imported, imported[0].model
    operators = Counter(node.op_type for node in quantized(float32.folder, recipe, tmp_path).graph.node)
    stack = model.decoder
    assert stack is not None
    num_products = stack.layers * (5 if stack.feed_forward.gated else 4)
    expected = {"group-wise": "MatMulNBits", "per-token": "MatMulIntegerToFloat"}
    layers = recipe.schemes["layers"]
    assert operators[expected[layers]] == num_products + (recipe.projection == layers)
    assert operators["MatMul"] == 0
    assert operators["Gemm"] == (recipe.projection == "float32")

    texts = [np.random.default_rng(length).integers(211, size=length).tolist() for length in (13, 8, 1)]
    runner, exact = (GraphRunner(folder, manifest, model) for folder in (tmp_path, float32.folder))
    _, given = runner.run(texts, texts, 1)
    for row, text in enumerate(texts):
        _, alone = runner.run([text], [text], 1)
        for name in OUTPUTS:
            assert alone[f"{name}.0"].tobytes() == given[f"{name}.{row}"].tobytes()
        logits, reference = (one.run([text], [text], 1)[1]["logits.0"][-1] for one in (runner, exact))
        cosine = reference @ logits / np.linalg.norm(reference) / np.linalg.norm(logits)
        # Weights of a normal distribution lose 1 % (7 bits in each column) to 7 % (4 bits in blocks
        # of 16) in each product. The errors of some 15 products in sequence add up in quadrature.
        assert cosine > (0.99 if recipe.bits == 8 else 0.9)


# Number of products of a layer whose channels are smoothed, and of the others.
SMOOTHED = {
    "gpt2": (3, 1),
    "llama-biases": (4, 1),
    "qwen3-windows": (4, 1),
    "gemma2": (4, 1),
    "gpt-neox": (3, 1),
    "olmo2": (1, 4),  # no normalization is before a sublayer
    "opt": (3, 1),
    "phi3": (4, 1),
}


@pytest.mark.parametrize("name", SMOOTHED)
def test_smoothed_channels_change_no_output(name: str, tmp_path: Path) -> None:
    """Factors that differ by thousands cancel out."""
    DECODERS[name].save(tmp_path, scale=0.1)
    imported = import_folder(tmp_path)
    manifest = imported.write_bundle()
    text = np.random.default_rng(1).integers(211, size=13).tolist()
    expected = GraphRunner(tmp_path, manifest, imported.model).run([text], [text], 1)[1]
    model = onnx.load(tmp_path / "step.onnx")  # with its weights
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    random = np.random.default_rng(2)
    matrices = {
        product.node.input[0]: onnx.numpy_helper.to_array(constants[product.weight])
        for product in products(model.graph)
    }
    ranges = {
        x: np.exp(random.uniform(-7, 7, len(matrices[x]))).astype(np.float32) for x in product_inputs(model.graph)
    }
    factors, smoothed = smoothing_factors(model.graph, ranges, lambda name: onnx.numpy_helper.to_array(constants[name]))
    found = [product.node.input[0] in smoothed for product in products(model.graph) if not product.transposed]
    layers = imported.model.first_stack.layers
    assert (sum(found), len(found) - sum(found)) == tuple(layers * number for number in SMOOTHED[name])
    for name, factor in factors.items():
        changed = onnx.numpy_helper.to_array(constants[name]) * factor
        constants[name].CopyFrom(onnx.numpy_helper.from_array(changed, name))
    onnx.save_model(model, tmp_path / "step.onnx")
    given = GraphRunner(tmp_path, manifest, imported.model).run([text], [text], 1)[1]
    for output in (f"{name}.0" for name in OUTPUTS):
        np.testing.assert_allclose(
            given[output], expected[output], rtol=0, atol=1e-3 * np.nanmax(np.abs(expected[output]))
        )
    if not imported.model.first_stack.feed_forward.gated:
        product = next(product for product in products(model.graph) if ".inner." in product.weight)
        weights = np.abs(onnx.numpy_helper.to_array(constants[product.weight])).max(axis=1)
        activations = ranges[product.node.input[0]] / factors[product.weight][:, 0]
        assert activations / weights == pytest.approx(activations[0] / weights[0], rel=1e-3), "shared equally"
