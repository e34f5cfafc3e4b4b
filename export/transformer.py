"""The two graphs of the encoder-decoder Transformer: encoder and one decoder step.

A row is one sequence of the batch. Axes: B batch, S source, T positions of the target's cache, M
width, H heads, D width of a head, V vocabulary. Attention weights of the decoder graph are as wide
as the longest row of the batch, not as the cache.

`export.encoder_attention` builds the attention of the encoder, `export.cached_attention` that of
the decoder.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
import onnx
from torch import nn

from export.builder import GraphBuilder, WeightFile
from export.cached_attention import CachedAttention
from export.encoder_attention import EncoderAttention
from export.nodes import FLOAT, INT32, INT64, KEY_VALUE, scores
from export.parts import add_norm, embedded_source, embedded_tokens, feed_forward, layer_norm, linear, sublayer_input
from model.architectures.classifier import Classifier
from model.architectures.transformer import Transformer
from model.config import TransformerConfig
from model.layers.transformer_layer import DecoderLayer, EncoderLayer
from service.bundle import Attention, State


def states(config: TransformerConfig) -> tuple[State, ...]:
    """Describe the caches of each decoder layer: self-attention grows, cross-attention does not."""
    heads, size = config.num_heads, config.head_size
    made: list[State] = []
    for layer in range(config.decoder_layers):
        for part in KEY_VALUE:
            own, cross = f"self_{part}.{layer}", f"cross_{part}.{layer}"
            output = f"self_{part}_out.{layer}"
            made += [
                State(input=own, output=output, init="zeros", shape=(heads, "target", size)),
                State(input=cross, init="encoder", encoder_output=cross, shape=(heads, "source", size)),
            ]
    return tuple(made)


def attention_maps(config: TransformerConfig) -> tuple[Attention, ...]:
    """Describe the outputs with attention weights."""
    heads, layers = config.num_heads, config.decoder_layers
    projected: tuple[Attention, ...] = ()
    if config.encoder_attention == "linformer":
        outputs = tuple(f"encoder_slots.{layer}" for layer in range(config.encoder_layers))
        size = config.linformer_size
        projected = (
            Attention(kind="encoder_slots", outputs=outputs, layers=config.encoder_layers, heads=heads, columns=size),
        )
    return (
        # Weights of projected keys, converted to source tokens, do not sum to 1.
        encoder_maps(config.encoder_layers, config.encoder_heads, normalized=not projected),
        *projected,
        Attention(kind="cross", outputs=("cross_attention",), layers=layers, heads=heads),
        Attention(kind="decoder", outputs=("decoder_attention",), layers=layers, heads=heads),
    )


def encoder_maps(layers: int, heads: int, normalized: bool = True) -> Attention:
    outputs = tuple(f"encoder_attention.{layer}" for layer in range(layers))
    return Attention(kind="encoder", outputs=outputs, layers=layers, heads=heads, normalized=normalized)


def encoder_graph(model: Transformer, weights: WeightFile) -> onnx.ModelProto:
    """Build the encoder graph.

    It maps `source_ids` (B, S) and `source_lengths` (B,) to `hidden`, the keys and values of
    cross-attention, and attention weights. In `encoder_attention.i` (B, H, S, S), the columns of
    padding are 0. Queries at padding have undefined weights, hidden states, keys and values.
    """
    graph = GraphBuilder("encoder", weights)
    hidden, _, _ = encoder_layers(graph, model)
    _project_cross_attention(graph, model, hidden)
    return graph.build()


def encoder_layers(graph: GraphBuilder, model: Transformer | Classifier) -> tuple[str, str, str]:
    """Add the encoder from its inputs to its outputs `hidden` and attention weights.

    Returns:
        The names of the last hidden states (B, S, M), the source lengths (B,) int64, and S (1,)
        int64.
    """
    ids = graph.input("source_ids", INT64, ("batch", "source"))
    lengths = graph.add("Cast", graph.input("source_lengths", INT32, ("batch",)), to=INT64)
    x, size = embedded_source(graph, model, ids)  # (B, S, M)
    attention = EncoderAttention(graph, lengths, size, model.projections if isinstance(model, Transformer) else None)
    for number, layer in enumerate(cast(Iterable[EncoderLayer], model.encoder)):
        name = f"encoder.{number}"
        normalized = sublayer_input(graph, f"{name}.self_attention.output", x, layer.self_attention_norm)
        attended = attention.add(number, normalized, layer.self_attention)
        x = add_norm(graph, f"{name}.self_attention.output", x, attended, layer.self_attention_norm)
        x = feed_forward(graph, name, x, layer.feed_forward, layer.feed_forward_norm)
    if isinstance(model, Transformer):
        x = _stack_norm(graph, "encoder", x, model.encoder_norm)
    graph.add("Identity", x, output=graph.output("hidden", FLOAT, ("batch", "source", model.config.d_model)))
    return x, lengths, size


def decoder_graph(model: Transformer, weights: WeightFile) -> onnx.ModelProto:
    """Build the decoder graph, which runs one step; see `service.bundle.Graph`.

    Attention weights beyond the length of a row are undefined.
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
    no_keys = graph.add("Slice", x, begin, begin, axis)  # (B, 0, M)
    for number, layer in enumerate(cast(Iterable[DecoderLayer], model.decoder)):
        name, cross = f"decoder.{number}", layer.cross_attention
        past = target.buffers(graph.input, "self_{}", number, "target")
        present = target.buffers(graph.output, "self_{}_out", number, "target")
        x = target.add(name, x, layer, past, present)
        normalized = sublayer_input(graph, f"{name}.cross_attention.output", x, layer.cross_attention_norm)
        query = linear(graph, f"{name}.cross_attention.query", normalized, cross.query)
        memory = source.buffers(graph.input, "cross_{}", number, "source")
        attended = source.attend(query, memory, [no_keys, no_keys], causal=False)
        projected = linear(graph, f"{name}.cross_attention.output", attended, cross.output)
        x = add_norm(graph, f"{name}.cross_attention.output", x, projected, layer.cross_attention_norm)
        x = feed_forward(graph, name, x, layer.feed_forward, layer.feed_forward_norm)
    x = _stack_norm(graph, "decoder", x, model.decoder_norm)
    target.stack_maps("decoder_attention")
    source.stack_maps("cross_attention")
    x = graph.add("Squeeze", x, axis)  # (B, M)
    scores(graph, x, [graph.weight("embedding", model.embedding.weight)], model.config.vocab_size)
    return graph.build()


def _project_cross_attention(graph: GraphBuilder, model: Transformer, memory: str) -> None:
    """Add all cross-attention keys and values with one product over `memory` (B, S, M)."""
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
    """Add the final normalization of a pre-norm stack; a post-norm stack has none."""
    return layer_norm(graph, name, x, module) if isinstance(module, nn.LayerNorm) else x
