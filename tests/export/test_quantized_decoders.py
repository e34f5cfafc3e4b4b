"""Imported decoder-only graphs in 8 and 4 bits: quantized products, and independent rows."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from sightline.base.bundle import Manifest
from sightline.export.check.verify import GraphRunner
from sightline.export.convert.quantize import quantize_graphs
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
    graph = onnx.load(folder / "decoder.onnx", load_external_data=False)
    with WeightFile(out / "weights.bin") as file:
        (made,) = quantize_graphs([graph], folder, file, recipe, {})
    onnx.save_model(made, out / "decoder.onnx")
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_quantized_graphs(imported: tuple[Imported, Manifest], recipe: QuantizationRecipe, tmp_path: Path) -> None:
    (float32, manifest), model = imported, imported[0].model
    operators = Counter(node.op_type for node in quantized(float32.folder, recipe, tmp_path).graph.node)
    stack = model.decoder
    assert stack is not None
    num_products = stack.layers * (5 if stack.feed_forward.gated else 4)
    expected = {"group-wise": "MatMulNBits", "per-token": "MatMulIntegerToFloat"}
    assert operators[expected[recipe.layers]] == num_products + (recipe.schemes["projection"] == recipe.layers)
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
