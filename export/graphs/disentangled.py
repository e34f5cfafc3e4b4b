"""Nodes of DeBERTa: scores of relative positions, and the convolution of the embeddings.

See He et al. 2021, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention".
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sightline.export.families.description import Attention, Convolution, Disentangled
from sightline.export.families.weights import Array
from sightline.export.graphs import operators
from sightline.export.graphs.layers import LayerBuilder, activation


def rows_of_distances(options: Disentangled, distances: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of the table of vectors for each distance from a key to a query.

    The calculation is in float32, like that of training, because a distance at the border of two
    buckets could get into the other one in float64.
    """
    buckets = distances
    if options.max_distance is not None:
        exact = options.span // 2  # distances below it have a bucket each
        size = np.maximum(np.abs(distances), exact).astype(np.float32)
        growth = np.log(size / np.float32(exact)) / np.log(np.float32((options.max_distance - 1) / exact))
        large = np.ceil(growth * np.float32(exact - 1)).astype(np.int64) + exact
        buckets = np.where(np.abs(distances) <= exact, distances, large * np.sign(distances))
    return np.clip(buckets + options.span, 0, 2 * options.span - 1)


@dataclass(frozen=True)
class PositionScores:
    """Builder of the scores of relative positions of all layers. Shared nodes are added once.

    The vectors of distances are the same for all texts, so that their projections are constants. A
    graph uses only those of the distances that the batch has.
    """

    layers: LayerBuilder
    options: Disentangled
    max_positions: int  # longest sequence in tokens
    size: str  # S, (1,) int64
    positions: str  # 0 to S - 1, (S,) int64

    def add(self, module: str, attention: Attention, query: str, key: str) -> str:
        """Add the scores (B, H, S, S) of a layer for its queries and keys (B, S, H * D).

        They have the scale of the other scores.
        """
        graph = self.layers.graph
        scores = []
        for part in self.options.projections:
            tokens, axis = (query, 0) if part == "relative_key" else (key, 1)
            indices = graph.once(f"indices {axis}", functools.partial(self._indices, axis))
            vectors = graph.weight(f"{module}.{part}", self._vectors(f"{module}.{part}", attention))  # (H, D, 2 * span)
            used = graph.add("Slice", vectors, self._first, self._end, graph.constant([2], np.int64))
            products = graph.add("MatMul", operators.by_head(graph, tokens, attention.heads), used)  # (B, H, S, used)
            flat = graph.add("Reshape", products, graph.constant([0, 0, -1], np.int64))
            scores.append(graph.add("Gather", flat, indices, axis=2))
        return scores[0] if len(scores) == 1 else graph.add("Add", *scores)

    def _vectors(self, module: str, attention: Attention) -> Array:
        """Return the projected and scaled vectors (H, D, 2 * span) of all distances."""
        weights, norm = self.layers.weights, self.layers.stack.norm
        table = weights.read("encoder.relative.weight").astype(np.float64)
        if self.options.has_norm:
            table -= table.mean(axis=1, keepdims=True)
            table /= np.sqrt((table**2).mean(axis=1, keepdims=True) + norm.epsilon)
            table = table * weights.read("encoder.relative_norm.weight") + weights.read("encoder.relative_norm.bias")
        projected = table @ weights.read(f"{module}.weight").T.astype(np.float64) + weights.read(f"{module}.bias")
        scaled = attention.scale * projected.reshape(len(table), attention.heads, attention.head_size)
        return np.ascontiguousarray(scaled.transpose(1, 2, 0), np.float32)

    @functools.cached_property
    def _rows(self) -> str:
        """Name of the rows of the table (2 * P - 1,) for all distances, in their order."""
        reach = self.max_positions
        return self.layers.graph.weight(
            "encoder.relative.rows", rows_of_distances(self.options, np.arange(1 - reach, reach))
        )

    @functools.cached_property
    def _first(self) -> str:
        """Name of the first row of the table that the batch uses, (1,) int64."""
        graph = self.layers.graph
        index = graph.add("Sub", graph.constant(self.max_positions, np.int64), self.size)
        return graph.add("Gather", self._rows, index)

    @functools.cached_property
    def _end(self) -> str:
        """Name of the row after the last one that the batch uses, (1,) int64."""
        graph = self.layers.graph
        last = graph.add("Add", graph.constant(self.max_positions - 2, np.int64), self.size)
        return graph.add("Add", graph.add("Gather", self._rows, last), graph.constant(1, np.int64))

    def _indices(self, axis: int) -> str:
        """Add the indices (S, S) of the scores among the products (S * used) of each token."""
        graph = self.layers.graph
        column = graph.add_once("Unsqueeze", self.positions, graph.constant([1], np.int64))  # (S, 1)
        distances = graph.add_once("Sub", column, self.positions)
        rows = graph.add_once(
            "Gather", self._rows, graph.add_once("Add", distances, graph.constant(self.max_positions - 1, np.int64))
        )
        used = graph.add_once("Sub", self._end, self._first)
        starts = graph.add("Mul", column if axis == 0 else self.positions, used)
        return graph.add("Add", starts, graph.add_once("Sub", rows, self._first))


def convolution(layers: LayerBuilder, options: Convolution, embedded: str, x: str, is_token: str) -> str:
    """Add the convolution of the embeddings (B, S, M) to the output x (B, S, M) of layer 0.

    It is one product of the neighbours of each token, because a row of a product does not depend on
    the others. Padding counts as zeros, like the positions before and after a text.
    """
    graph, reach, axis = layers.graph, options.size // 2, layers.graph.constant([1], np.int64)
    mask = graph.add("Unsqueeze", is_token, graph.constant([2], np.int64))  # (B, S, 1)
    tokens = graph.add("Where", mask, embedded, graph.constant(0.0, np.float32))
    # A negative pad truncates.
    shifted = [
        graph.add("Pad", tokens, graph.constant([shift, -shift], np.int64), "", axis) if shift else tokens
        for shift in range(reach, -reach - 1, -1)
    ]
    weight = layers.weights.read("encoder.convolution.weight")  # (M, M, size)
    arrays = (weight.transpose(0, 2, 1).reshape(len(weight), -1), layers.weights.read("encoder.convolution.bias"))
    neighbours = graph.add("Concat", *shifted, axis=2) if reach else tokens
    product = layers.linear(neighbours, "encoder.convolution", arrays=arrays)
    total = graph.add("Add", x, activation(graph, product, options.activation))
    return layers.norm(total, "encoder.convolution_norm")
