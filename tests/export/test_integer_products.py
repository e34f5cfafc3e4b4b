"""Integer products, dynamic per-token and static per-tensor, compared with slow references."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from sightline.base.bundle import QuantScheme
from sightline.export.convert.quantize import SMALLEST_RANGE, quantize_columns, quantize_graphs
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.options import QuantizationRecipe
from tests.export.products import (
    INNER,
    LARGEST,
    SIZE,
    Array,
    Draw,
    draw,
    everywhere,
    gemm_transposed,
    gemm_with_bias,
    matmul,
    matmul_and_bias,
    quantized,
    random,
)

BY_ROWS, STATIC = everywhere("per-token"), everywhere("per-tensor")
FUSED = ["MatMulIntegerToFloat"]
UNFUSED = ["MatMulInteger", "Cast", "Mul"]  # of a transposed matrix without a bias: the one to the vocabulary


def gemm_and_bias(graph: GraphBuilder, x: str) -> str:
    return graph.add("Add", gemm_transposed(graph, x), graph.weight("bias", torch.from_numpy(random(SIZE))))


PRODUCTS = pytest.mark.parametrize(
    ("nodes", "bias", "is_transposed"),
    [
        (matmul, None, False),
        (matmul_and_bias, random(SIZE), False),
        (gemm_transposed, None, True),
        (gemm_and_bias, random(SIZE), True),
        (gemm_with_bias, random(SIZE), True),
    ],
    ids=["matmul", "matmul and bias", "transposed", "transposed and bias", "bias inside"],
)

Levels = NDArray[np.int64]


def after_relu(nodes: Draw) -> Draw:
    return lambda graph, x: nodes(graph, graph.add("Relu", x))


def slow_scale(column: Array) -> np.float32:
    """Return the scale with which no two adjacent weights of the same sign exceed 127 steps."""
    pairs = zip(column[0::2], column[1::2], strict=True)
    # Weights of different signs have a sum below the larger one.
    return np.float32(max(max(abs(one), abs(two), abs(one + two)) for one, two in pairs) / np.float32(127))


def slow_product(levels: Levels, steps: Array, matrix: Array) -> Array:
    """Compute the product of quantized activations (B, K) and a matrix quantized per column."""
    result = np.zeros((len(levels), matrix.shape[1]), np.float32)
    for i, row in enumerate(levels):
        for j, column in enumerate(matrix.T):
            scale = slow_scale(column)
            result[i, j] = (row @ np.rint(column / scale).astype(int)) * scale * steps[i]
    return result


def close(given: Array, expected: Array) -> None:
    scale = np.abs(expected).max(axis=1, keepdims=True)
    assert given / scale == pytest.approx(expected / scale, abs=2e-6)


# Dynamic per-token


def levels_of_rows(x: Array) -> tuple[Levels, Array, Array]:
    """Round each row to 256 levels; return the levels, the steps (B,) and the smallest values."""
    smallest = x.min(axis=1)
    steps = np.maximum((x - smallest[:, None]).max(axis=1), SMALLEST_RANGE) * np.float32(1 / 255)
    return np.rint((x - smallest[:, None]) / steps[:, None]).astype(int), steps, smallest


def slow_product_by_rows(x: Array, matrix: Array) -> Array:
    levels, steps, smallest = levels_of_rows(x)
    return slow_product(levels, steps, matrix) + slow_product(np.ones_like(levels), smallest, matrix)


def dequantized_rows(x: Array) -> Array:
    levels, steps, smallest = levels_of_rows(x)
    return levels * steps[:, None] + smallest[:, None]


@PRODUCTS
def test_a_product_by_rows_equals_its_slow_twin(
    tmp_path: Path, nodes: Draw, bias: Array | None, is_transposed: bool
) -> None:
    operators, run = quantized(draw(tmp_path, nodes), tmp_path, BY_ROWS)
    assert [operators.count(one) for one in ("QuantizeLinear", "ReduceMax", "ReduceMin")] == [1, 1, 1]
    assert set(UNFUSED if is_transposed else FUSED) <= set(operators)
    # Rows of different sizes, of one sign, and with an outlier.
    x = random(7, INNER) * np.array([[0.1], [1], [7], [30], [1000], [1], [1]], np.float32)
    x[4:6] = np.abs(x[4:6]) * np.array([[1], [-1]], np.float32)
    x[6, 5] = 40
    added = np.float32(0) if bias is None else bias
    expected = slow_product_by_rows(x, random(SIZE, INNER).T) + added
    close(run(x), expected)
    exact, scale = x @ random(SIZE, INNER).T + added, np.abs(expected).max(axis=1, keepdims=True)
    assert expected / scale == pytest.approx(exact / scale, abs=0.02)


@pytest.mark.parametrize("nodes", [matmul_and_bias, gemm_with_bias])
def test_a_row_of_zeros_gives_the_bias(tmp_path: Path, nodes: Draw) -> None:
    _, run = quantized(draw(tmp_path, nodes), tmp_path, BY_ROWS)
    x = random(3, INNER)
    x[1] = 0
    np.testing.assert_array_equal(run(x)[1], random(SIZE))


@pytest.mark.parametrize("inner", [INNER, INNER - 1])
def test_columns_move_by_at_most_half_a_step_and_adjacent_weights_fit_sixteen_bits(inner: int) -> None:
    matrix = random(inner, SIZE) * np.logspace(-3, 3, SIZE, dtype=np.float32)
    matrix[:, 3] = 0
    codes, scales = quantize_columns(matrix)
    assert (np.abs(codes * scales - matrix) <= 0.501 * scales).all()
    signs = [np.maximum(sign * codes.astype(int), 0) for sign in (1, -1)]
    largest = np.max([np.add.reduceat(weights, np.arange(0, inner, 2)) for weights in signs], axis=(0, 1))
    assert np.delete(largest, 3).min() >= 126 and largest.max() <= 128  # 255 * 128 < 2 ** 15
    assert not codes[:, 3].any()


# Static per-tensor


def symmetric_levels(x: Array) -> tuple[Levels, float]:
    """Round to levels from -128 to 127; return the codes and the step."""
    step = LARGEST / 127
    return np.clip(np.rint(x / step), -128, 127).astype(int), step


def levels_above_zero(x: Array) -> tuple[Levels, float]:
    step = LARGEST / 255
    return np.clip(np.rint(x / step), 0, 255).astype(int), step


@PRODUCTS
@pytest.mark.parametrize("relu", [False, True], ids=["", "after Relu"])
def test_a_static_product_equals_its_slow_twin(
    tmp_path: Path, nodes: Draw, bias: Array | None, is_transposed: bool, relu: bool
) -> None:
    """All rows share one step, values are clipped, and rounding replaces `Relu`."""
    operators, run = quantized(draw(tmp_path, after_relu(nodes) if relu else nodes), tmp_path, STATIC)
    product = UNFUSED if is_transposed and bias is None else FUSED
    assert operators == ["QuantizeLinear", *product, "Identity"]
    x = random(5, INNER) * np.array([[0.1], [1], [7], [30], [1000]], np.float32)
    levels, step = levels_above_zero(x) if relu else symmetric_levels(x)
    assert len(np.unique(levels[1])) > 20 and len(np.unique(levels[4])) == 2, "within the range, and beyond it"
    steps = np.full(len(x), step, np.float32)
    close(run(x), slow_product(levels, steps, random(SIZE, INNER).T) + (0 if bias is None else bias))


@pytest.mark.parametrize("relu", [False, True], ids=["", "after Relu"])
def test_a_static_product_within_the_range_is_near_the_exact_one(tmp_path: Path, relu: bool) -> None:
    nodes = after_relu(matmul_and_bias) if relu else matmul_and_bias
    _, run = quantized(draw(tmp_path, nodes), tmp_path, STATIC)
    x = np.clip(random(5, INNER), -LARGEST, LARGEST)
    exact = (np.maximum(x, 0) if relu else x) @ random(SIZE, INNER).T + random(SIZE)
    assert run(x) == pytest.approx(exact, abs=0.03 * float(np.abs(exact).max()))


@pytest.mark.parametrize("relu", [False, True], ids=["", "after Relu"])
def test_values_beyond_the_measured_range_are_clipped(tmp_path: Path, relu: bool) -> None:
    _, run = quantized(draw(tmp_path, after_relu(matmul) if relu else matmul), tmp_path, STATIC)
    x = random(4, INNER) * np.array([[2], [10], [1e4], [1e30]], np.float32)
    lowest = 0 if relu else -LARGEST * 128 / 127  # zero has as many codes below it as above, and one more
    np.testing.assert_array_equal(run(x), run(np.clip(x, lowest, LARGEST)))
    assert (run(x) != run(np.clip(x, lowest / 2, LARGEST / 2))).any(axis=1).all()


def test_a_row_of_zeros_gives_the_bias_of_a_static_product(tmp_path: Path) -> None:
    _, run = quantized(draw(tmp_path, matmul_and_bias), tmp_path, STATIC)
    np.testing.assert_array_equal(run(np.zeros((2, INNER), np.float32)), [random(SIZE)] * 2)


def test_a_static_product_with_an_empty_range_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drawn: calibration found only zeros for x; use other calibration sentences"):
        quantized(draw(tmp_path, matmul), tmp_path, STATIC, largest=0.0)


@pytest.mark.parametrize("form", ["group-wise", "per-token", "float32"])
def test_other_products_need_no_range(tmp_path: Path, form: QuantScheme) -> None:
    _, run = quantized(draw(tmp_path, matmul), tmp_path, everywhere(form), largest=0.0)
    assert run(random(1, INNER)) == pytest.approx(random(1, INNER) @ random(SIZE, INNER).T, abs=1)


def test_a_value_has_the_range_that_was_measured_in_its_own_graph(tmp_path: Path) -> None:
    """Values in different graphs of a bundle can have the same name."""
    weights = WeightFile(tmp_path / "weights.bin")
    graphs = []
    for name in ("first", "second"):
        graph = GraphBuilder(name, weights)
        y = matmul(graph, graph.input("x", TensorProto.FLOAT, ("batch", INNER)))
        graph.add("Identity", y, output=graph.output("y", TensorProto.FLOAT, ("batch", "columns")))
        graphs.append(graph.build())
    weights.close()
    ranges = {name: {"x": np.array([x], np.float32)} for name, x in (("first", 1), ("second", 254))}
    with WeightFile(tmp_path / "new.bin") as new:
        steps = [step_of(graph) for graph in quantize_graphs(graphs, tmp_path, new, STATIC, ranges)]
    assert steps == pytest.approx([1 / 127, 2])


def step_of(graph: onnx.ModelProto) -> float:
    """Return the step of the only `QuantizeLinear`."""
    (node,) = (node for node in graph.graph.node if node.op_type == "QuantizeLinear")
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    return float(onnx.numpy_helper.to_array(constants[node.input[1]]))


# Relu


def two_products(graph: GraphBuilder, x: str) -> str:
    cut = graph.add("Relu", x)
    return graph.add("Add", matmul(graph, cut), matmul(graph, cut, "other"))


def product_and_another_reader(graph: GraphBuilder, x: str) -> str:
    cut = graph.add("Relu", x)
    return graph.add("Add", matmul(graph, cut), graph.add("ReduceMax", cut, graph.constant([-1], np.int64)))


@pytest.mark.parametrize(("nodes", "is_kept"), [(two_products, False), (product_and_another_reader, True)])
def test_relu_stays_if_another_node_reads_it(tmp_path: Path, nodes: Draw, is_kept: bool) -> None:
    operators, run = quantized(draw(tmp_path, nodes), tmp_path, STATIC)
    assert ("Relu" in operators) == is_kept
    x = np.clip(random(5, INNER), -LARGEST, LARGEST)
    cut = np.maximum(x, 0)
    product = cut @ random(SIZE, INNER).T
    exact = product + (cut.max(axis=1, keepdims=True) if is_kept else product)
    assert run(x) == pytest.approx(exact, abs=0.03 * float(np.abs(exact).max()))


def test_relu_stays_if_it_is_an_output(tmp_path: Path) -> None:
    def nodes(graph: GraphBuilder, x: str) -> str:
        return matmul(graph, graph.add("Relu", x, output=graph.output("cut", TensorProto.FLOAT, ("batch", INNER))))

    operators, run = quantized(draw(tmp_path, nodes), tmp_path, STATIC)
    assert operators == ["Relu", "QuantizeLinear", "MatMulIntegerToFloat", "Identity"]
    np.testing.assert_array_equal(run(random(2, INNER)), np.maximum(random(2, INNER), 0))  # the first output


@pytest.mark.parametrize("form", ["group-wise", "per-token"])
def test_relu_stays_before_products_of_another_form(tmp_path: Path, form: QuantScheme) -> None:
    operators, run = quantized(draw(tmp_path, after_relu(matmul)), tmp_path, everywhere(form))
    assert operators[0] == "Relu"
    x = random(3, INNER)
    exact = np.maximum(x, 0) @ random(SIZE, INNER).T
    assert run(x) == pytest.approx(exact, abs=0.03 * float(np.abs(exact).max()))


# Sums in 16 bits


def signs_and_extremes(graph: GraphBuilder, x: str) -> str:
    return graph.add("MatMul", x, graph.weight("weight", torch.from_numpy(largest_weights())))


def largest_weights() -> Array:
    """Return signs (K, N); each of the first two columns has a single sign."""
    signs: Array = np.sign(random(SIZE, INNER)).T.copy()
    signs[:, 0], signs[:, 1] = 1, -1
    return signs


@pytest.mark.parametrize(
    ("recipe", "nodes", "rounded"),
    [
        (BY_ROWS, signs_and_extremes, dequantized_rows),
        (STATIC, signs_and_extremes, lambda x: x),
        (STATIC, after_relu(signs_and_extremes), lambda x: np.maximum(x, 0)),
    ],
    ids=["by rows", "per-tensor", "static after Relu"],
)
def test_the_largest_products_of_integers_fit_sixteen_bits_in_pairs_and_are_exact(
    tmp_path: Path, recipe: QuantizationRecipe, nodes: Draw, rounded: Callable[[Array], Array]
) -> None:
    """Activations have the codes 0, 1 or 255, weights are 64 or -64: a little more than 1 or -1."""
    _, run = quantized(draw(tmp_path, nodes), tmp_path, recipe, largest=1.0)
    x = np.concatenate([largest_weights().T, np.ones((1, INNER), np.float32)])
    codes, scales = quantize_columns(largest_weights())
    assert set(np.unique(codes)) == {-64, 64}
    given = run(x)
    assert given == pytest.approx(rounded(x) @ (codes * scales), rel=1e-5, abs=1e-4)
    assert given[-1, :2] == pytest.approx([128 / 127 * INNER, -128 / 127 * INNER], rel=1e-5)
