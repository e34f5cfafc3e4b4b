"""Relative positions as a bias of attention scores (Raffel et al. 2020; Shaw et al. 2018)."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sightline.export.families.description import Attention, RelativeBias
from sightline.export.families.weights import Array
from sightline.export.graphs import operators
from sightline.export.graphs.builder import GraphBuilder
from sightline.export.graphs.layers import LayerBuilder


def bias_of_distances(options: RelativeBias, table: Array, reach: int) -> Array:
    """Return the bias (H, 2 * reach - 1) of all distances from a table (buckets, H).

    Column `reach - 1 + distance` is for a key that is `distance` positions after the query.
    """
    return np.ascontiguousarray(table[buckets(options, np.arange(1 - reach, reach))].T)


def buckets(options: RelativeBias, distances: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket of each distance from a query to a key.

    Half of the buckets of one direction have one distance each, the others grow logarithmically.
    The calculation is in float32, like that of training, because a distance at the border of two
    buckets could get into the other one in float64.
    """
    count = options.buckets // 2 if options.bidirectional else options.buckets
    first = (distances > 0) * count if options.bidirectional else 0
    size = np.abs(distances) if options.bidirectional else np.maximum(-distances, 0)
    exact = count // 2
    ratio = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact))
    scaled = ratio / np.float32(math.log(options.max_distance / exact)) * np.float32(count - exact)
    large = np.minimum(exact + scaled.astype(np.int64), count - 1)
    return np.asarray(first + np.where(size < exact, size, large), np.int64)


def bias_of_slopes(slopes: Sequence[float], distances: NDArray[np.int64]) -> Array:
    """Return the bias (H, …) of ALiBi for distances (…), in float32 as in training."""
    columns = np.array(slopes, np.float32).reshape(-1, *[1] * distances.ndim)
    return np.asarray(-columns * np.abs(distances).astype(np.float32))


def relative_bias(layers: LayerBuilder, queries: str, keys: str, reach: int) -> str:
    """Add the bias (H, ..., S, K) of scores of a stack with buckets of distances or with ALiBi.

    Args:
        queries: positions of the queries, (..., S, 1) int64.
        keys: positions of the keys, (K,) int64.
        reach: number of positions.
    """
    graph, stack, name = layers.graph, layers.stack, f"{layers.name}.relative_bias"
    if stack.relative_bias is not None:
        table = bias_of_distances(stack.relative_bias, layers.weights.read(f"{name}.weight"), reach)
    else:
        table = bias_of_slopes(stack.slopes or (), np.arange(1 - reach, reach))
    table_name = graph.weight(name, table)
    distances = graph.add("Sub", keys, queries)  # (..., S, K)
    return graph.add("Gather", table_name, graph.add("Add", distances, graph.constant(reach - 1, np.int64)), axis=1)


def relative_key_scores(
    graph: GraphBuilder, module: str, attention: Attention, table: Array, query: str, queries: str, keys: str
) -> str:
    """Add the scores of queries with the vectors of distances (Shaw et al. 2018, equation 5).

    The result (B, H, S, K) has the scale of the other scores.

    Args:
        table: vector of each distance, (2 * span + 1, D).
        query: queries (B, S, H * size) with heads of a size of at least D, padded with zeros.
        queries: positions of the queries, (B, S, 1) or (S, 1) int64.
        keys: positions of the keys, (K,) int64.
    """
    options, size = attention.relative_keys, attention.head_size
    assert options is not None, "the attention has vectors of distances"
    by_head = operators.by_head(graph, query, attention.heads)  # (B, H, S, size)
    used = graph.add("Slice", by_head, *(graph.constant([argument], np.int64) for argument in (0, size, 3)))
    vectors = graph.weight(f"{module}.relative_keys", np.ascontiguousarray(attention.scale * table.T, np.float32))
    by_distance = graph.add("MatMul", used, vectors)  # (B, H, S, 2 * span + 1)
    limits = [graph.constant(limit, np.int64) for limit in (-options.span, options.span)]
    distances = graph.add_once("Clip", graph.add_once("Sub", keys, queries), *limits)
    rows = graph.add_once("Add", distances, graph.constant(options.span, np.int64))  # (B, S, K) or (S, K)
    first = graph.add("Shape", by_distance, start=0, end=3)
    shape = graph.add("Concat", first, graph.add("Shape", keys), axis=0)
    axis = graph.constant([-3], np.int64)
    indices = graph.add("Expand", graph.add_once("Unsqueeze", rows, axis), shape)
    return graph.add("GatherElements", by_distance, indices, axis=3)
