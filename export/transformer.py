"""The two graphs of the encoder-decoder Transformer: what goes in, what comes out, and the nodes between.

Axes: B batch, S source, T slots of the target's buffers, M width, H heads, D width of a head, V vocabulary. An
attention map of the step is as wide as the batch's longest row, not as the buffers.

The encoder's attention is in `export.encoder_attention`, the step's in `export.cached_attention`.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
import onnx
from torch import nn

from export.builder import GraphBuilder, WeightFile
from export.cached_attention import CachedAttention
from export.encoder_attention import EncoderAttention
from export.parts import (
    FLOAT,
    INT32,
    INT64,
    KEY_VALUE,
    add_norm,
    before,
    embedded_source,
    embedded_tokens,
    feed_forward,
    layer_norm,
    linear,
    scores,
)
from model.architectures.classifier import Classifier
from model.architectures.transformer import Transformer
from model.config import TransformerConfig
from model.layers.transformer_layer import DecoderLayer, EncoderLayer
from service.bundle import Attention, State


def states(config: TransformerConfig) -> tuple[State, ...]:
    """Keys and values of each decoder layer: those of the target grow, those of the source stay."""
    heads, size = config.num_heads, config.head_size
    made: list[State] = []
    for layer in range(config.decoder_layers):
        for part in KEY_VALUE:
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
    hidden, _, _ = encoder_layers(graph, model)
    _project_cross_attention(graph, model, hidden)
    return graph.build()


def encoder_layers(graph: GraphBuilder, model: Transformer | Classifier) -> tuple[str, str, str]:
    """The encoder from its inputs to its outputs `hidden` and maps.

    Returns:
        The last layer (B, S, M), and as int64 the lengths (B,) and S, (1,).
    """
    ids = graph.input("source_ids", INT64, ("batch", "source"))
    lengths = graph.add("Cast", graph.input("source_lengths", INT32, ("batch",)), to=INT64)
    x, size = embedded_source(graph, model, ids)  # (B, S, M)
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
    return x, lengths, size


def step_graph(model: Transformer, weights: WeightFile) -> onnx.ModelProto:
    """One token a row, with the states, to the scores of the next one; see `service.bundle.Graph`.

    In maps the entries beyond a row's own length mean nothing.
    """
    graph, config = GraphBuilder("step", weights), model.config
    token_ids = graph.input("token_ids", INT64, ("batch",))
    lengths = graph.input("lengths", INT32, ("batch",))
    source_lengths = graph.input("source_lengths", INT32, ("batch",))
    one = graph.constant(1, np.int32)
    total = graph.add("Add", lengths, one)
    target = CachedAttention(graph, config, lengths, graph.add("ReduceMax", total, keepdims=0))
    last = graph.add("Sub", source_lengths, one)
    source = CachedAttention(graph, config, last, graph.add("ReduceMax", source_lengths, keepdims=0))
    x = embedded_tokens(graph, model, token_ids, lengths)  # (B, 1, M)
    begin, axis = graph.constant([0], np.int64), graph.constant([1], np.int64)
    nothing = graph.add("Slice", x, begin, begin, axis)  # (B, 0, M)
    for number, layer in enumerate(cast(Iterable[DecoderLayer], model.decoder)):
        name, cross = f"decoder.{number}", layer.cross_attention
        past = target.buffers(graph.input, "self_{}", number, "target")
        present = target.buffers(graph.output, "self_{}_out", number, "target")
        x = target.add(name, x, layer, past, present)
        read = before(graph, f"{name}.cross_attention.output", x, layer.cross_attention_norm)
        query = linear(graph, f"{name}.cross_attention.query", read, cross.query)
        memory = source.buffers(graph.input, "cross_{}", number, "source")
        attended = source.attend(query, [nothing, nothing], memory, causal=False)
        projected = linear(graph, f"{name}.cross_attention.output", attended, cross.output)
        x = add_norm(graph, f"{name}.cross_attention.output", x, projected, layer.cross_attention_norm)
        x = feed_forward(graph, name, x, layer.feed_forward, layer.feed_forward_norm)
    x = _stack_norm(graph, "decoder", x, model.decoder_norm)
    target.stack_maps("decoder_attention")
    source.stack_maps("cross_attention")
    x = graph.add("Squeeze", x, axis)  # (B, M)
    scores(graph, x, model.embedding.weight)
    return graph.build()


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
