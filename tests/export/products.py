"""Graphs with a product to quantize, and dequantization of weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from sightline.base.bundle import QuantScheme
from sightline.export.convert.products import product_inputs
from sightline.export.convert.quantize import quantize_blocks, quantize_graphs
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.options import QuantizationRecipe

Array = NDArray[np.float32]
Draw = Callable[[GraphBuilder, str], str]  # adds nodes that read a value, gives their output's name

SIZE, INNER = 24, 64  # N and K of products; K is part of a block or several
IN_BLOCKS = [QuantizationRecipe(8, 16), QuantizationRecipe(8, 32), QuantizationRecipe(8, 64), QuantizationRecipe(4, 16)]
LARGEST = 3.0  # what is said to have been measured of every value; some of `random` lies beyond it


def everywhere(form: QuantScheme) -> QuantizationRecipe:
    return QuantizationRecipe(8, encoder=form, layers=form, projection=form)


def random(*shape: int) -> Array:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def separate(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return one code an element; two codes of 4 bits share one along the last axis."""
    if bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def dequantized(codes: NDArray[np.uint8], scales: Array, zeros: NDArray[np.uint8] | None, bits: int) -> Array:
    """Return the rows (N, K), which may be padded, of codes (N, blocks, bytes)."""
    middle = zeros if zeros is not None else np.full(scales.shape, 1 << (bits - 1), np.uint8)
    values: Array = (separate(codes, bits).astype(np.float32) - middle[..., None]) * scales[..., None]
    return values.reshape(len(values), -1)


def rounded(rows: Array, bits: int, block_size: int) -> Array:
    """Quantize and dequantize `rows`."""
    codes, scales = quantize_blocks(rows, bits, block_size)
    return dequantized(codes, scales, None, bits)[:, : rows.shape[1]]


def matmul(graph: GraphBuilder, x: str, weight: str = "weight") -> str:
    return graph.add("MatMul", x, graph.weight(weight, torch.from_numpy(random(SIZE, INNER).T)))


def matmul_and_bias(graph: GraphBuilder, x: str) -> str:
    return graph.add("Add", matmul(graph, x), graph.weight("bias", torch.from_numpy(random(SIZE))))


def gemm_transposed(graph: GraphBuilder, x: str) -> str:
    return graph.add("Gemm", x, graph.weight("weight", torch.from_numpy(random(SIZE, INNER))), transB=1)


def gemm_with_bias(graph: GraphBuilder, x: str) -> str:
    weight, bias = (torch.from_numpy(array) for array in (random(SIZE, INNER), random(SIZE)))
    return graph.add("Gemm", x, graph.weight("weight", weight), graph.weight("bias", bias), transB=1)


def draw(folder: Path, nodes: Draw, inner: int = INNER) -> onnx.ModelProto:
    """Build a graph from `x` (B, K) to `y` with products and external weights."""
    with WeightFile(folder / "weights.bin") as weights:
        graph = GraphBuilder("drawn", weights)
        y = nodes(graph, graph.input("x", TensorProto.FLOAT, ("batch", inner)))
    graph.add("Identity", y, output=graph.output("y", TensorProto.FLOAT, ("batch", "columns")))
    return graph.build()


def quantized(
    model: onnx.ModelProto, folder: Path, recipe: QuantizationRecipe, largest: float = LARGEST
) -> tuple[list[str], Callable[[Array], Array]]:
    """Quantize a graph; return its operators and a function that computes `y`."""
    out = folder / "quantized"
    out.mkdir()
    ranges = {model.graph.name: dict.fromkeys(product_inputs(model.graph), np.array([largest], np.float32))}
    with WeightFile(out / "weights.bin") as weights:
        (new,) = quantize_graphs([model], folder, weights, recipe, ranges)
    onnx.save_model(new, out / "graph.onnx")
    session = onnxruntime.InferenceSession(out / "graph.onnx", providers=["CPUExecutionProvider"])
    return [node.op_type for node in new.graph.node], lambda x: session.run(None, {"x": x})[0]
