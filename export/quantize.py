"""Products with constant weights as products with 8-bit or 4-bit weights. Knows operators, no model and no bundle.

Three forms, in all of which no row of a batch changes how another is rounded:

- in blocks: `MatMulNBits` of ONNX Runtime, one node, with one float32 scale for each block of weights along the inner
  axis. With `accuracy_level` 4 it rounds each row of activations by the same blocks. The best for one row.
- by rows: an integer product of 8-bit activations with one scale a row and 8-bit weights with one scale a column, among
  nodes of plain operators.
- static: the same integer product, with one scale for all rows that was measured beforehand (`export.calibrate`): two
  nodes. The best for many rows. Activations beyond what was measured are cut to it.

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
from service.bundle import Form, Site

INT8_ACTIVATIONS = 4  # `accuracy_level`: activations may be rounded to int8, row by row and block by block
# By bits. With larger blocks ONNX Runtime rounds one row of activations otherwise than several: with 8 bits from 128 on
# and with 4 bits from 64 on if the processor has AVX-512 VNNI, with 4 bits from 32 on if it has no more than AVX2. The
# next product's rounding to int8 makes that 0.1 in a score, so that a text would depend on the size of its batch.
BLOCK_SIZES = {8: (16, 32, 64), 4: (16,)}
BLOCK_SIZE = {8: 32, 4: 16}  # where none is given
MIN_BLOCK_SIZE = 16

ACTIVATION_LEVELS = 127  # on either side of zero
ZERO = 128  # what zero is rounded to
# Two products of a signed weight and an unsigned activation must fit 16 bits: processors without VNNI add them there
# and saturate.
WEIGHT_LEVELS = 63

# By graph, the largest magnitude of each value that a product with a constant matrix reads.
Ranges = Mapping[str, Mapping[str, float]]

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Recipe:
    """Which products are quantised, and how."""

    bits: Literal[4, 8]  # of products in blocks and of tables
    block_size: int = 0  # weights of a layer that share a scale; 0 becomes `BLOCK_SIZE` of the bits
    encoder: Form = "blocks"
    layers: Form = "blocks"  # of the step
    projection: Form = "blocks"  # to the vocabulary

    @property
    def forms(self) -> dict[Site, Form]:
        return {"encoder": self.encoder, "layers": self.layers, "projection": self.projection}

    def __post_init__(self) -> None:
        if self.bits not in BLOCK_SIZES:
            raise ValueError(f"bits is {self.bits}, it must be one of {tuple(BLOCK_SIZES)}")
        if not self.block_size:
            object.__setattr__(self, "block_size", BLOCK_SIZE[self.bits])
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
    recipe: Recipe,
    ranges: Ranges,
) -> list[onnx.ModelProto]:
    """The same graphs with their constant products quantised.

    A product is a `MatMul` or `Gemm` by a constant matrix, with the constant that is added to it. A table that `Gather`
    reads is quantised, in blocks, where such a product in one of the graphs is quantised and has the same matrix, by
    name and as it lies: where that product is in blocks too, both read the same bytes. All other constants stay.

    Args:
        models: with their weights outside, as `GraphBuilder` builds them.
        folder: where those weights lie.
        weights: takes the weights of the new graphs.
        recipe: where which form is used.
        ranges: of what static products read.
    """
    tables = {
        product.weight
        for model in models
        for product in _products(model.graph)
        if product.transposed and _form(model.graph, product, recipe) != "float32"
    }
    return [_quantized(_Rewriting(model, folder, weights, recipe, ranges), recipe, tables) for model in models]


def product_inputs(graph: onnx.GraphProto) -> list[str]:
    """The values that products with constant matrices read."""
    return list(dict.fromkeys(product.node.input[0] for product in _products(graph)))


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


def _form(graph: onnx.GraphProto, product: _Product, recipe: Recipe) -> Form:
    if graph.name == "similar":  # its product reads the table as it is looked up
        return "float32" if recipe.projection == "float32" else "blocks"
    return recipe.forms[_site(graph, product)]


def _quantized(rewriting: "_Rewriting", recipe: Recipe, tables: Collection[str]) -> onnx.ModelProto:
    graph = rewriting.graph
    products = {product.node.name: product for product in _products(graph)}
    forms = {name: _form(graph, product, recipe) for name, product in products.items()}
    sums = {
        product.sum.name for name, product in products.items() if product.sum is not None and forms[name] != "float32"
    }
    nodes: list[NodeProto] = []
    for node in graph.node:
        form = forms.get(node.name, "float32")
        if form != "float32":
            nodes += rewriting.product(products[node.name], form)
        elif node.op_type == "Gather" and node.input[0] in tables:
            nodes.append(rewriting.gather(node))
        elif node.name not in sums:
            nodes.append(node)
    return rewriting.build(nodes)


def _table_block_size(rows: Floats, bits: int) -> int:
    within: int = 1 << (rows.shape[1].bit_length() - 1)  # the largest power of two
    return min(BLOCK_SIZES[bits][-1], max(MIN_BLOCK_SIZE, within))


class _Nodes:
    """Nodes in the making, named after the one that they replace."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[NodeProto] = []

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self._name}.{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def giving(self, output: str) -> list[NodeProto]:
        """All of them, the last with this output."""
        self._nodes[-1].output[0] = output
        return self._nodes


class _Rewriting:
    """Gives new nodes for old ones, and a graph of them; keeps the constants that they read."""

    def __init__(
        self, model: onnx.ModelProto, folder: Path, weights: WeightFile, recipe: Recipe, ranges: Ranges
    ) -> None:
        self._model = model
        self.graph = model.graph
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._givers = {output: node for node in model.graph.node for output in node.output}
        self._folder = folder
        self._weights = weights
        self._bits = recipe.bits
        self._layer_block_size = recipe.block_size
        self._ranges = ranges.get(model.graph.name, {})
        self._made: dict[str, TensorProto] = {}

    def product(self, product: _Product, form: Form) -> list[NodeProto]:
        if form == "blocks":
            return [self._in_blocks(product)]
        return self._by_rows(product) if form == "rows" else self._static(product)

    def _in_blocks(self, product: _Product) -> NodeProto:
        matrix = self._read(product.weight)
        rows = matrix if product.transposed else matrix.T  # (N, K)
        block_size = _table_block_size(rows, self._bits) if product.transposed else self._layer_block_size
        codes, scales = quantize_rows(rows, self._bits, block_size)
        inputs = [product.node.input[0], self._add(f"{product.weight}.codes", codes)]
        inputs += [self._add(f"{product.weight}.scales", scales), "", "", product.bias]
        sizes = {"N": rows.shape[0], "K": rows.shape[1], "block_size": block_size, "accuracy_level": INT8_ACTIVATIONS}
        return self._node("MatMulNBits", inputs, product.node.name, product.output, sizes)

    def _by_rows(self, product: _Product) -> list[NodeProto]:
        """Each row of x W + b as (round(x / s * 127) W') * scales / 127 * s + b, with the row's largest magnitude as s.

        A row of zeros divides zero by zero; whatever that rounds to is multiplied by s, which is 0.
        """
        added, x = _Nodes(product.node.name), product.node.input[0]
        axis = self._add_small("rows.axis", np.array([-1]))
        largest = added.add("ReduceMax", added.add("Abs", x), axis, keepdims=1)
        step = np.float32(1 / ACTIVATION_LEVELS)
        scaled = self._integer_product(added, product, added.add("Div", x, largest), step, ZERO)
        result = added.add("Mul", scaled, largest)
        if product.bias:
            added.add("Add", result, product.bias)
        return added.giving(product.output)

    def _static(self, product: _Product) -> list[NodeProto]:
        """The product x W + b as (round(x / step) W') * scales * step + b, with the same step for every row.

        What `Relu` has cut off below zero takes all 255 levels above it, and is cut off by the rounding itself.
        """
        added, x = _Nodes(product.node.name), product.node.input[0]
        largest = self._ranges.get(x, 0.0)
        if not largest > 0.0:
            raise ValueError(f"{self.graph.name}: nothing but zeros was measured of {x}, which a static product reads")
        zero, levels, giver = ZERO, ACTIVATION_LEVELS, self._givers.get(x)
        if giver is not None and giver.op_type == "Relu":
            zero, levels, x = 0, ZERO + ACTIVATION_LEVELS, giver.input[0]
        self._integer_product(added, product, x, np.float32(largest / levels), zero, product.bias)
        return added.giving(product.output)

    def _integer_product(
        self, added: "_Nodes", product: _Product, x: str, step: np.float32, zero: int, bias: str = ""
    ) -> str:
        """The product of `x`, rounded to whole steps, and the matrix, rounded to its columns' scales."""
        matrix = self._read(product.weight)
        codes, scales = quantize_columns(np.ascontiguousarray(matrix.T) if product.transposed else matrix)
        weight = self._add(f"{product.weight}.columns", codes)
        step_name = self._add_small(f"{product.node.name}.step", step)
        zero_name = self._add_small(f"zero.{zero}", np.uint8(zero))
        rounded = added.add("QuantizeLinear", x, step_name, zero_name)
        if product.transposed and not bias:  # to the vocabulary: with so many columns one node takes longer at one row
            whole = added.add("Cast", added.add("MatMulInteger", rounded, weight, zero_name), to=TensorProto.FLOAT)
            return added.add("Mul", whole, self._add(f"{product.node.name}.column_steps", scales * step))
        operands = [rounded, weight, step_name, self._add(f"{product.weight}.column_scales", scales), zero_name]
        return added.add("MatMulIntegerToFloat", *operands, *(["", bias] if bias else []), domain=CONTRIB)

    def gather(self, node: NodeProto) -> NodeProto:
        table, ids = node.input
        rows = self._read(table)
        block_size = _table_block_size(rows, self._bits)
        codes, scales = quantize_rows(rows, self._bits, block_size)
        codes = codes.reshape(len(rows), -1)[:, : rows.shape[1] * self._bits // 8]  # this operator has no padding
        inputs = [self._add(f"{table}.rows", codes), ids, self._add(f"{table}.scales", scales)]
        attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": block_size}
        return self._node("GatherBlockQuantized", inputs, node.name, node.output[0], attributes)

    def build(self, nodes: Sequence[NodeProto]) -> onnx.ModelProto:
        used = {name for node in nodes for name in node.input}
        outputs = {value.name for value in self.graph.output}
        nodes = [node for node in nodes if node.op_type != "Relu" or node.output[0] in used | outputs]
        kept = [self._moved(tensor) for name, tensor in self._constants.items() if name in used]
        built = onnx.ModelProto()
        built.CopyFrom(self._model)
        del built.graph.node[:], built.graph.initializer[:]
        built.graph.node.extend(nodes)
        built.graph.initializer.extend([*self._made.values(), *kept])
        return built

    def _node(self, op: str, inputs: list[str], name: str, output: str, attributes: Mapping[str, Any]) -> NodeProto:
        return helper.make_node(op, inputs, [output], name, domain=CONTRIB, bits=self._bits, **attributes)

    def _add_small(self, name: str, value: np.generic | NDArray[np.generic]) -> str:
        """A constant inside the graph."""
        self._made[name] = numpy_helper.from_array(np.asarray(value), name)
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
