"""The two graphs of the encoder-decoder Transformer: what goes in, what comes out, and the nodes between.

Axes: B batch, S source, T slots of the target's buffers, M width, H heads, D width of a head, V vocabulary. An
attention map of the step is as wide as the batch's longest row, not as the buffers.

The encoder's attention is in `export.encoder_attention`. The step uses
`GroupQueryAttention`: its cost follows each row's length instead of the buffer's, and it writes a row's new key and
value into the buffer that it reads. Cross-attention is the same operator with no new keys.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import onnx
from torch import nn

from export.builder import CONTRIB, GraphBuilder, WeightFile
from export.encoder_attention import EncoderAttention
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
from model.attention import MultiHeadAttention
from model.classifier import Classifier
from model.config import TransformerConfig
from model.transformer import DecoderLayer, EncoderLayer, Transformer
from service.bundle import Attention, State

AFTER_SOFTMAX = 2  # which scores GroupQueryAttention returns as its map


def states(config: TransformerConfig) -> tuple[State, ...]:
    """Keys and values of each decoder layer: those of the target grow, those of the source stay."""
    heads, size = config.num_heads, config.head_size
    made: list[State] = []
    for layer in range(config.decoder_layers):
        for part in ("key", "value"):
            own, cross = f"self_{part}.{layer}", f"cross_{part}.{layer}"
            output = f"self_{part}_out.{layer}"
            made += [
                State(input=own, output=output, fill="zeros", shape=(heads, "target", size)),
                State(input=cross, fill="encoder", encoder_output=cross, shape=(heads, "source", size)),
            ]
    return tuple(made)


def attention_maps(config: TransformerConfig) -> tuple[Attention, ...]:
    """Which outputs hold attention maps."""
    heads, layers = config.num_heads, config.decoder_layers
    slots: tuple[Attention, ...] = ()
    if config.encoder_attention == "linformer":
        outputs = tuple(f"encoder_slots.{layer}" for layer in range(config.encoder_layers))
        size = config.linformer_size
        slots = (
            Attention(kind="encoder_slots", outputs=outputs, layers=config.encoder_layers, heads=heads, columns=size),
        )
    return (
        # What is pulled back from slots to the source is no distribution.
        encoder_maps(config.encoder_layers, config.encoder_heads, normalized=not slots),
        *slots,
        Attention(kind="cross", outputs=("cross_attention",), layers=layers, heads=heads),
        Attention(kind="decoder", outputs=("decoder_attention",), layers=layers, heads=heads),
    )


def encoder_maps(layers: int, heads: int, normalized: bool = True) -> Attention:
    outputs = tuple(f"encoder_attention.{layer}" for layer in range(layers))
    return Attention(kind="encoder", outputs=outputs, layers=layers, heads=heads, normalized=normalized)


def encoder_graph(model: Transformer, weights: WeightFile) -> onnx.ModelProto:
    """`source_ids` (B, S) and `source_lengths` (B,) to `hidden`, cross-attention's keys and values, and maps.

    In `encoder_attention.i` (B, H, S, S) the columns of padding are 0; the rows of padding, as in `hidden` and the keys
    and values, hold numbers that mean nothing.
    """
    graph = GraphBuilder("encoder", weights)
    hidden, _ = encoder_layers(graph, model)
    _project_cross_attention(graph, model, hidden)
    return graph.build()


def encoder_layers(graph: GraphBuilder, model: Transformer | Classifier) -> tuple[str, str]:
    """The encoder from its inputs to its outputs `hidden` and maps.

    Returns:
        The last layer (B, S, M), and the lengths (B,) int64.
    """
    ids = graph.input("source_ids", INT64, ("batch", "source"))
    lengths = graph.add("Cast", graph.input("source_lengths", INT32, ("batch",)), to=INT64)
    size = graph.add("Shape", ids, start=1)  # (1,)
    first = graph.constant([0], np.int64)
    positions = graph.add("Slice", graph.weight("positions", model.positions), first, size, first)  # (S, M)
    x = graph.add("Add", scaled_embedding(graph, model.embedding.weight, ids), positions)  # (B, S, M)
    attention = EncoderAttention(graph, lengths, size, model.projections if isinstance(model, Transformer) else None)
    for number, layer in enumerate(cast(Iterable[EncoderLayer], model.encoder)):
        name = f"encoder.{number}"
        read = before(graph, f"{name}.self_attention.output", x, layer.self_attention_norm)
        attended = attention.add(number, read, layer.self_attention)
        x = add_norm(graph, f"{name}.self_attention.output", x, attended, layer.self_attention_norm)
        x = feed_forward(graph, name, x, layer.feed_forward, layer.feed_forward_norm)
    if isinstance(model, Transformer):
        x = _stack_norm(graph, "encoder", x, model.encoder_norm)
    graph.add("Identity", x, output=graph.output("hidden", FLOAT, ("batch", "source", model.config.d_model)))  # a name
    return x, lengths


def step_graph(model: Transformer, weights: WeightFile) -> onnx.ModelProto:
    """One token a row, with the states, to the scores of the next one; see `service.bundle.Graph`.

    In maps the entries beyond a row's own length mean nothing.
    """
    graph, config = GraphBuilder("step", weights), model.config
    token_ids = graph.input("token_ids", INT64, ("batch",))
    lengths = graph.input("lengths", INT32, ("batch",))
    source_lengths = graph.input("source_lengths", INT32, ("batch",))
    one = graph.constant(1, np.int32)
    target = _Columns(graph, lengths, graph.add("Add", lengths, one))
    source = _Columns(graph, graph.add("Sub", source_lengths, one), source_lengths)
    position = graph.add("Gather", graph.weight("positions", model.positions), lengths)  # (B, M)
    x = graph.add("Add", scaled_embedding(graph, model.embedding.weight, token_ids), position)  # (B, M)
    begin, axis = graph.constant([0], np.int64), graph.constant([1], np.int64)
    x = graph.add("Unsqueeze", x, axis)  # (B, 1, M)
    nothing = graph.add("Slice", x, begin, begin, axis)  # (B, 0, M)
    for number, layer in enumerate(cast(Iterable[DecoderLayer], model.decoder)):
        name, own, cross = f"decoder.{number}", layer.self_attention, layer.cross_attention
        read = before(graph, f"{name}.self_attention.output", x, layer.self_attention_norm)
        qkv = linear(graph, f"{name}.self_attention.qkv", read, own.query, own.key, own.value)
        attended = _attend_cached(graph, own, qkv, ["", ""], "self", number, target)
        projected = linear(graph, f"{name}.self_attention.output", attended, own.output)
        x = add_norm(graph, f"{name}.self_attention.output", x, projected, layer.self_attention_norm)
        read = before(graph, f"{name}.cross_attention.output", x, layer.cross_attention_norm)
        query = linear(graph, f"{name}.cross_attention.query", read, cross.query)
        attended = _attend_cached(graph, cross, query, [nothing, nothing], "cross", number, source)
        projected = linear(graph, f"{name}.cross_attention.output", attended, cross.output)
        x = add_norm(graph, f"{name}.cross_attention.output", x, projected, layer.cross_attention_norm)
        x = feed_forward(graph, name, x, layer.feed_forward, layer.feed_forward_norm)
    x = _stack_norm(graph, "decoder", x, model.decoder_norm)
    _stack_maps(graph, "decoder_attention", target, config)
    _stack_maps(graph, "cross_attention", source, config)
    x = graph.add("Squeeze", x, axis)  # (B, M)
    scores(graph, x, model.embedding.weight)
    return graph.build()


class _Columns:
    """Which slots of a buffer each row of the batch may look at; what the attention of every layer shares."""

    def __init__(self, graph: GraphBuilder, last: str, lengths: str) -> None:
        self.last = last  # (B,) int32, the last valid slot
        self.longest = graph.add("ReduceMax", lengths, keepdims=0)  # () int32
        self.maps: list[str] = []  # of the layers so far, each (B, H, 1, columns)


def _attend_cached(
    graph: GraphBuilder,
    attention: MultiHeadAttention,
    queries: str,
    new: Sequence[str],
    kind: str,
    number: int,
    columns: _Columns,
) -> str:
    """Attend over a buffer of keys and values, after writing this step's own where `kind` is "self".

    Args:
        queries: (B, 1, M), or (B, 1, 3M) with the new keys and values beside them.
        new: new keys and values, (B, 0, M); "" where they are with the queries.

    Returns:
        (B, 1, M).
    """
    heads = attention.num_heads
    axis = "target" if kind == "self" else "source"
    shape = ("batch", heads, axis, attention.query.out_features // heads)
    past = [graph.input(f"{kind}_{part}.{number}", FLOAT, shape) for part in ("key", "value")]
    present = ["", ""]
    if kind == "self":
        present = [graph.output(f"{kind}_{part}_out.{number}", FLOAT, shape) for part in ("key", "value")]
    attended, attention_map = graph.unique("attended"), graph.unique("map")
    graph.add_multi(
        "GroupQueryAttention",
        [queries, *new, *past, columns.last, columns.longest],
        [attended, *present, attention_map],
        domain=CONTRIB,
        num_heads=heads,
        kv_num_heads=heads,
        causal=int(kind == "self"),
        qk_output=AFTER_SOFTMAX,
    )
    columns.maps.append(attention_map)
    return attended


def _stack_maps(graph: GraphBuilder, name: str, columns: _Columns, config: TransformerConfig) -> None:
    """The maps of all layers as one output (B, H, L, columns): one to bind instead of one a layer."""
    graph.output(name, FLOAT, ("batch", config.num_heads, config.decoder_layers, f"longest_{name}"))
    graph.add("Concat", *columns.maps, output=name, axis=2)


def _project_cross_attention(graph: GraphBuilder, model: Transformer, memory: str) -> None:
    """The keys and values of every decoder layer's cross-attention, by one product over `memory` (B, S, M)."""
    config = model.config
    names, projections = [], []
    for number, layer in enumerate(cast(Iterable[DecoderLayer], model.decoder)):
        names += [f"cross_key.{number}", f"cross_value.{number}"]
        projections += [layer.cross_attention.key, layer.cross_attention.value]
    projected = linear(graph, "cross_attention.keys_values", memory, *projections)  # (B, S, 2L * M)
    split = graph.constant([0, 0, len(names) * config.num_heads, config.head_size], np.int64)
    by_head = graph.add("Transpose", graph.add("Reshape", projected, split), perm=[0, 2, 1, 3])  # (B, 2L * H, S, D)
    for name in names:
        graph.output(name, FLOAT, ("batch", config.num_heads, "source", config.head_size))
    graph.add_multi("Split", [by_head], names, axis=1, num_outputs=len(names))


def _stack_norm(graph: GraphBuilder, name: str, x: str, module: nn.Module) -> str:
    """What a pre-norm stack ends with; other stacks have nothing here."""
    return layer_norm(graph, name, x, module) if isinstance(module, nn.LayerNorm) else x
