"""Attention over buffers of keys and values that reach further than any row, as nodes.

All of it is `GroupQueryAttention`: its cost follows each row's length instead of the buffer's, and it writes a row's
new keys and values into the buffers that it reads. Cross-attention is the same operator with no new keys. Axes:
B batch, M width, H heads, D width of a head.
"""

from collections.abc import Callable, Sequence

from export.builder import CONTRIB, GraphBuilder
from export.parts import FLOAT, KEY_VALUE, add_norm, before, linear
from model.config import StackConfig
from model.layers.attention import MultiHeadAttention
from model.layers.transformer_layer import DecoderLayer, EncoderLayer

HEAD_SIZE_STEP = 8  # ONNX Runtime's operator takes no other sizes of heads than its multiples
AFTER_SOFTMAX = 2  # which scores `GroupQueryAttention` returns as its map
NOTHING = ("", "")  # instead of the names of keys and values


class CachedAttention:
    """Adds the attention of one layer after another, all over buffers of the same rows and lengths."""

    def __init__(self, graph: GraphBuilder, config: StackConfig, last: str, longest: str) -> None:
        """`last` (B,) int32 is each row's last valid slot, `longest` () int32 the longest row's number of slots.

        Raises:
            ValueError: the operator does not take heads of this size.
        """
        if config.head_size % HEAD_SIZE_STEP:
            raise ValueError(
                f"heads of {config.head_size} ({config.d_model} / {config.num_heads}) cannot be exported: "
                f"the operator takes multiples of {HEAD_SIZE_STEP}"
            )
        self._graph = graph
        self._heads = config.num_heads
        self._head_size = config.head_size
        self._columns = last, longest
        self._maps: list[str] = []  # of the layers so far, each (B, H, 1, columns)

    def buffers(self, declare: Callable[..., str], name: str, layer: int, axis: str) -> list[str]:
        """Keys and values (B, H, `axis`, D) of a layer, as the graph's inputs or outputs; `name` has a place for both.

        Args:
            declare: `GraphBuilder.input` or `GraphBuilder.output`.
        """
        shape = ("batch", self._heads, axis, self._head_size)
        return [declare(f"{name.format(part)}.{layer}", FLOAT, shape) for part in KEY_VALUE]

    def add(
        self,
        name: str,
        x: str,
        layer: EncoderLayer | DecoderLayer,
        past: Sequence[str] = NOTHING,
        present: Sequence[str] = NOTHING,
    ) -> str:
        """The whole sublayer of causal self-attention, from x (B, queries, M) to the same shape; see `attend`."""
        graph, attention, norm = self._graph, layer.self_attention, layer.self_attention_norm
        assert isinstance(attention, MultiHeadAttention), "a causal layer has no other"
        name = f"{name}.self_attention"
        read = before(graph, f"{name}.output", x, norm)
        qkv = linear(graph, f"{name}.qkv", read, attention.query, attention.key, attention.value)
        projected = linear(graph, f"{name}.output", self.attend(qkv, past=past, present=present), attention.output)
        return add_norm(graph, f"{name}.output", x, projected, norm)

    def attend(
        self,
        queries: str,
        new: Sequence[str] = NOTHING,
        past: Sequence[str] = NOTHING,
        present: Sequence[str] = NOTHING,
        causal: bool = True,
    ) -> str:
        """Attend over `past` and what is new.

        Args:
            queries: (B, queries, M), or (B, queries, 3M) with the new keys and values beside them.
            new: new keys and values, (B, 0, M); left out where they are with the queries.
            past: the buffers that are read; left out where nothing came before.
            present: the buffers that new keys and values are written to.
            causal: whether a query sees what stands before it alone.

        Returns:
            (B, queries, M). Only a layer with a past, of one query a row, has a map.
        """
        graph, has_map = self._graph, tuple(past) != NOTHING
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
        """The maps of all layers as one output (B, H, L, columns): one to bind instead of one a layer."""
        self._graph.output(name, FLOAT, ("batch", self._heads, len(self._maps), f"longest_{name}"))
        self._graph.add("Concat", *self._maps, output=name, axis=2)
