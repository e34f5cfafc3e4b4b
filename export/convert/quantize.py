"""Quantization of matrix products with constant weights to 8 or 4 bits.

There are three schemes. In all of them, a row of the batch is rounded independently of others.

- `group-wise`: `MatMulNBits` of ONNX Runtime, with one float32 scale per block of weights along the
  inner axis. With `accuracy_level` 4, it also rounds the activations of each row in the same
  blocks. The fastest scheme for one row. Weights that were quantized before keep their codes if
  blocks can hold them, see `exact_blocks`.
- `per-token` (dynamic): an integer product of 8-bit activations with one scale and one offset per
  row and 8-bit weights with one scale per column. The most accurate scheme for many rows. In a
  decoder-only model, channels are smoothed (`sightline.export.convert.smoothing`), and products
  whose channels cannot be smoothed are group-wise.
- `per-tensor` (static): the same integer product, with one scale for all activations that was
  measured by `sightline.export.convert.calibrate`; two nodes. The fastest scheme for many rows.
  Activations beyond the measured range are clipped.

`DynamicQuantizeLinear` is not used, because it has one scale for the whole batch.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from sightline.base.bundle import LayerGroup, QuantScheme
from sightline.export.convert.products import Product, products
from sightline.export.convert.smoothing import Factors, smoothing_factors
from sightline.export.graphs.builder import CONTRIB, WeightFile, external_tensor, rewritten_tensor
from sightline.export.graphs.nodes import PROJECTIONS
from sightline.export.options import BLOCK_SIZES, QuantizationRecipe

INT8_ACTIVATIONS = 4  # `accuracy_level`: round activations to int8, per row and block
MIN_BLOCK_SIZE = 16

LEVELS = 255  # steps between the smallest and the largest code of an activation
ACTIVATION_LEVELS = 127  # levels on each side of zero
ZERO = 128  # zero point
# Processors without VNNI add the products of each two adjacent weights with 8-bit activations in 16
# bits, with saturation. Two weights of the same sign have a sum of at most 127 steps, to which
# rounding adds at most 1: 255 * 128 fits into 16 bits.
PAIR_LEVELS = 127
EXACT_ROWS = 256  # rows that `exact_blocks` examines at once, to limit memory
FRACTION_BITS = 40  # of the fixed-point numbers in which it computes divisors
SMALLEST_RANGE = 1e-20  # of the activations of a row; a row of zeros has this range
EMBEDDING = "embedding"  # name of the table of tokens that a model has for sources and targets

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# Largest magnitude of each channel of the activations that are multiplied by a constant matrix, by
# graph and name.
Ranges = Mapping[str, Mapping[str, Floats]]


def quantize_blocks(rows: Floats, bits: int, block_size: int) -> tuple[Codes, Floats]:
    """Quantize each block of a row with its own scale, in 4 or 8 bits.

    The weight with the largest magnitude of a block gets the code 0, which stands for -2 **
    (bits - 1). The scale therefore has the opposite sign of that weight. The rows (N, K) have the
    inner axis of the product last, and are padded with zeros to whole blocks.

    Returns:
        Codes (N, blocks, block_size * bits / 8) and scales (N, blocks). A weight is
        (code - 2 ** (bits - 1)) * scale. Two 4-bit codes share a byte, the first in its lower half.
    """
    count, size = rows.shape
    zero = 1 << (bits - 1)
    padded = np.pad(rows, [(0, 0), (0, -size % block_size)])
    blocks = padded.reshape(count, -1, block_size)  # (N, blocks, block_size)
    index = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scales = np.take_along_axis(blocks, index, axis=-1) / np.float32(-zero)  # (N, blocks, 1)
    steps = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)
    codes = np.clip(np.rint(steps) + zero, 0, 2 * zero - 1).astype(np.uint8)
    return _packed(codes, bits), scales[..., 0]


def exact_blocks(rows: Floats, bits: int, block_size: int) -> tuple[Codes, Floats, Codes] | None:
    """Represent weights that were quantized before without an error, if blocks can hold them.

    The weights of a block are multiples of its scale, which therefore is their greatest common
    divisor or a divisor of it. Arguments are those of `quantize_blocks`.

    Returns:
        Codes and scales as of `quantize_blocks`, and zero points (N, blocks). A weight is
        (code - zero) * scale. None if a block cannot hold its weights.
    """
    parts = []
    for start in range(0, len(rows), EXACT_ROWS):
        part = _exact_part(rows[start : start + EXACT_ROWS], bits, block_size)
        if part is None:
            return None
        parts.append(part)
    codes, scales, zeros = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _packed(codes, bits), scales, zeros


def _exact_part(rows: Floats, bits: int, block_size: int) -> tuple[Codes, Floats, Codes] | None:
    padded = np.pad(rows, [(0, 0), (0, -rows.shape[1] % block_size)]).astype(np.float64)
    fixed = np.ldexp(padded.reshape(len(rows), -1, block_size), FRACTION_BITS)
    if (np.abs(fixed) >= 2.0**62).any() or (fixed != np.rint(fixed)).any():
        return None
    whole = fixed.astype(np.int64)
    units = np.gcd.reduce(whole, axis=-1, keepdims=True)
    steps = whole // np.maximum(units, 1)
    smallest, largest = steps.min(axis=-1), steps.max(axis=-1)
    middle, most = 1 << (bits - 1), (1 << bits) - 1
    is_middle = (smallest >= -middle) & (largest < middle)
    zeros = np.where(is_middle, middle, np.clip(-smallest, 0, most))
    if (smallest + zeros < 0).any() or (largest + zeros > most).any():
        return None
    scales = np.ldexp(units[..., 0].astype(np.float64), -FRACTION_BITS).astype(np.float32)
    return (steps + zeros[..., None]).astype(np.uint8), scales, zeros.astype(np.uint8)


def _packed(codes: Codes, bits: int) -> Codes:
    """Let two 4-bit codes along the last axis share a byte, the first in its lower half."""
    if bits == 8:
        return codes
    even = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return even[..., ::2] | np.left_shift(even[..., 1::2], np.uint8(4))


def quantize_columns(matrix: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Quantize a matrix (K, N) to codes (K, N) with scales (N,) of columns, see `PAIR_LEVELS`."""
    padded = np.pad(matrix, [(0, len(matrix) % 2), (0, 0)])
    sums = [np.maximum(signed[0::2], 0) + np.maximum(signed[1::2], 0) for signed in (padded, -padded)]
    scales = np.maximum(*sums).max(axis=0) / np.float32(PAIR_LEVELS)
    steps = np.divide(matrix, scales, out=np.zeros_like(matrix), where=scales != 0)
    return np.rint(steps).astype(np.int8), scales


def quantize_graphs(
    models: Sequence[onnx.ModelProto], folder: Path, weights: WeightFile, recipe: QuantizationRecipe, ranges: Ranges
) -> list[onnx.ModelProto]:
    """Quantize the constant products of graphs.

    A product is a `MatMul` or `Gemm` with a constant matrix, and the constant bias that is added to
    it. An embedding table of a `Gather` is quantized group-wise if it is `EMBEDDING`, unless
    the projection stays in float32, or if a quantized product in one of the graphs has the same
    matrix, by name and layout. If that product is group-wise too, both use the same bytes. Other
    constants are not changed.

    The graphs have external weights in `folder`, as `GraphBuilder` builds them. The scheme
    `per-tensor` needs the ranges of the activations; it raises `ValueError` if one is missing or 0.
    Without ranges, channels of a decoder-only model are not smoothed.
    """
    tables = {EMBEDDING} if recipe.projection != "float32" else set()
    tables |= {
        product.weight
        for model in models
        for product in products(model.graph)
        if product.transposed and _scheme(model.graph, product, recipe) != "float32"
    }
    smooths = "step" in ranges and all(model.graph.name != "encoder" for model in models)
    return [
        _quantized(_GraphRewriter(model, folder, weights, recipe, ranges), recipe, tables, smooths) for model in models
    ]


def _scheme(graph: onnx.GraphProto, product: Product, recipe: QuantizationRecipe) -> QuantScheme:
    if graph.name == "predict":  # products with the table share it with its lookup
        scheme = recipe.projection if product.transposed else recipe.schemes["encoder"]
        return "float32" if scheme == "float32" else "group-wise"
    group: LayerGroup = "projection" if product.output in PROJECTIONS else "layers"
    return recipe.schemes["encoder" if graph.name == "encoder" else group]


def _quantized(
    rewriting: "_GraphRewriter", recipe: QuantizationRecipe, tables: Collection[str], smooths: bool
) -> onnx.ModelProto:
    graph = rewriting.graph
    found = {product.node.name: product for product in products(graph)}
    schemes = {name: _scheme(graph, product, recipe) for name, product in found.items()}
    if smooths and graph.name == "step":
        per_token = {name: product for name, product in found.items() if schemes[name] == "per-token"}
        smoothed = rewriting.smooth({product.node.input[0] for product in per_token.values()})
        schemes |= {name: "group-wise" for name, product in per_token.items() if product.node.input[0] not in smoothed}
    sums = {
        product.sum.name for name, product in found.items() if product.sum is not None and schemes[name] != "float32"
    }
    nodes: list[NodeProto] = []
    for node in graph.node:
        scheme = schemes.get(node.name, "float32")
        if scheme != "float32":
            nodes += rewriting.product(found[node.name], scheme)
        elif node.op_type == "Gather" and node.input[0] in tables:
            nodes.append(rewriting.gather(node))
        elif node.name not in sums:
            nodes.append(node)
    return rewriting.build(nodes)


def _table_block_size(rows: Floats, bits: int) -> int:
    within: int = 1 << (rows.shape[1].bit_length() - 1)  # the largest power of two
    return min(BLOCK_SIZES[bits][-1], max(MIN_BLOCK_SIZE, within))


class _GraphRewriter:
    """Builder of a quantized graph: it creates replacement nodes and collects their constants."""

    def __init__(
        self, model: onnx.ModelProto, folder: Path, weights: WeightFile, recipe: QuantizationRecipe, ranges: Ranges
    ) -> None:
        self._model = model
        self.graph = model.graph
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers = {output: node for node in model.graph.node for output in node.output}
        self._folder = folder
        self._weights = weights
        self._bits = recipe.bits
        self._layer_block_size = recipe.block_size
        self._ranges = ranges.get(model.graph.name, {})
        self._made: dict[str, TensorProto] = {}
        self._nodes: list[NodeProto] = []  # which replace the current product
        self._factors: Factors = {}
        self._rounded: dict[str, tuple[str, str, str]] = {}  # see `_rounded_rows`, by activation

    def smooth(self, inputs: Collection[str]) -> Collection[str]:
        """Smooth inputs of products where that needs no node, and return which are smoothed."""
        ranges = {name: values for name, values in self._ranges.items() if name in inputs}
        self._factors, smoothed = smoothing_factors(self.graph, ranges, self._read)
        return smoothed

    def product(self, product: Product, scheme: QuantScheme) -> list[NodeProto]:
        """Return the nodes that replace a product."""
        if scheme == "group-wise":
            return [self._group_wise(product)]
        self._nodes = []
        (self._dynamic_per_token if scheme == "per-token" else self._static_per_tensor)(product)
        self._nodes[-1].output[0] = product.output
        return self._nodes

    def _add_node(self, product: Product, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node named after a product, and return its output."""
        name = f"{product.node.name}.{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def _group_wise(self, product: Product) -> NodeProto:
        matrix = self._read(product.weight)
        rows = matrix if product.transposed else matrix.T  # (N, K)
        block_size = _table_block_size(rows, self._bits) if product.transposed else self._layer_block_size
        exact = exact_blocks(rows, self._bits, block_size)
        codes, scales = quantize_blocks(rows, self._bits, block_size) if exact is None else exact[:2]
        zeros = ""
        if exact is not None and (exact[2] != 1 << (self._bits - 1)).any():  # they differ from the default
            zeros = self._add(f"{product.weight}.zeros", _packed(exact[2], self._bits))
        inputs = [product.node.input[0], self._add(f"{product.weight}.codes", codes)]
        inputs += [self._add(f"{product.weight}.scales", scales), zeros, "", product.bias]
        sizes = {"N": rows.shape[0], "K": rows.shape[1], "block_size": block_size, "accuracy_level": INT8_ACTIVATIONS}
        return self._node("MatMulNBits", inputs, product.node.name, product.output, sizes)

    def _dynamic_per_token(self, product: Product) -> None:
        """Replace x W + b with a dynamic per-token quantized product.

        A row is rounded to codes from 0 to 255 with step = (max(x) - min(x)) / 255: codes =
        round((x - min(x)) / step). The result is (codes W' * scales) * step + min(x) * sums + b,
        where sums are the sums of the columns of W' * scales.
        """
        add = partial(self._add_node, product)
        codes, scales = columns = self._columns(product)
        rounded, step, smallest = self._rounded_rows(product, len(codes))
        scaled = self._integer_product(product, columns, rounded, np.float32(1), 0)
        sums = codes.sum(axis=0, dtype=np.int32).astype(np.float32) * scales
        offset = add("Mul", smallest, self._add(f"{product.weight}.sums", sums))
        result = add("Add", add("Mul", scaled, step), offset)
        if product.bias:
            add("Add", result, product.bias)

    def _rounded_rows(self, product: Product, size: int) -> tuple[str, str, str]:
        """Round the rows of an activation; return the codes, and step and smallest value of rows.

        Products of the same activation share them.
        """
        x, add = product.node.input[0], partial(self._add_node, product)
        if x not in self._rounded:
            smallest = self._extreme(product, "ReduceMin", x)
            shifted = add("Sub", x, smallest)
            smallest_range = self._add_small("rows.smallest_range", np.float32(SMALLEST_RANGE))
            largest = add("Max", self._extreme(product, "ReduceMax", shifted), smallest_range)
            step = add("Mul", largest, self._add_small("rows.fraction", np.float32(1 / LEVELS)))
            # A block as long as a row gives each row its own step.
            codes = add("QuantizeLinear", shifted, step, axis=-1, block_size=size)
            self._rounded[x] = codes, step, smallest
        return self._rounded[x]

    def _extreme(self, product: Product, op: str, x: str) -> str:
        axis = self._add_small("rows.axis", np.array([-1]))
        values = self._add_node(product, op, x, axis, keepdims=1)
        if product.output in PROJECTIONS:  # of no rows for prompts, whose last axis ONNX Runtime does not reduce
            bounds = [self._add_small(f"rows.{number}", np.array([number])) for number in (0, 1)]
            values = self._add_node(product, "Slice", values, *bounds, axis)
        return values

    def _static_per_tensor(self, product: Product) -> None:
        """Replace x W + b with a static per-tensor quantized product.

        It is (round(x / step) W') * scales * step + b, with the same step for all rows. If x is the
        output of `Relu`, all 255 levels are used for positive values. Rounding then clips negative
        values, so that `Relu` is not needed.
        """
        x = product.node.input[0]
        largest = float(np.max(self._ranges.get(x, 0)))
        if not largest > 0:
            raise ValueError(
                f"{self.graph.name}: calibration found only zeros for {x}; use other calibration sentences or scheme"
            )
        zero, levels, producer = ZERO, ACTIVATION_LEVELS, self._producers.get(x)
        if producer is not None and producer.op_type == "Relu":
            zero, levels, x = 0, ZERO + ACTIVATION_LEVELS, producer.input[0]
        step = np.float32(largest / levels)
        step_name = self._add_small(f"{product.node.name}.step", step)
        zero_name = self._add_small(f"zero.{zero}", np.uint8(zero))
        rounded = self._add_node(product, "QuantizeLinear", x, step_name, zero_name)
        self._integer_product(product, self._columns(product), rounded, step, zero, product.bias)

    def _columns(self, product: Product) -> tuple[NDArray[np.int8], Floats]:
        """Return the matrix of a product (K, N), quantized per column."""
        matrix = self._read(product.weight)
        return quantize_columns(np.ascontiguousarray(matrix.T) if product.transposed else matrix)

    def _integer_product(
        self,
        product: Product,
        columns: tuple[NDArray[np.int8], Floats],
        rounded: str,
        step: np.float32,
        zero: int,
        bias: str = "",
    ) -> str:
        """Add the product of quantized activations and columns, times `step`, plus the bias."""
        (codes, scales), add = columns, partial(self._add_node, product)
        weight = self._add(f"{product.weight}.columns", codes)
        step_name = self._add_small(f"{product.node.name}.step", step)
        zero_name = self._add_small(f"zero.{zero}", np.uint8(zero))
        if product.transposed and not bias:
            # The output projection has many columns; the fused node is slower for one row.
            whole = add("Cast", add("MatMulInteger", rounded, weight, zero_name), to=TensorProto.FLOAT)
            return add("Mul", whole, self._add(f"{product.node.name}.column_steps", scales * step))
        operands = [rounded, weight, step_name, self._add(f"{product.weight}.column_scales", scales), zero_name]
        return add("MatMulIntegerToFloat", *operands, *(["", bias] if bias else []), domain=CONTRIB)

    def gather(self, node: NodeProto) -> NodeProto:
        table, ids = node.input
        rows = self._read(table)
        block_size = _table_block_size(rows, self._bits)
        codes, scales = quantize_blocks(rows, self._bits, block_size)
        # This operator does not support padding.
        codes = codes.reshape(len(rows), -1)[:, : rows.shape[1] * self._bits // 8]
        inputs = [self._add(f"{table}.rows", codes), ids, self._add(f"{table}.scales", scales)]
        attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": block_size}
        return self._node("GatherBlockQuantized", inputs, node.name, node.output[0], attributes)

    def build(self, nodes: Sequence[NodeProto]) -> onnx.ModelProto:
        used = {name for node in nodes for name in node.input}
        outputs = {value.name for value in self.graph.output}
        nodes = [node for node in nodes if node.op_type != "Relu" or node.output[0] in used | outputs]
        constants = {name: tensor for name, tensor in self._constants.items() if name in used}
        kept = [rewritten_tensor(tensor, self._read(name), self._weights) for name, tensor in constants.items()]
        built = onnx.ModelProto()
        built.CopyFrom(self._model)
        del built.graph.node[:], built.graph.initializer[:]
        built.graph.node.extend(nodes)
        built.graph.initializer.extend([*self._made.values(), *kept])
        return built

    def _node(self, op: str, inputs: list[str], name: str, output: str, attributes: Mapping[str, Any]) -> NodeProto:
        return helper.make_node(op, inputs, [output], name, domain=CONTRIB, bits=self._bits, **attributes)

    def _add_small(self, name: str, value: np.generic | NDArray[np.generic]) -> str:
        """Add a constant inside the graph."""
        self._made[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def _add(self, name: str, array: NDArray[np.generic]) -> str:
        self._made[name] = external_tensor(name, array, self._weights)
        return name

    def _read(self, name: str) -> Floats:
        array: Floats = numpy_helper.to_array(self._constants[name], str(self._folder))
        return array * self._factors[name] if name in self._factors else array
