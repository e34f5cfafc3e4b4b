"""Imported decoder-only graphs in 8 and 4 bits: quantized products, and independent rows."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from sightline.export.convert.quantize import quantize_graphs
from sightline.export.graphs.builder import WeightFile
from sightline.export.options import Recipe
from tests.export.decoder_models import Imported, Rows, import_model, random_ids
from tests.zoo.models import DECODERS, POSITIONS

OUTPUTS = ("logits", "hidden")
RECIPES = (Recipe(8, 32), Recipe(4, 16), Recipe(8, 16, projection="float32"), Recipe(8, layers="per-token"))


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen3-windows", "gemma2"])
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    hf = DECODERS[request.param].make(scale=0.1)
    with import_model(hf, tmp_path_factory.mktemp(request.param)) as imported:
        yield imported


def quantized(imported: Imported, recipe: Recipe, folder: Path) -> onnx.ModelProto:
    graph = onnx.load(imported.graph, load_external_data=False)
    with WeightFile(folder / "weights.bin") as file:
        (made,) = quantize_graphs([graph], imported.folder, file, recipe, {})
    onnx.save_model(made, folder / "decoder.onnx")
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_quantized_graphs(imported: Imported, recipe: Recipe, tmp_path: Path) -> None:
    operators = Counter(node.op_type for node in quantized(imported, recipe, tmp_path).graph.node)
    stack = imported.model.decoder
    assert stack is not None
    num_products = stack.layers * (5 if stack.feed_forward.gated else 4)
    expected = {"group-wise": "MatMulNBits", "per-token": "MatMulIntegerToFloat"}
    assert operators[expected[recipe.layers]] == num_products + (recipe.schemes["projection"] == recipe.layers)
    assert operators["MatMul"] == 0
    assert operators["Gemm"] == (recipe.projection == "float32")

    texts = [random_ids(length) for length in (13, 1, 8)]
    batch = Rows(tmp_path / "decoder.onnx", imported.model, len(texts), POSITIONS)
    for row, text in enumerate(texts):
        batch.run(row, np.array([text]), [0], OUTPUTS)
    given = batch.run(0, np.full((len(texts), 1), 3), [len(text) for text in texts], OUTPUTS)
    for row, text in enumerate(texts):
        alone = Rows(tmp_path / "decoder.onnx", imported.model, 1, POSITIONS)
        alone.run(0, np.array([text]), [0], OUTPUTS)
        single = alone.run(0, np.array([[3]]), [len(text)], OUTPUTS)
        for name in OUTPUTS:
            assert single[name][0].tobytes() == given[name][row].tobytes()
        exact = imported.session()
        exact.run(0, np.array([text]), [0], OUTPUTS)
        reference = exact.run(0, np.array([[3]]), [len(text)], OUTPUTS)["logits"][0]
        cosine = reference @ single["logits"][0] / np.linalg.norm(reference) / np.linalg.norm(single["logits"][0])
        # Weights of a normal distribution lose 1 % (7 bits in each column) to 7 % (4 bits in blocks
        # of 16) in each product. The errors of some 15 products in sequence add up in quadrature.
        assert cosine > (0.99 if recipe.bits == 8 else 0.9)
