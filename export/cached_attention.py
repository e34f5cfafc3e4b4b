"""Attention over key-value caches, as ONNX nodes.

All attention uses `GroupQueryAttention`. Its cost depends on the length of each sequence instead of
the size of the cache, and it writes new keys and values into the cache in place. Cross-attention is
the same operator without new keys.

A row is one sequence of the batch. Axes: B batch, M width, H heads, D width of a head.
"""

from collections.abc import Callable, Sequence

from export.builder import CONTRIB, GraphBuilder
from export.parts import FLOAT, KEY_VALUE, add_norm, linear, sublayer_input
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
        self._maps: list[str] = []  # attention weights of the layers so far, each (B, H, 1, columns)

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
        past: Sequence[str] = NO_KEY_VALUE,
        present: Sequence[str] = NO_KEY_VALUE,
    ) -> str:
        """Add a sublayer of causal self-attention over x (B, queries, M); see `attend`."""
        graph, attention, norm = self._graph, layer.self_attention, layer.self_attention_norm
        assert isinstance(attention, MultiHeadAttention), "causal self-attention is multi-head attention"
        name = f"{name}.self_attention"
        normalized = sublayer_input(graph, f"{name}.output", x, norm)
        qkv = linear(graph, f"{name}.qkv", normalized, attention.query, attention.key, attention.value)
        projected = linear(graph, f"{name}.output", self.attend(qkv, past=past, present=present), attention.output)
        return add_norm(graph, f"{name}.output", x, projected, norm)

    def attend(
        self,
        queries: str,
        new: Sequence[str] = NO_KEY_VALUE,
        past: Sequence[str] = NO_KEY_VALUE,
        present: Sequence[str] = NO_KEY_VALUE,
        causal: bool = True,
    ) -> str:
        """Add attention over a cache and new keys and values.

        Args:
            queries: (B, queries, M), or (B, queries, 3M) with the new keys and values concatenated.
            new: new keys and values (B, 0, M); omitted if they are concatenated to the queries.
            past: caches to read; omitted without earlier positions.
            present: caches to write new keys and values to.
            causal: a query attends only to earlier positions and its own.

        Returns:
            (B, queries, M). Attention weights exist only for a layer with a past, which has one
            query per row.
        """
        graph, has_map = self._graph, tuple(past) != NO_KEY_VALUE
        attended, attention_map = graph.unique("attended"), graph.unique("map")
        graph.add_multi(
            "GroupQueryAttention",
            [queries, *new, *past, *self._columns],
            [attended, *present, *([attention_map] if has_map else [])],
            domain=CONTRIB,
            num_heads=self._heads,
            kv_num_heads=self._heads,
            causal=int(causal),
            qk_output=AFTER_SOFTMAX if has_map else 0,
        )
        if has_map:
            self._maps.append(attention_map)
        return attended

    def stack_maps(self, name: str) -> None:
        """Add one output (B, H, L, columns) with the attention weights of all layers.

        Binding one output costs less than binding one per layer.
        """
        self._graph.output(name, FLOAT, ("batch", self._heads, len(self._maps), f"longest_{name}"))
        self._graph.add("Concat", *self._maps, output=name, axis=2)
