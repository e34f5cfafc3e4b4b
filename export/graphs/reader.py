"""Nodes of a decoder that reads the source once more, as classifiers of BART do."""

import numpy as np

from sightline.export.families.description import Reader
from sightline.export.families.weights import Weights
from sightline.export.graphs import operators
from sightline.export.graphs.builder import GraphBuilder
from sightline.export.graphs.layers import LayerBuilder
from sightline.export.graphs.nodes import LOWEST


def read_again(
    graph: GraphBuilder,
    weights: Weights,
    reader: Reader,
    ids: str,
    is_token: str,
    positions: str,
    lengths: str,
    memory: str,
    size: str,
) -> str:
    """Add a decoder over the source, and return its hidden state (B, M) at the last end token.

    Args:
        ids: token ids of the source, (B, S) int64.
        is_token: False for padding, (B, S).
        positions: 0 to S - 1, (S,) int64.
        lengths: (B,) int64.
        memory: hidden states of the encoder, (B, S, M).
        size: S, (1,) int64.
    """
    stack, zero, axis = reader.stack, graph.constant(0, np.int64), graph.constant([1], np.int64)
    assert stack.cross is not None, "the decoder has cross-attention"
    layers = LayerBuilder(graph, weights, "decoder", stack)
    # The start token takes the place of the last token, (B, S). A negative pad truncates.
    shifted = graph.add("Pad", ids, graph.constant([1, -1], np.int64), graph.constant(reader.start_id, np.int64), axis)
    x = layers.embed_text(shifted, size)
    is_later = graph.add("Greater", positions, graph.add("Unsqueeze", positions, axis))  # (S, S)
    causal = graph.add("Where", is_later, graph.constant(LOWEST, np.float32), graph.constant(0.0, np.float32))
    causal = graph.add("Unsqueeze", causal, graph.constant([0, 1], np.int64))  # (1, 1, S, S)
    for number, attention in enumerate(stack.attention):
        before, module = x, f"decoder.{number}.self_attention"
        inputs = layers.sublayer_input(x, module, number)
        qkv = layers.linear(inputs, *(f"{module}.{part}" for part in ("query", "key", "value")))
        parts = operators.split_heads(graph, qkv, attention, attention.head_size)
        attended = operators.attention(graph, attention, parts, graph.unique("map"), lengths, causal)
        x = layers.add_sublayer(x, layers.linear(attended, f"{module}.output"), module)
        module = f"decoder.{number}.cross_attention"
        query = layers.linear(layers.sublayer_input(x, module), f"{module}.query")
        parts = [query, *(layers.linear(memory, f"{module}.{part}") for part in ("key", "value"))]
        attended = operators.attention(graph, stack.cross, parts, graph.unique("map"), lengths)
        x = layers.add_sublayer(x, layers.linear(attended, f"{module}.output"), module)
        x = layers.feed_forward(x, number, before)
    x = layers.finish(x)
    is_end = graph.add("And", graph.add("Equal", ids, graph.constant(reader.end_id, np.int64)), is_token)
    last = graph.add("ReduceMax", graph.add("Where", is_end, positions, zero), axis)  # (B, 1)
    return graph.add("GatherND", x, last, batch_dims=1)
