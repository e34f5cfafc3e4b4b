"""Products with constant weights as products with 8-bit or 4-bit weights. Knows operators, no model and no bundle.

Two forms, in both of which activations are rounded to 8 bits row by row, so that no row of a batch changes another:

- in blocks: `MatMulNBits` of ONNX Runtime, one node, with one float32 scale for each block of weights along the inner
  axis. With `accuracy_level` 4 it rounds each row of activations by the same blocks. The best for a few rows.
- by rows: an integer product of 8-bit activations with one scale a row and 8-bit weights with one scale a column, among
  nodes of plain operators. The best from some ten rows on.

`DynamicQuantizeLinear` has one scale for the whole batch and is therefore not used.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.builder import CONTRIB, WeightFile, external_tensor

INT8_ACTIVATIONS = 4  # `accuracy_level`: activations may be rounded to int8, row by row and block by block
# By bits. With larger blocks ONNX Runtime's last row of an odd batch differs from the others in its last bits; the next
# product's rounding to int8 makes that 0.1 in a score, and a text would depend on how many others are in its batch.
BLOCK_SIZES = {8: (16, 32, 64), 4: (16, 32)}
BLOCK_SIZE = 32
# Of the embedding and the product with it. It is the last of a step: no rounding follows that would magnify last bits.
TABLE_BLOCK_SIZE = 128
MIN_BLOCK_SIZE = 16

ACTIVATION_LEVELS = 127  # on either side of zero
# Two products of a signed weight and an unsigned activation must fit 16 bits: processors without VNNI add them there
# and saturate.
WEIGHT_LEVELS = 63

Site = Literal["encoder", "layers", "projection"]  # of the encoder, of the step's layers, to the vocabulary
SITES: tuple[Site, ...] = ("encoder", "layers", "projection")

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix of weights is stored."""

    bits: Literal[4, 8]
    block_size: int  # weights of a layer that share a scale

    def __post_init__(self) -> None:
        if self.bits not in BLOCK_SIZES:
            raise ValueError(f"bits is {self.bits}, it must be one of {tuple(BLOCK_SIZES)}")
        if self.block_size not in BLOCK_SIZES[self.bits]:
            raise ValueError(
                f"block_size is {self.block_size}, with {self.bits} bits it must be one of {BLOCK_SIZES[self.bits]}"
            )


def quantize_rows(rows: Floats, bits: int, block_size: int) -> tuple[Codes, Floats]:
    """Round each block of a row to whole multiples of its own scale.

    The weight of largest magnitude in a block gets the lowest code, 0, which stands for -2 ** (bits - 1); so the scale
    has the other sign than that weight. Blocks are padded with zeros.

    Args:
        rows: (N, K), the inner axis of the product last.

    Returns:
        codes (N, blocks, block_size * bits / 8), where code - 2 ** (bits - 1) times the scale is the weight; two of 4
        bits share a byte, the first in its lower half. And scales (N, blocks).
    """
    count, size = rows.shape
    zero = 1 << (bits - 1)
    padded = np.pad(rows, [(0, 0), (0, -size % block_size)])
    blocks = padded.reshape(count, -1, block_size)  # (N, blocks, block_size)
    place = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scales = np.take_along_axis(blocks, place, axis=-1) / np.float32(-zero)  # (N, blocks, 1)
    steps = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)
    codes = np.clip(np.rint(steps) + zero, 0, 2 * zero - 1).astype(np.uint8)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes, scales[..., 0]


def quantize_columns(matrix: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Round each column of a matrix (K, N) to whole multiples of its own scale: codes (K, N) and scales (N,)."""
    scales = np.abs(matrix).max(axis=0) / np.float32(WEIGHT_LEVELS)
    steps = np.divide(matrix, scales, out=np.zeros_like(matrix), where=scales != 0)
    return np.rint(steps).astype(np.int8), scales


def quantize_graphs(
    models: Sequence[onnx.ModelProto],
    folder: Path,
    weights: WeightFile,
    form: WeightFormat,
    by_rows: Collection[Site] = (),
    in_float32: Collection[Site] = (),
) -> list[onnx.ModelProto]:
    """The same graphs with their constant products quantised.

    A product is a `MatMul` or `Gemm` by a constant matrix, with the constant that is added to it. A table that `Gather`
    reads is quantised, in blocks, where such a product in one of the graphs is quantised and has the same matrix, by
    name and as it lies: where that product is in blocks too, both read the same bytes. All other constants stay.

    Args:
        models: with their weights outside, as `GraphBuilder` builds them.
        folder: where those weights lie.
        weights: takes the weights of the new graphs.
        form: of products in blocks, and of tables.
        by_rows: where products are by rows instead.
        in_float32: where products stay as they are.
    """
    tables = {
        product.weight
        for model in models
        for product in _products(model.graph)
        if product.transposed and _site(model.graph, product) not in in_float32
    }
    return [
        _quantized(model, tables, by_rows, in_float32, _Rewriting(model, folder, weights, form)) for model in models
    ]


@dataclass(frozen=True)
class _Product:
    """A node that multiplies by a constant matrix."""

    node: NodeProto
    transposed: bool  # whether the matrix lies as (N, K), as an embedding does, and not as (K, N)
    sum: NodeProto | None  # the node that adds a bias, where there is one

    @property
    def weight(self) -> str:
        return str(self.node.input[1])

    @property
    def bias(self) -> str:
        """Its name, or "" where there is none."""
        return "" if self.sum is None else str(self.sum.input[1])

    @property
    def output(self) -> str:
        return str((self.sum or self.node).output[0])


def _products(graph: onnx.GraphProto) -> Iterator[_Product]:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        transposed = attributes == {"transB": 1}
        if node.op_type not in ("MatMul", "Gemm") or len(node.input) > 2 or (attributes and not transposed):
            continue
        shape = shapes.get(node.input[1], ())
        if len(shape) != 2:
            continue
        reader = readers.get(node.output[0], [])
        adds_bias = len(reader) == 1 and reader[0].op_type == "Add"
        adds_bias = adds_bias and shapes.get(reader[0].input[1]) == (shape[0 if transposed else 1],)
        yield _Product(node, transposed, reader[0] if adds_bias else None)


def _site(graph: onnx.GraphProto, product: _Product) -> Site:
    if graph.name == "encoder":
        return "encoder"
    return "projection" if product.output == "logits" else "layers"


def _quantized(
    model: onnx.ModelProto,
    tables: Collection[str],
    by_rows: Collection[Site],
    in_float32: Collection[Site],
    rewriting: "_Rewriting",
) -> onnx.ModelProto:
    found = (product for product in _products(model.graph) if _site(model.graph, product) not in in_float32)
    products = {product.node.name: product for product in found}
    sums = {product.sum.name for product in products.values() if product.sum is not None}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        product = products.get(node.name)
        if product is not None:
            is_by_rows = _site(model.graph, product) in by_rows
            nodes += rewriting.product_by_rows(product) if is_by_rows else [rewriting.product_in_blocks(product)]
        elif node.op_type == "Gather" and node.input[0] in tables:
            nodes.append(rewriting.gather(node))
        elif node.name not in sums:
            nodes.append(node)
    return rewriting.build(nodes)


def _table_block_size(rows: Floats) -> int:
    within: int = 1 << (rows.shape[1].bit_length() - 1)  # the largest power of two
    return min(TABLE_BLOCK_SIZE, max(MIN_BLOCK_SIZE, within))


class _Rewriting:
    """Gives new nodes for old ones, and a graph of them; keeps the constants that they read."""

    def __init__(self, model: onnx.ModelProto, folder: Path, weights: WeightFile, form: WeightFormat) -> None:
        self._model = model
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._folder = folder
        self._weights = weights
        self._bits = form.bits
        self._layer_block_size = form.block_size
        self._made: dict[str, TensorProto] = {}

    def product_in_blocks(self, product: _Product) -> NodeProto:
        matrix = self._read(product.weight)
        rows = matrix if product.transposed else matrix.T  # (N, K)
        block_size = _table_block_size(rows) if product.transposed else self._layer_block_size
        codes, scales = quantize_rows(rows, self._bits, block_size)
        inputs = [product.node.input[0], self._add(f"{product.weight}.codes", codes)]
        inputs += [self._add(f"{product.weight}.scales", scales), "", "", product.bias]
        sizes = {"N": rows.shape[0], "K": rows.shape[1], "block_size": block_size, "accuracy_level": INT8_ACTIVATIONS}
        return self._node("MatMulNBits", inputs, product.node.name, product.output, sizes)

    def product_by_rows(self, product: _Product) -> list[NodeProto]:
        """Each row of x W + b as (round(x / s * 127) W') * scales * s + b, with the row's largest magnitude as s.

        A row of zeros divides zero by zero; whatever that rounds to is multiplied by s, which is 0.
        """
        matrix = self._read(product.weight)
        codes, scales = quantize_columns(np.ascontiguousarray(matrix.T) if product.transposed else matrix)
        step = np.float32(1 / ACTIVATION_LEVELS)
        constants = {"axis": np.array([-1]), "step": step, "zero": np.uint8(128), "one": np.float32(1)}
        named = {name: self._add_small(f"rows.{name}", np.asarray(value)) for name, value in constants.items()}
        weight = self._add(f"{product.weight}.columns", codes)
        weight_scales = self._add(f"{product.weight}.column_scales", scales * step)
        nodes: list[NodeProto] = []

        def add(op: str, *inputs: str, **attributes: Any) -> str:  # to `nodes`
            name = f"{product.node.name}.{len(nodes)}"
            nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
            return name

        x = product.node.input[0]
        largest = add("ReduceMax", add("Abs", x), named["axis"], keepdims=1)
        rounded = add("QuantizeLinear", add("Div", x, largest), named["step"], named["zero"])
        if product.transposed:  # to the vocabulary: with so many columns the one node takes longer at one row
            whole = add("Cast", add("MatMulInteger", rounded, weight, named["zero"]), to=TensorProto.FLOAT)
            scaled = add("Mul", whole, weight_scales)
        else:
            operands = rounded, weight, named["one"], weight_scales, named["zero"]
            scaled = add("MatMulIntegerToFloat", *operands, domain=CONTRIB)
        result = add("Mul", scaled, largest)
        if product.bias:
            add("Add", result, product.bias)
        nodes[-1].output[0] = product.output
        return nodes

    def gather(self, node: NodeProto) -> NodeProto:
        table, ids = node.input
        rows = self._read(table)
        block_size = _table_block_size(rows)
        codes, scales = quantize_rows(rows, self._bits, block_size)
        codes = codes.reshape(len(rows), -1)[:, : rows.shape[1] * self._bits // 8]  # this operator has no padding
        inputs = [self._add(f"{table}.rows", codes), ids, self._add(f"{table}.scales", scales)]
        attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": block_size}
        return self._node("GatherBlockQuantized", inputs, node.name, node.output[0], attributes)

    def build(self, nodes: Sequence[NodeProto]) -> onnx.ModelProto:
        used = {name for node in nodes for name in node.input}
        kept = [self._moved(tensor) for name, tensor in self._constants.items() if name in used]
        built = onnx.ModelProto()
        built.CopyFrom(self._model)
        del built.graph.node[:], built.graph.initializer[:]
        built.graph.node.extend(nodes)
        built.graph.initializer.extend([*self._made.values(), *kept])
        return built

    def _node(self, op: str, inputs: list[str], name: str, output: str, attributes: Mapping[str, Any]) -> NodeProto:
        return helper.make_node(op, inputs, [output], name, domain=CONTRIB, bits=self._bits, **attributes)

    def _add_small(self, name: str, array: NDArray[np.generic]) -> str:
        """A constant inside the graph."""
        self._made[name] = numpy_helper.from_array(array, name)
        return name

    def _add(self, name: str, array: NDArray[np.generic]) -> str:
        self._made[name] = external_tensor(name, array, self._weights)
        return name

    def _read(self, name: str) -> Floats:
        array: Floats = numpy_helper.to_array(self._constants[name], str(self._folder))
        return array

    def _moved(self, tensor: TensorProto) -> TensorProto:
        if tensor.data_location != TensorProto.EXTERNAL:
            return tensor
        return external_tensor(tensor.name, self._read(tensor.name), self._weights)
