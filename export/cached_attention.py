"""Attention over key-value caches, as ONNX nodes.

All attention uses `GroupQueryAttention`. Its cost depends on the length of each sequence instead of
the size of the cache, and it writes new keys and values into the cache in place. Cross-attention is
the same operator without new keys.

A row is one sequence of the batch. Axes: B batch, M width, H heads, D width of a head.
"""

from collections.abc import Callable, Sequence

import numpy as np

from export.builder import CONTRIB, GraphBuilder
from export.nodes import FLOAT, KEY_VALUE
from export.parts import add_norm, linear, sublayer_input
from model.config import StackConfig
from model.layers.attention import MultiHeadAttention
from model.layers.transformer_layer import DecoderLayer, EncoderLayer

HEAD_SIZE_STEP = 8  # ONNX Runtime needs a head size that is a multiple of this
AFTER_SOFTMAX = 2  # value of `qk_output`: return the attention weights
NO_KEY_VALUE = ("", "")  # in place of the names of keys and values


class CachedAttention:
    """Builder of the attention of several layers, whose caches have the same lengths."""

    def __init__(self, graph: GraphBuilder, config: StackConfig, last: str, longest: str) -> None:
        """Create a builder.

        Args:
            graph: the graph to add nodes to.
            config: sizes of the model.
            last: name of the last valid cache position of each row, (B,) int32.
            longest: name of the number of cache positions of the longest row, () int32.

        Raises:
            ValueError: the operator does not support the head size.
        """
        if config.head_size % HEAD_SIZE_STEP:
            raise ValueError(
                f"the head size d_model / num_heads must be a multiple of {HEAD_SIZE_STEP} for export, got "
                f"{config.head_size} ({config.d_model} / {config.num_heads})"
            )
        self._graph = graph
        self._heads = config.num_heads
        self._head_size = config.head_size
        self._columns = last, longest
        self._maps: list[str] = []  # attention weights of the layers so far, each (B, H, queries, columns)

    def buffers(self, declare: Callable[..., str], name: str, layer: int, axis: str) -> list[str]:
        """Declare the caches of keys and values (B, H, `axis`, D) of a layer.

        Args:
            declare: `GraphBuilder.input` or `GraphBuilder.output`.
            name: format of their names, with {} for "key" or "value".
            layer: number of the layer.
            axis: name of the axis of positions.

        Returns:
            The names of keys and values.
        """
        shape = ("batch", self._heads, axis, self._head_size)
        return [declare(f"{name.format(part)}.{layer}", FLOAT, shape) for part in KEY_VALUE]

    def add(
        self,
        name: str,
        x: str,
        layer: EncoderLayer | DecoderLayer,
        past: Sequence[str],
        present: Sequence[str],
    ) -> str:
        """Add a sublayer of causal self-attention over x (B, queries, M); see `attend`."""
        graph, attention, norm = self._graph, layer.self_attention, layer.self_attention_norm
        assert isinstance(attention, MultiHeadAttention), "causal self-attention is multi-head attention"
        name = f"{name}.self_attention"
        normalized = sublayer_input(graph, f"{name}.output", x, norm)
        qkv = linear(graph, f"{name}.qkv", normalized, attention.query, attention.key, attention.value)
        projected = linear(graph, f"{name}.output", self.attend(qkv, past, present=present), attention.output)
        return add_norm(graph, f"{name}.output", x, projected, norm)

    def attend(
        self,
        queries: str,
        past: Sequence[str],
        new: Sequence[str] = NO_KEY_VALUE,
        present: Sequence[str] = NO_KEY_VALUE,
        causal: bool = True,
    ) -> str:
        """Add attention over a cache and new keys and values.

        Args:
            queries: (B, queries, M), or (B, queries, 3M) with the new keys and values concatenated.
            past: caches to read.
            new: new keys and values (B, 0, M); omitted if they are concatenated to the queries.
            present: caches to write new keys and values to.
            causal: a query attends only to earlier positions and its own.

        Returns:
            (B, queries, M). More than one query per row is only correct in a batch of one row.
        """
        graph = self._graph
        attended, attention_map = graph.unique("attended"), graph.unique("map")
        graph.add_multi(
            "GroupQueryAttention",
            [queries, *new, *past, *self._columns],
            [attended, *present, attention_map],
            domain=CONTRIB,
            num_heads=self._heads,
            kv_num_heads=self._heads,
            causal=int(causal),
            qk_output=AFTER_SOFTMAX,
        )
        self._maps.append(attention_map)
        return attended

    def stack_maps(self, name: str, queries: str | None = None) -> None:
        """Add one output with the attention weights of all layers.

        Binding one output costs less than binding one per layer.

        Args:
            name: name of the output.
            queries: name of the axis of queries, for an output (B, H, L, queries, columns). By
                default there is one query, and the output is (B, H, L, columns).
        """
        graph, columns, layers = self._graph, f"longest_{name}", len(self._maps)
        if queries is None:
            graph.output(name, FLOAT, ("batch", self._heads, layers, columns))
            graph.add("Concat", *self._maps, output=name, axis=2)
        else:
            graph.output(name, FLOAT, ("batch", self._heads, layers, queries, columns))
            axis = graph.constant([2], np.int64)
            graph.add("Concat", *[graph.add("Unsqueeze", one, axis) for one in self._maps], output=name, axis=2)
