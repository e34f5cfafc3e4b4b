"""The two graphs of a decoder-only model: prefill and one decoder step.

Both have the same layers. The encoder graph reads prompts (prefill) and computes the key-value
cache of a prompt. The first decoder step reads the last token of the prompt and writes its cache
position again.

A row is one sequence of the batch. Axes: B batch, S prompt, T positions of the cache, M width, H
heads, D width of a head, V vocabulary.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
import onnx

from export.builder import GraphBuilder, WeightFile
from export.cached_attention import CachedAttention
from export.parts import (
    FLOAT,
    INT32,
    INT64,
    KEY_VALUE,
    embedded_source,
    embedded_tokens,
    feed_forward,
    layer_norm,
    scores,
)
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
            init="encoder",
            encoder_output=f"prompt_{part}.{layer}",
            shape=(config.num_heads, "target", config.head_size),
        )
        for layer in range(config.layers)
        for part in KEY_VALUE
    )


def attention_maps(config: CausalConfig) -> tuple[Attention, ...]:
    """Describe the outputs with attention weights."""
    return (Attention(kind="decoder", outputs=("decoder_attention",), layers=config.layers, heads=config.num_heads),)


def encoder_graph(model: CausalModel, weights: WeightFile) -> onnx.ModelProto:
    """Build the encoder graph.

    It maps `source_ids` (B, S) and `source_lengths` (B,) to `hidden` and the keys and values of
    each layer. Their values at padding are undefined.
    """
    graph, config = GraphBuilder("encoder", weights), model.config
    ids = graph.input("source_ids", INT64, ("batch", "source"))
    lengths = graph.input("source_lengths", INT32, ("batch",))
    x, size = embedded_source(graph, model, ids)  # (B, S, M)
    last = graph.add("Sub", lengths, graph.constant(1, np.int32))
    attention = CachedAttention(graph, config, last, graph.add("Cast", graph.add("Squeeze", size), to=INT32))
    for number, layer in enumerate(cast(Iterable[EncoderLayer], model.layers)):
        kept = attention.buffers(graph.output, "prompt_{}", number, "source")
        x = attention.add(f"layers.{number}", x, layer, present=kept)
        x = feed_forward(graph, f"layers.{number}", x, layer.feed_forward, layer.feed_forward_norm)
    hidden = graph.output("hidden", FLOAT, ("batch", "source", config.d_model))
    graph.add("Identity", layer_norm(graph, "last", x, model.norm), output=hidden)
    return graph.build()


def decoder_graph(model: CausalModel, weights: WeightFile) -> onnx.ModelProto:
    """Build the decoder graph, which runs one step; see `service.bundle.Graph`.

    Attention weights beyond the length of a row are undefined.
    """
    graph, config = GraphBuilder("step", weights), model.config
    token_ids = graph.input("token_ids", INT64, ("batch",))
    lengths = graph.input("lengths", INT32, ("batch",))
    x = embedded_tokens(graph, model, token_ids, lengths)  # (B, 1, M)
    total = graph.add("Add", lengths, graph.constant(1, np.int32))
    attention = CachedAttention(graph, config, lengths, graph.add("ReduceMax", total, keepdims=0))
    for number, layer in enumerate(cast(Iterable[EncoderLayer], model.layers)):
        past = attention.buffers(graph.input, "self_{}", number, "target")
        present = attention.buffers(graph.output, "self_{}_out", number, "target")
        x = attention.add(f"layers.{number}", x, layer, past, present)
        x = feed_forward(graph, f"layers.{number}", x, layer.feed_forward, layer.feed_forward_norm)
    attention.stack_maps("decoder_attention")
    features = graph.add("Squeeze", layer_norm(graph, "last", x, model.norm), graph.constant([1], np.int64))  # (B, M)
    scores(graph, features, model.embedding.weight)
    return graph.build()
