"""Matrix products with constant weights in a graph."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import NodeProto, helper

from sightline.export.graphs.nodes import PROJECTIONS


def attributes_of(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def product_inputs(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the activations that are multiplied by constant matrices."""
    return list(dict.fromkeys(product.node.input[0] for product in products(graph)))


def projection_input(graph: onnx.GraphProto) -> str:
    """Return the name of the activation that is projected to the vocabulary."""
    for product in products(graph):
        if product.output in PROJECTIONS:
            return str(product.node.input[0])
    raise ValueError(
        "the logits are not a product with a constant matrix; use the scheme group-wise or per-token, not per-tensor"
    )


@dataclass(frozen=True)
class Product:
    """Product with a constant matrix."""

    node: NodeProto
    transposed: bool  # the matrix is stored as (N, K) like an embedding, not as (K, N)
    sum: NodeProto | None  # the node that adds the bias; None without bias, or if `node` adds it

    @property
    def weight(self) -> str:
        return str(self.node.input[1])

    @property
    def bias(self) -> str:
        """Name of the bias, or "" without bias."""
        if self.sum is not None:
            return str(self.sum.input[1])
        return str(self.node.input[2]) if len(self.node.input) == 3 else ""

    @property
    def output(self) -> str:
        return str((self.sum or self.node).output[0])


def products(graph: onnx.GraphProto) -> Iterator[Product]:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        attributes = attributes_of(node)
        transposed = attributes == {"transB": 1}
        if node.op_type not in ("MatMul", "Gemm") or (attributes and not transposed):
            continue
        shape = shapes.get(node.input[1], ())
        if len(shape) != 2:
            continue
        bias_shape = (shape[0 if transposed else 1],)
        if len(node.input) == 3:  # `Gemm` adds its bias itself
            if shapes.get(node.input[2]) == bias_shape:
                yield Product(node, transposed, None)
            continue
        reader = readers.get(node.output[0], [])
        adds_bias = len(reader) == 1 and reader[0].op_type == "Add"
        adds_bias = adds_bias and shapes.get(reader[0].input[1]) == bias_shape
        yield Product(node, transposed, reader[0] if adds_bias else None)
