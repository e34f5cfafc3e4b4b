"""Tests of group-wise quantization of products, embedding tables and quantized weights."""

from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest
import torch

from sightline.base.bundle import QuantScheme
from sightline.export.convert.quantize import exact_blocks, quantize_blocks
from sightline.export.graphs.builder import GraphBuilder
from sightline.export.options import BLOCK_SIZES, QuantizationRecipe
from tests.export.products import (
    IN_BLOCKS,
    INNER,
    SIZE,
    Array,
    Draw,
    dequantized,
    draw,
    everywhere,
    gemm_transposed,
    gemm_with_bias,
    matmul,
    matmul_and_bias,
    quantized,
    random,
    rounded,
)


def whole(count: int) -> Array:
    """Return activations (count, K) that int8 represents exactly in each block."""
    numbers = np.random.default_rng(6).integers(-126, 127, (count, INNER)).astype(np.float32)
    numbers[:, ::16] = 127
    return numbers


@pytest.mark.parametrize("recipe", IN_BLOCKS, ids=str)
def test_weights_move_by_at_most_one_step_and_the_largest_not_at_all(recipe: QuantizationRecipe) -> None:
    rows = random(SIZE, 160)
    _, scales = quantize_blocks(rows, recipe.bits, recipe.block_size)
    steps = np.repeat(np.abs(scales), recipe.block_size, axis=1)[:, :160]
    errors = np.abs(rounded(rows, recipe.bits, recipe.block_size) - rows)
    assert (errors <= 1.001 * steps).all()
    assert np.median(errors / steps) < 0.3  # rounding, not cutting off
    largest = np.abs(rows).argmax(axis=1, keepdims=True)
    assert np.take_along_axis(errors, largest, axis=1) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("recipe", IN_BLOCKS, ids=str)
def test_zeros_stay_zeros(recipe: QuantizationRecipe) -> None:
    assert not rounded(np.zeros((2, 40), np.float32), recipe.bits, recipe.block_size).any()


def test_other_weights_are_not_taken_for_quantized_ones() -> None:
    rows = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    codes = np.arange(16, dtype=np.float32) * np.float32(0.25)
    assert exact_blocks(rows, 4, 16) is None
    assert exact_blocks(rows.astype(np.float16).astype(np.float32), 4, 16) is None
    assert exact_blocks(codes[None] - 1, 4, 16) is not None
    assert exact_blocks(np.append(codes[:15], np.float32(4))[None] - 1, 4, 16) is None  # 17 steps
    assert exact_blocks(codes[None] + 1, 4, 16) is None  # from 4 to 19, where no code is 0
    assert exact_blocks(codes[None] * np.float32(1e20), 4, 16) is None


@pytest.mark.parametrize(("encoding", "bits", "block_size"), [("Q8_0", 8, 32), ("Q8_0", 8, 16), ("Q4_0", 4, 16)])
def test_blocks_hold_the_codes_of_gguf(encoding: str, bits: int, block_size: int) -> None:
    kind = gguf.GGMLQuantizationType[encoding]
    rows = np.random.default_rng(1).standard_normal((300, 96)).astype(np.float32)
    rows = gguf.dequantize(gguf.quantize(rows, kind), kind)
    exact = exact_blocks(rows, bits, block_size)
    assert exact is not None
    np.testing.assert_array_equal(dequantized(*exact, bits), rows)


@pytest.mark.parametrize(("bits", "size"), [(5, 32), (8, 48), (8, 128), (4, 32), (4, 64)])
def test_an_unsupported_format_is_rejected(bits: Literal[4, 8], size: int) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        QuantizationRecipe(bits, size)


@pytest.mark.parametrize("recipe", IN_BLOCKS, ids=str)
@pytest.mark.parametrize(("nodes", "has_bias"), [(matmul, False), (matmul_and_bias, True), (gemm_with_bias, True)])
def test_a_product_in_blocks_is_that_of_the_rounded_weights_with_its_bias_inside(
    tmp_path: Path, nodes: Draw, has_bias: bool, recipe: QuantizationRecipe
) -> None:
    operators, run = quantized(draw(tmp_path, nodes), tmp_path, recipe)
    assert operators == ["MatMulNBits", "Identity"]
    x = whole(3)
    block_size = BLOCK_SIZES[recipe.bits][-1] if nodes is gemm_with_bias else recipe.block_size  # as a table
    weights = rounded(random(SIZE, INNER), recipe.bits, block_size)
    assert run(x) == pytest.approx(x @ weights.T + (random(SIZE) if has_bias else 0), rel=1e-5, abs=1e-3)


def test_products_of_two_values_and_those_that_gemm_scales_stay(tmp_path: Path) -> None:
    def nodes(graph: GraphBuilder, x: str) -> str:
        scaled = graph.add(
            "Gemm", x, graph.weight("weight", torch.from_numpy(random(SIZE, INNER))), transB=1, alpha=2.0
        )
        return graph.add("MatMul", scaled, graph.add("Transpose", scaled, perm=[1, 0]))

    operators, run = quantized(draw(tmp_path, nodes), tmp_path, QuantizationRecipe(8, 32))
    assert operators == ["Gemm", "Transpose", "MatMul", "Identity"]
    scaled = 2 * whole(2) @ random(SIZE, INNER).T
    assert run(whole(2)) == pytest.approx(scaled @ scaled.T, rel=1e-4)


@pytest.mark.parametrize(
    "recipe", [everywhere("group-wise"), everywhere("per-token"), everywhere("per-tensor")], ids=str
)
def test_additions_that_are_no_bias_or_share_the_product_stay(tmp_path: Path, recipe: QuantizationRecipe) -> None:
    def nodes(graph: GraphBuilder, x: str) -> str:
        product = gemm_transposed(graph, x)
        with_bias = graph.add("Add", product, graph.weight("bias", torch.from_numpy(random(SIZE))))
        with_number = graph.add("Add", matmul(graph, x, "other"), graph.constant(2, np.float32))
        return graph.add("Add", graph.add("Add", product, with_bias), with_number)

    operators, run = quantized(draw(tmp_path, nodes), tmp_path, recipe, largest=127)
    added = 2 if recipe.layers == "per-token" else 0  # for the smallest values of the rows, in each of two products
    assert operators.count("Add") == 4 + added
    x, weights = whole(2), random(SIZE, INNER)
    expected = 3 * x @ weights.T + random(SIZE) + 2
    assert run(x) == pytest.approx(expected, abs=0.02 * float(np.abs(expected).max()))


# The embedding


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tied_table_is_stored_once_and_read_as_it_is_multiplied(tmp_path: Path, bits: Literal[4, 8]) -> None:
    def nodes(graph: GraphBuilder, x: str) -> str:
        product = gemm_transposed(graph, x)  # (B, N)
        best = graph.add("ArgMax", product, axis=1, keepdims=0)  # (B,)
        other = graph.add("Gather", graph.weight("untied", torch.from_numpy(random(SIZE, INNER) + 1)), best)
        return graph.add("Sub", graph.add("Gather", "weight", best), other)  # (B, K)

    operators, run = quantized(draw(tmp_path, nodes), tmp_path, QuantizationRecipe(bits, 16))
    assert operators == ["MatMulNBits", "ArgMax", "Gather", "GatherBlockQuantized", "Sub", "Identity"]
    block_size = BLOCK_SIZES[bits][-1]
    rows = rounded(random(SIZE, INNER), bits, block_size)
    best = (whole(5) @ rows.T).argmax(axis=1)
    assert run(whole(5)) == pytest.approx(rows[best] - random(SIZE, INNER)[best] - 1, abs=1e-5)
    assert stored_bytes(tmp_path) == padded_bytes(
        SIZE * INNER * bits // 8, SIZE * INNER // block_size * 4, SIZE * INNER * 4
    )


def best_rows(graph: GraphBuilder, table: Array, x: str) -> str:
    """Return the rows (B, K) of the table with the largest product with `x` (B, K)."""
    product = graph.add("Gemm", x, graph.weight("table", torch.from_numpy(table)), transB=1)
    return graph.add("Gather", "table", graph.add("ArgMax", product, axis=1, keepdims=0))


@pytest.mark.parametrize(
    ("bits", "inner", "block_size"),
    [(8, 24, 16), (8, 32, 32), (8, 100, 64), (8, 128, 64), (8, 320, 64), (4, 24, 16), (4, 128, 16)],
)
def test_a_table_has_the_largest_blocks_that_are_served_and_fit_its_rows(
    tmp_path: Path, bits: Literal[4, 8], inner: int, block_size: int
) -> None:
    table = random(SIZE, inner)
    _, run = quantized(
        draw(tmp_path, lambda graph, x: best_rows(graph, table, x), inner), tmp_path, QuantizationRecipe(bits, 16)
    )
    assert run(table) == pytest.approx(rounded(table, bits, block_size), abs=1e-5)


@pytest.mark.parametrize("form", ["per-token", "per-tensor"])
def test_a_table_whose_product_is_of_integers_is_looked_up_in_blocks(tmp_path: Path, form: QuantScheme) -> None:
    table = random(SIZE, INNER)
    operators, run = quantized(draw(tmp_path, lambda graph, x: best_rows(graph, table, x)), tmp_path, everywhere(form))
    assert {"MatMulInteger", "GatherBlockQuantized"} < set(operators)
    assert not {"Gemm", "MatMulNBits", "Gather"} & set(operators)
    assert run(table) == pytest.approx(rounded(table, 8, INNER), abs=1e-5)
    sums = [SIZE * 4] if form == "per-token" else []  # of columns
    assert stored_bytes(tmp_path) == padded_bytes(SIZE * INNER, SIZE * 4, *sums, SIZE * INNER, SIZE * 4)


def test_products_in_float32_keep_their_table_and_weights(tmp_path: Path) -> None:
    table = random(SIZE, INNER)
    model = draw(tmp_path, lambda graph, x: best_rows(graph, table, x))
    operators, run = quantized(model, tmp_path, everywhere("float32"))
    assert operators == ["Gemm", "ArgMax", "Gather", "Identity"]
    np.testing.assert_array_equal(run(table), table)
    assert stored_bytes(tmp_path) == SIZE * INNER * 4


def stored_bytes(folder: Path) -> int:
    return (folder / "quantized" / "weights.bin").stat().st_size


def padded_bytes(*sizes: int) -> int:
    return sum(-(-size // 64) * 64 for size in sizes)
