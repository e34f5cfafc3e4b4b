"""Smoothing of channels before the 8-bit rounding of products (Xiao et al. 2023, "SmoothQuant").

A row of activations is rounded with one scale, so that a channel with large values takes the levels
of all others. Such a channel is divided by a factor, and the weights that it is multiplied by are
multiplied by it. The division needs no node if the activation comes from one of these:

- a normalization: its weight and bias are divided;
- a gated feed-forward layer, or one with ReLU: the columns of the layer before are divided, because
  neither the product with the gate nor ReLU changes the factor;
- attention: the columns of the values are divided, with one factor for all heads that share them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from sightline.export.convert.products import Product, products

Floats = NDArray[np.float32]

EXPONENT = 0.5  # of the largest activation of a channel; that of its largest weight is 1 - EXPONENT
SMALLEST = np.float32(1e-5)  # of both; padding of a head has neither

# The number by which each element of a constant is multiplied, by its name.
Factors = Mapping[str, Floats]


@dataclass(frozen=True)
class _Divided:
    """Constants whose last axis holds the channels of an activation, and can be divided."""

    names: Sequence[str]
    first: int = 0  # index of the first channel in the last axis
    groups: tuple[int, int] = (1, 1)  # heads, and number of times that the activation repeats each


def smoothing_factors(
    graph: onnx.GraphProto, ranges: Mapping[str, Floats], read: Callable[[str], Floats]
) -> tuple[Factors, set[str]]:
    """Return the factors of constants, and the names of the activations that they smooth.

    Args:
        ranges: largest magnitude of each channel of the activations.
        read: returns a constant.
    """
    search, factors, smoothed, one = _Search(graph), dict[str, Floats](), set[str](), np.ones(1, np.float32)
    for x, largest in ranges.items():
        readers = search.products_of(x)
        divided = search.divided(x, largest.size) if readers and largest.any() else None
        if divided is None:
            continue
        heads, repeats = divided.groups
        weights = np.max([np.abs(read(product.weight)).max(axis=1) for product in readers], axis=0)
        activations, weights = (
            np.maximum(values.reshape(heads, repeats, -1).max(axis=1), SMALLEST) for values in (largest, weights)
        )
        factor = activations**EXPONENT / weights ** (1 - EXPONENT)  # (heads, channels)
        factor /= np.exp(np.log(factor).mean())
        for name in divided.names:
            divisors = np.ones(read(name).shape[-1], np.float32)
            divisors[divided.first : divided.first + factor.size] = factor.reshape(-1)
            factors[name] = factors.get(name, one) / divisors
        column = np.repeat(factor[:, None], repeats, axis=1).reshape(-1, 1)
        for product in readers:
            factors[product.weight] = factors.get(product.weight, one) * column
        smoothed.add(x)
    return factors, smoothed


class _Search:
    """Search for the constants in front of an activation."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._producers = {output: node for node in graph.node for output in node.output}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._readers: dict[str, int] = {value.name: 1 for value in graph.output}
        for node in graph.node:
            for name in node.input:
                self._readers[name] = self._readers.get(name, 0) + 1
        self._products = list(products(graph))
        self._by_output = {product.output: product for product in self._products}

    def products_of(self, x: str) -> list[Product]:
        """Return the products that read an activation; none if it has other readers, too."""
        found = [product for product in self._products if product.node.input[0] == x and not product.transposed]
        return found if len(found) == self._readers.get(x, 0) else []

    def divided(self, x: str, size: int) -> _Divided | None:
        """Return the constants that hold the `size` channels of an activation; None if none do."""
        first, groups, node = 0, (1, 1), self._producers.get(x)
        while node is not None:
            if x in self._by_output:
                product = self._by_output[x]
                names = [product.weight, product.bias] if product.bias else [product.weight]
                return None if product.transposed else _Divided(names, first, groups)
            match node.op_type:
                case "RMSNormalization" | "LayerNormalization":
                    return _Divided(node.input[1:], first, groups)
                case "Relu":
                    x = node.input[0]
                case "Mul":
                    x = next((name for name in node.input if name in self._by_output and self._readers[name] == 1), "")
                case "GroupQueryAttention":
                    attributes = {attribute.name: attribute.i for attribute in node.attribute}
                    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
                    groups, x = (kv_heads, heads // kv_heads), node.input[2]
                    if not x:  # queries, keys and values are one
                        first, x = (heads + kv_heads) * (size // heads), node.input[0]
                case "Split":
                    sizes = numpy_helper.to_array(self._constants[node.input[1]])
                    first += int(sizes[: list(node.output).index(x)].sum())
                    x = node.input[0]
                case _:
                    return None
            if self._readers.get(x, 0) != 1:
                return None
            node = self._producers.get(x)
        return None
