"""Rows of quantized graphs do not affect each other, and the tests detect it if they do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import Sessions, encode, initial_states, open_sessions, run_step
from sightline.export.convert.calibrate import measure_ranges
from sightline.export.convert.quantize import quantize_graphs
from sightline.export.convert.states import measure_states, round_states, rounded_states
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.options import QuantizationRecipe
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model
from tests.export.products import (
    IN_BLOCKS,
    INNER,
    SIZE,
    Array,
    Draw,
    draw,
    everywhere,
    gemm_with_bias,
    matmul_and_bias,
    quantized,
    random,
)
from tests.export.test_trained_models import build_trained

OUTLIER = 1000.0
RECIPES_OF_PRODUCTS = [*IN_BLOCKS, everywhere("per-token"), everywhere("per-tensor")]
RECIPES = [
    *RECIPES_OF_PRODUCTS,
    QuantizationRecipe(8, 64, encoder="per-token", projection="per-token"),
    QuantizationRecipe(8, layers="float32"),
    QuantizationRecipe(8, states="float32"),
    QuantizationRecipe(4, encoder="per-tensor"),
    QuantizationRecipe(8, encoder="per-token", layers="per-tensor", projection="float32"),
]


def relu_and_product(graph: GraphBuilder, x: str) -> str:
    return matmul_and_bias(graph, graph.add("Relu", x))


def moved_by_an_outlier(run: Callable[[Array], Array]) -> float:
    """Return the change of a row's result when a row a thousand times larger joins the batch."""
    rows = random(2, INNER) * np.array([[1], [OUTLIER]], np.float32)
    return float(np.abs(run(rows)[0] - run(rows[:1])[0]).max())


@pytest.mark.parametrize("recipe", RECIPES_OF_PRODUCTS, ids=str)
@pytest.mark.parametrize("nodes", [matmul_and_bias, gemm_with_bias, relu_and_product])
def test_a_row_of_a_product_is_the_same_to_the_last_bit_in_every_batch(
    tmp_path: Path, nodes: Draw, recipe: QuantizationRecipe
) -> None:
    """A difference in the last bit changes the rounding of the next product; see `BLOCK_SIZES`."""
    _, run = quantized(draw(tmp_path, nodes), tmp_path, recipe)
    assert moved_by_an_outlier(run) == 0
    rows = random(33, INNER)
    alone = np.concatenate([run(rows[row : row + 1]) for row in range(len(rows))])
    for count in range(2, 34):
        np.testing.assert_array_equal(run(rows[:count]), alone[:count])


@pytest.mark.parametrize("recipe", RECIPES_OF_PRODUCTS, ids=str)
def test_a_row_of_the_projection_is_the_same_to_the_last_bit_in_every_batch(
    tmp_path: Path, recipe: QuantizationRecipe
) -> None:
    table = random(SIZE, 256)

    def nodes(graph: GraphBuilder, x: str) -> str:
        return graph.add("Gemm", x, graph.weight("table", torch.from_numpy(table)), transB=1)

    _, run = quantized(draw(tmp_path, nodes, 256), tmp_path, recipe)
    rows = random(33, 256)
    alone = np.concatenate([run(rows[row : row + 1]) for row in range(len(rows))])
    for count in (2, 3, 8, 33):
        np.testing.assert_array_equal(run(rows[:count]), alone[:count])


def test_tokens_of_an_encoder_have_the_same_bits_in_batches_of_whole_texts(tmp_path: Path) -> None:
    """The shape is that of a small BERT, which ONNX Runtime divides among threads and tiles."""
    matrix = random(384, 1536)

    def nodes(graph: GraphBuilder, x: str) -> str:
        product = graph.add("MatMul", x, graph.weight("weight", torch.from_numpy(matrix)))
        return graph.add("Add", product, graph.weight("bias", torch.from_numpy(random(1536))))

    _, run = quantized(draw(tmp_path, nodes, 384), tmp_path, everywhere("per-token"))
    rows = random(1030, 384)
    rows[5] *= OUTLIER
    together = run(rows)
    for start, count in ((0, 1), (1029, 1), (3, 16), (17, 121), (501, 257)):
        np.testing.assert_array_equal(run(rows[start : start + count]), together[start : start + count])


def test_one_scale_for_the_batch_is_detected(tmp_path: Path) -> None:
    def nodes(graph: GraphBuilder, x: str) -> str:
        weight = torch.from_numpy(random(SIZE, INNER).T * 30).to(torch.int8)
        codes, scale, zero = graph.add_multi("DynamicQuantizeLinear", [x], ["codes", "scale", "zero"])
        product = graph.add("MatMulInteger", codes, graph.weight("weight", weight), zero)
        return graph.add("Mul", graph.add("Cast", product, to=TensorProto.FLOAT), scale)

    onnx.save_model(draw(tmp_path, nodes), tmp_path / "graph.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "graph.onnx", providers=["CPUExecutionProvider"])
    assert moved_by_an_outlier(lambda rows: session.run(None, {"x": rows})[0]) > 1


# A whole model

OUTLIER_ID = 7


def with_one_scale(graph: onnx.ModelProto) -> onnx.ModelProto:
    """Quantize a graph with one activation scale for the whole batch."""
    spoilt = onnx.ModelProto()
    spoilt.CopyFrom(graph)
    del spoilt.graph.node[:]
    for node in graph.graph.node:
        if node.op_type == "MatMulNBits":
            codes = [f"{node.output[0]}.{part}" for part in ("codes", "scale", "zero")]
            spoilt.graph.node.append(onnx.helper.make_node("DynamicQuantizeLinear", [node.input[0]], codes))
            spoilt.graph.node.append(onnx.helper.make_node("DequantizeLinear", codes, [f"{node.output[0]}.rounded"]))
        spoilt.graph.node.append(node)
        if node.op_type == "MatMulNBits":
            spoilt.graph.node[-1].input[0] = f"{node.output[0]}.rounded"
    return spoilt


Load = Callable[[QuantizationRecipe, bool], Sessions]


@pytest.fixture(scope="module")
def load(checkpoint: Path, bundle: Path, sources: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Load a quantized toy model in which the embedding of one token is a thousand times larger.

    Ranges are measured without that token, which static products therefore cut to what others
    reach.
    """
    model, _ = load_model(checkpoint)
    assert isinstance(model, Transformer)
    with torch.no_grad():
        model.embedding.weight[OUTLIER_ID] *= OUTLIER
    folder, manifest = tmp_path_factory.mktemp("float32"), read_bundle(bundle)
    with WeightFile(folder / "weights.bin") as weights:
        built = build_trained(model, weights)
    assert built.encoder is not None and built.decoder is not None
    graphs = [built.encoder, built.decoder]
    ranges, state_ranges = measure_ranges(bundle, manifest, sources), measure_states(bundle, manifest)

    def load(recipe: QuantizationRecipe, spoilt: bool) -> Sessions:
        out = tmp_path_factory.mktemp("quantized")
        with WeightFile(out / "weights.bin") as weights:
            quantised = quantize_graphs(graphs, folder, weights, recipe, ranges)
        if recipe.states == "int8":
            round_states(quantised, state_ranges)
        states = rounded_states(manifest, state_ranges if recipe.states == "int8" else {})
        for name, graph in zip((manifest.encoder_graph.file, manifest.decoder_graph.file), quantised, strict=True):
            onnx.save_model(with_one_scale(graph) if spoilt else graph, out / name)
        return open_sessions(out, manifest.model_copy(update={"states": states}))

    return load


def read(
    sessions: Sessions, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Return all outputs except states, of the encoder and of each step of equally long targets."""
    manifest = sessions.manifest
    lengths = [len(source) for source in sources]
    encoded = encode(sessions, sources)
    states = initial_states(manifest, encoded, len(targets[0]))
    kept = {state.output for state in manifest.states}
    outputs = [name for name in manifest.decoder_graph.outputs if name not in kept]
    steps = [
        run_step(sessions, states, [target[age] for target in targets], [age] * len(targets), lengths, outputs)
        for age in range(len(targets[0]))
    ]
    return [encoded, *steps]


def largest_difference(alone: list[dict[str, Any]], together: list[dict[str, Any]], row: int) -> float:
    """Return the largest difference, relative for large values and without columns of padding."""
    differences = []
    for each, other in zip(alone, together, strict=True):
        for name in each.keys() - {"top_ids"}:  # equals may change places
            value = each[name][0]
            beside = other[name][row][tuple(slice(size) for size in value.shape)]
            differences.append(np.abs(value - beside) / np.maximum(np.abs(value), 1))
    return max(float(difference.max()) for difference in differences)


SOURCE, TARGET = [11, 52, 90, 33, 2], [1, 45, 67, 12]
OUTLIERS = [OUTLIER_ID] * len(SOURCE), [1, *[OUTLIER_ID] * (len(TARGET) - 1)]
LONGER = [(np.random.default_rng(4).integers(3, 300, size).tolist(), TARGET) for size in (6, 16, 33, 100)]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_sequence_does_not_depend_on_an_outlier_or_a_longer_source_in_its_batch(
    load: Load, recipe: QuantizationRecipe
) -> None:
    sessions = load(recipe, False)
    alone = read(sessions, [SOURCE], [TARGET])
    for others in (OUTLIERS, *LONGER):
        together = read(sessions, [SOURCE, others[0]], [TARGET, others[1]])
        assert largest_difference(alone, together, 0) == 0


def test_dependence_on_an_outlier_is_detected(load: Load) -> None:
    sessions = load(RECIPES[0], True)
    together = read(sessions, [SOURCE, OUTLIERS[0]], [TARGET, OUTLIERS[1]])
    assert largest_difference(read(sessions, [SOURCE], [TARGET]), together, 0) > 0.1


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_sequence_is_the_same_in_batches_of_any_size(load: Load, recipe: QuantizationRecipe) -> None:
    sessions, tokens = load(recipe, False), np.random.default_rng(4).integers(3, 300, (33, len(SOURCE) + len(TARGET)))
    sources, targets = tokens[:, : len(SOURCE)].tolist(), tokens[:, len(SOURCE) :].tolist()
    alone = read(sessions, sources[:1], targets[:1])
    for rows in (2, 3, 8, 33):
        together = read(sessions, sources[-rows + 1 :] + sources[:1], targets[-rows + 1 :] + targets[:1])
        assert largest_difference(alone, together, rows - 1) == 0


@pytest.mark.parametrize("recipe", IN_BLOCKS, ids=str)
def test_a_row_of_a_product_with_zero_points_is_the_same_to_the_last_bit_in_every_batch(
    tmp_path: Path, recipe: QuantizationRecipe
) -> None:
    """Weights that were quantized before keep their codes, which can have any zero point."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 1 << recipe.bits, (SIZE, INNER))
    zeros = rng.integers(0, 1 << recipe.bits, (SIZE, INNER // 16)).repeat(16, axis=1)
    zeros = zeros if recipe.block_size == 16 else zeros[:, :1]
    table = ((codes - zeros) * np.float32(0.125)).astype(np.float32)

    def nodes(graph: GraphBuilder, x: str) -> str:
        return graph.add("MatMul", x, graph.weight("weight", torch.from_numpy(table.T.copy())))

    model = draw(tmp_path, nodes)
    _, run = quantized(model, tmp_path, recipe)
    (product,) = (
        node for node in onnx.load(tmp_path / "quantized" / "graph.onnx").graph.node if node.op_type != "Identity"
    )
    assert product.input[3]  # zero points
    rows = random(33, INNER)
    alone = np.concatenate([run(rows[row : row + 1]) for row in range(len(rows))])
    # Activations are rounded to 8 bits.
    np.testing.assert_allclose(alone, rows @ table.T, rtol=0, atol=0.02 * float(np.abs(rows @ table.T).max()))
    for count in range(2, 34):
        np.testing.assert_array_equal(run(rows[:count]), alone[:count])
