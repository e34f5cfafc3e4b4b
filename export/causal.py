"""The graph of a decoder-only model.

The same graph reads chunks of a prompt and runs decoder steps, so that ONNX Runtime packs the
weights only once.

A row is one sequence of the batch. Axes: B batch, S new tokens, T positions of the cache, M width,
H heads, D width of a head, L layers, V vocabulary.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
import onnx

from export.builder import GraphBuilder, WeightFile
from export.cached_attention import CachedAttention
from export.nodes import FLOAT, INT32, INT64, KEY_VALUE, scores
from export.parts import feed_forward, layer_norm, scaled_embedding
from model.architectures.causal import CausalModel
from model.config import CausalConfig
from model.layers.transformer_layer import EncoderLayer
from service.bundle import Attention, State


def states(config: CausalConfig) -> tuple[State, ...]:
    """Describe the key-value cache of each layer, for the prompt and the generated tokens."""
    return tuple(
        State(
            input=f"self_{part}.{layer}",
            output=f"self_{part}_out.{layer}",
            init="zeros",
            shape=(config.num_heads, "target", config.head_size),
        )
        for layer in range(config.layers)
        for part in KEY_VALUE
    )


def attention_maps(config: CausalConfig) -> tuple[Attention, ...]:
    """Describe the outputs with attention weights."""
    return (Attention(kind="decoder", outputs=("decoder_attention",), layers=config.layers, heads=config.num_heads),)


def decoder_graph(model: CausalModel, weights: WeightFile) -> onnx.ModelProto:
    """Build the decoder graph of a decoder-only model; see `service.bundle.Graph`.

    Attention weights beyond the length of a row are undefined.
    """
    graph, config = GraphBuilder("step", weights), model.config
    token_ids = graph.input("token_ids", INT64, ("batch", "tokens"))
    lengths = graph.input("lengths", INT32, ("batch",))
    size = graph.add("Squeeze", graph.add("Shape", token_ids, start=1, end=2))  # S, () int64
    x = _embedded(graph, model, token_ids, lengths, size)  # (B, S, M)
    total = graph.add("Add", lengths, graph.add("Cast", size, to=INT32))
    last = graph.add("Sub", total, graph.constant(1, np.int32))
    attention = CachedAttention(graph, config, last, graph.add("ReduceMax", total, keepdims=0))
    for number, layer in enumerate(cast(Iterable[EncoderLayer], model.layers)):
        past = attention.buffers(graph.input, "self_{}", number, "target")
        present = attention.buffers(graph.output, "self_{}_out", number, "target")
        x = attention.add(f"layers.{number}", x, layer, past, present)
        x = feed_forward(graph, f"layers.{number}", x, layer.feed_forward, layer.feed_forward_norm)
    hidden = layer_norm(graph, "last", x, model.norm)
    graph.add("Identity", hidden, output=graph.output("hidden", FLOAT, ("batch", "tokens", config.d_model)))
    attention.stack_maps("decoder_attention", "tokens")
    features = graph.add("Gather", hidden, graph.constant(-1, np.int64), axis=1)  # (B, M)
    scores(graph, features, [graph.weight("embedding", model.embedding.weight)], model.config.vocab_size)
    return graph.build()


def _embedded(graph: GraphBuilder, model: CausalModel, ids: str, lengths: str, size: str) -> str:
    """Add `TransformerBase.embed` of ids (B, S) at the positions after `lengths` (B,)."""
    begin, one, axis = (graph.constant(value, np.int64) for value in (0, 1, [1]))
    first = graph.add("Unsqueeze", graph.add("Cast", lengths, to=INT64), axis)  # (B, 1)
    positions = graph.add("Add", first, graph.add("Range", begin, size, one))  # (B, S)
    position = graph.add("Gather", graph.weight("positions", model.positions), positions)
    return graph.add("Add", scaled_embedding(graph, model.embedding.weight, ids), position)
