"""Smoothing of channels before the 8-bit rounding of products (Xiao et al. 2023, "SmoothQuant").

A row of activations is rounded with one scale, so that a channel with large values takes the levels
of all others. Such a channel is divided by a factor, and the weights that it is multiplied by are
multiplied by it. The division needs no node if the activation comes from one of these:

- a normalization: its weight and bias are divided;
- attention: the columns of the values are divided, with one factor for all heads that share them.

The last product of a feed-forward layer is not smoothed. Few tokens have large values there, in
channels of their own, and even smoothed, half of the loss would come from this product.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto

from sightline.export.convert.products import Product, attributes_of, products

Floats = NDArray[np.float32]
Factors = Mapping[str, Floats]  # by which constants are multiplied, by name

EXPONENT = 0.5  # of the largest activation of a channel; that of its largest weight is 1 - EXPONENT
SMALLEST = np.float32(1e-5)  # of both; padding of a head has neither


def smoothing_factors(
    graph: onnx.GraphProto, ranges: Mapping[str, Floats], read: Callable[[str], Floats]
) -> tuple[Factors, set[str]]:
    """Return the factors of constants, and the names of the activations that they smooth.

    Args:
        ranges: largest magnitude of each channel of the activations.
        read: returns a constant.
    """
    num_readers = Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])
    producers = {output: node for node in graph.node for output in node.output}
    by_output = {product.output: product for product in products(graph)}
    factors, smoothed, one = dict[str, Floats](), set[str](), np.ones(1, np.float32)
    for x, largest in ranges.items():
        matrices = [product.weight for product in by_output.values() if product.node.input[0] == x]
        divided = _divided(x, largest.size, producers, by_output, num_readers)
        if divided is None or len(matrices) < num_readers[x] or not largest.any():
            continue
        names, first, heads, repeats = divided
        weights = np.max([np.abs(read(name)).max(axis=1) for name in matrices], axis=0)
        activations, weights = (
            np.maximum(values.reshape(heads, repeats, -1).max(axis=1), SMALLEST) for values in (largest, weights)
        )
        factor = activations**EXPONENT / weights ** (1 - EXPONENT)  # (heads, channels)
        factor /= np.exp(np.log(factor).mean())
        for name in names:
            divisors = np.ones(read(name).shape[-1], np.float32)
            divisors[first : first + factor.size] = factor.reshape(-1)
            factors[name] = factors.get(name, one) / divisors
        for name in matrices:
            factors[name] = factors.get(name, one) * np.repeat(factor[:, None], repeats, axis=1).reshape(-1, 1)
        smoothed.add(x)
    return factors, smoothed


def _divided(
    x: str,
    size: int,
    producers: Mapping[str, NodeProto],
    by_output: Mapping[str, Product],
    num_readers: Mapping[str, int],
) -> tuple[Sequence[str], int, int, int] | None:
    """Find the constants that can be divided in place of an activation with `size` channels.

    Returns:
        Their names, the index of the first channel in their last axis, the number of heads there,
        and the number of times that the activation has each of them.
    """
    node = producers.get(x, NodeProto())
    if node.op_type in ("RMSNormalization", "LayerNormalization"):
        return node.input[1:], 0, 1, 1
    if node.op_type != "GroupQueryAttention":
        return None
    attributes = attributes_of(node)
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    values, first = node.input[2] or node.input[0], (heads + kv_heads) * (size // heads)  # after queries and keys
    if node.input[2] and num_readers[values] == 1:
        values = producers[values].input[0]  # of a `Split`
    product = by_output.get(values)
    if product is None or num_readers[values] != 1:
        return None
    return [name for name in (product.weight, product.bias) if name], first, kv_heads, heads // kv_heads
