"""The two graphs of a decoder-only model: one reads a whole prompt, the other one token a row.

Both are the same layers. The bundle's encoder fills the states that the step goes on with; the step begins with the
prompt's last token, whose slot it writes again. Axes: B batch, S prompt, T slots of the buffers, M width, H heads,
D width of a head, V vocabulary.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
import onnx

from export.builder import CONTRIB, GraphBuilder, WeightFile
from export.parts import (
    FLOAT,
    INT32,
    INT64,
    add_norm,
    before,
    feed_forward,
    layer_norm,
    linear,
    scaled_embedding,
    scores,
)
from export.transformer import AFTER_SOFTMAX
from model.attention import MultiHeadAttention
from model.causal import CausalModel
from model.config import CausalConfig
from model.transformer import EncoderLayer
from service.bundle import Attention, State


def states(config: CausalConfig) -> tuple[State, ...]:
    """Keys and values of each layer, of the prompt and of what follows it."""
    return tuple(
        State(
            input=f"self_{part}.{layer}",
            output=f"self_{part}_out.{layer}",
            fill="encoder",
            encoder_output=f"prompt_{part}.{layer}",
            shape=(config.num_heads, "target", config.head_size),
        )
        for layer in range(config.layers)
        for part in ("key", "value")
    )


def attention_maps(config: CausalConfig) -> tuple[Attention, ...]:
    """Which outputs hold attention maps."""
    return (Attention(kind="decoder", outputs=("decoder_attention",), layers=config.layers, heads=config.num_heads),)


def encoder_graph(model: CausalModel, weights: WeightFile) -> onnx.ModelProto:
    """`source_ids` (B, S) and `source_lengths` (B,) to `hidden` and each layer's keys and values.

    What stands in a row's padding means nothing.
    """
    graph, config = GraphBuilder("encoder", weights), model.config
    ids = graph.input("source_ids", INT64, ("batch", "source"))
    lengths = graph.input("source_lengths", INT32, ("batch",))
    size, first = graph.add("Shape", ids, start=1), graph.constant([0], np.int64)  # (1,)
    positions = graph.add("Slice", graph.weight("positions", model.positions), first, size, first)  # (S, M)
    x = graph.add("Add", scaled_embedding(graph, model.embedding.weight, ids), positions)  # (B, S, M)
    last = graph.add("Sub", lengths, graph.constant(1, np.int32))
    attention = _Attention(graph, config, last, graph.add("Cast", graph.add("Squeeze", size), to=INT32))
    for number, layer in enumerate(cast(Iterable[EncoderLayer], model.layers)):
        shape = ("batch", config.num_heads, "source", config.head_size)
        kept = [graph.output(f"prompt_{part}.{number}", FLOAT, shape) for part in ("key", "value")]
        x = _layer(graph, number, layer, x, attention, ["", ""], kept)
    hidden = graph.output("hidden", FLOAT, ("batch", "source", config.d_model))
    graph.add("Identity", layer_norm(graph, "last", x, model.norm), output=hidden)
    return graph.build()


def step_graph(model: CausalModel, weights: WeightFile) -> onnx.ModelProto:
    """One token a row, with the states, to the scores of the next one; see `service.bundle.Graph`.

    In maps the entries beyond a row's own length mean nothing.
    """
    graph, config = GraphBuilder("step", weights), model.config
    token_ids = graph.input("token_ids", INT64, ("batch",))
    lengths = graph.input("lengths", INT32, ("batch",))
    position = graph.add("Gather", graph.weight("positions", model.positions), lengths)  # (B, M)
    x = graph.add("Add", scaled_embedding(graph, model.embedding.weight, token_ids), position)  # (B, M)
    axis = graph.constant([1], np.int64)
    x = graph.add("Unsqueeze", x, axis)  # (B, 1, M)
    total = graph.add("Add", lengths, graph.constant(1, np.int32))
    attention = _Attention(graph, config, lengths, graph.add("ReduceMax", total, keepdims=0))
    for number, layer in enumerate(cast(Iterable[EncoderLayer], model.layers)):
        shape = ("batch", config.num_heads, "target", config.head_size)
        past = [graph.input(f"self_{part}.{number}", FLOAT, shape) for part in ("key", "value")]
        present = [graph.output(f"self_{part}_out.{number}", FLOAT, shape) for part in ("key", "value")]
        x = _layer(graph, number, layer, x, attention, past, present)
    attention.stack_maps()
    features = graph.add("Squeeze", layer_norm(graph, "last", x, model.norm), axis)  # (B, M)
    scores(graph, features, model.embedding.weight)
    return graph.build()


class _Attention:
    """Attention of every layer: `GroupQueryAttention`, which writes new keys and values into the buffers it reads."""

    def __init__(self, graph: GraphBuilder, config: CausalConfig, last: str, longest: str) -> None:
        """`last` (B,) is each row's last valid slot, `longest` () the longest row's number of them."""
        self._graph = graph
        self._config = config
        self._columns = last, longest
        self._maps: list[str] = []  # of the layers so far, each (B, H, queries, columns)

    def attend(self, qkv: str, past: list[str], present: list[str]) -> str:
        """Queries, new keys and values side by side (B, queries, 3M) to (B, queries, M)."""
        graph, heads = self._graph, self._config.num_heads
        attended, attention_map = graph.unique("attended"), graph.unique("map")
        is_one_query = past[0] != ""
        graph.add_multi(
            "GroupQueryAttention",
            [qkv, "", "", *past, *self._columns],
            [attended, *present, *([attention_map] if is_one_query else [])],
            domain=CONTRIB,
            num_heads=heads,
            kv_num_heads=heads,
            qk_output=AFTER_SOFTMAX if is_one_query else 0,
        )
        self._maps.append(attention_map)
        return attended

    def stack_maps(self) -> None:
        """The maps of all layers as one output (B, H, L, columns): one to bind instead of one a layer."""
        config, name = self._config, "decoder_attention"
        self._graph.output(name, FLOAT, ("batch", config.num_heads, config.layers, "longest"))
        self._graph.add("Concat", *self._maps, output=name, axis=2)


def _layer(
    graph: GraphBuilder,
    number: int,
    layer: EncoderLayer,
    x: str,
    attention: _Attention,
    past: list[str],
    present: list[str],
) -> str:
    """(B, queries, M) to (B, queries, M); keys and values go from `past` to `present`."""
    name, own = f"layers.{number}", layer.self_attention
    assert isinstance(own, MultiHeadAttention), "a causal model has no other"
    read = before(graph, f"{name}.self_attention.output", x, layer.self_attention_norm)
    qkv = linear(graph, f"{name}.self_attention.qkv", read, own.query, own.key, own.value)
    projected = linear(graph, f"{name}.self_attention.output", attention.attend(qkv, past, present), own.output)
    x = add_norm(graph, f"{name}.self_attention.output", x, projected, layer.self_attention_norm)
    return feed_forward(graph, name, x, layer.feed_forward, layer.feed_forward_norm)
