"""The encoder graph of a described model."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from sightline.base.bundle import LABEL_LOGITS, LABEL_OUTPUTS, is_entailment
from sightline.export.families.description import Attention, Description, Head, ProjectedKeys, Rotary, Stack
from sightline.export.families.weights import Weights
from sightline.export.graphs import operators
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.decoder import HEAD_SIZE_STEP
from sightline.export.graphs.disentangled import PositionScores, convolution
from sightline.export.graphs.layers import LayerBuilder, activation, attention_size
from sightline.export.graphs.nodes import (
    FLOAT,
    INT32,
    INT64,
    KEY_VALUE,
    LOWEST,
    token_mask,
    weighted_sum,
    whole_blocks,
    with_positions,
)
from sightline.export.graphs.relative import relative_bias, relative_key_scores


def encoder_graph(model: Description, weights: Weights, file: WeightFile) -> onnx.ModelProto:
    """Build the encoder graph, see `sightline.base.bundle.Graph`.

    Queries at padding have undefined attention weights, hidden states, keys and values.
    """
    stack = model.encoder_stack
    graph = GraphBuilder("encoder", file)
    ids = graph.input("source_ids", INT64, ("batch", "source"))
    lengths = graph.add("Cast", graph.input("source_lengths", INT32, ("batch",)), to=INT64)
    size = graph.add("Shape", ids, start=1)  # (1,)
    layers = LayerBuilder(graph, weights, "encoder", stack)
    attend = SelfAttentionBuilder(layers, model.max_positions, size, lengths)
    x = add_stack(attend, ids)
    graph.add("Identity", x, output=graph.output("hidden", FLOAT, ("batch", "source", stack.output_size)))
    if model.decoder is not None and model.decoder.cross is not None:
        _project_cross_attention(layers, model.decoder, model.decoder.cross, x)
    if model.head is not None:
        if model.reader is not None:
            reader = LayerBuilder(graph, weights, "decoder", model.reader.stack)
            # The start token takes the place of the last token, (B, S). A negative pad truncates.
            start, shift = graph.constant(model.reader.start_id, np.int64), graph.constant([1, -1], np.int64)
            shifted = graph.add("Pad", ids, shift, start, graph.constant([1], np.int64))
            x = add_stack(SelfAttentionBuilder(reader, model.max_positions, size, lengths), shifted, (x, lengths))
            is_end = graph.add("Equal", ids, graph.constant(model.reader.end_id, np.int64))
            x = _last(graph, x, attend.positions, graph.add("And", is_end, attend.is_token))
        _labels(layers, model.head, model.labels, x, ids, lengths, size)
    return graph.build()


@dataclass(frozen=True)
class Attended:
    """Attention of a layer over whole texts, and the sublayer that it belongs to."""

    module: str
    options: Attention
    tokens: str  # vectors that are attended to, (B, K, M)
    weights: str  # (B, H, S, K)
    result: str  # (B, S, M)
    x: str  # vectors that the result is added to, (B, S, M)
    output: str  # (B, S, M)


def add_stack(
    attend: "SelfAttentionBuilder",
    ids: str,
    memory: tuple[str, str] | None = None,
    measure: Callable[[int, Attended, str], None] | None = None,
) -> str:
    """Add all layers over texts (B, S) of token ids, and return their hidden states (B, S, M).

    A decoder attends to a `memory`, the hidden states (B, K, M) and the lengths (B,) of texts.
    `measure` gets each attention with the number and the output (B, S, M) of its layer.
    """
    layers, stack = attend.layers, attend.layers.stack
    x = embedded = layers.embed_text(ids, attend.size)
    for number, options in enumerate(stack.attention):
        module = f"{layers.name}.{number}.self_attention"
        weights = "" if memory is None and measure is None else layers.graph.unique("weights")
        tokens = layers.sublayer_input(x, module, number)
        result = attend.add(number, options, tokens, weights)
        attended = [Attended(module, options, tokens, weights, result, x, layers.add_sublayer(x, result, module))]
        if memory is not None:
            attended.append(attend_memory(layers, number, attended[0].output, *memory))
        x = layers.feed_forward(attended[-1].output, number, x)
        if number == 0 and stack.convolution is not None:
            x = convolution(layers, stack.convolution, embedded, x, attend.is_token)
        if measure is not None:
            for each in attended:
                measure(number, each, x)
    return layers.finish(x)


def attend_memory(layers: LayerBuilder, number: int, x: str, memory: str, lengths: str) -> Attended:
    """Add the cross-attention of a layer from x (B, S, M) to hidden states `memory` (B, K, M).

    See `operators.attention` for `lengths`.
    """
    module, weights = f"{layers.name}.{number}.cross_attention", layers.graph.unique("weights")
    options = layers.stack.cross
    assert options is not None, "the stack has cross-attention"
    query = layers.linear(layers.sublayer_input(x, module), f"{module}.query")
    parts = [query, *(layers.linear(memory, f"{module}.{part}") for part in KEY_VALUE)]
    result = layers.linear(operators.attention(layers.graph, options, parts, weights, lengths), f"{module}.output")
    return Attended(module, options, memory, weights, result, x, layers.add_sublayer(x, result, module))


@dataclass(frozen=True)
class SelfAttentionBuilder:
    """Builder of the self-attention of all layers over whole texts. Shared nodes are added once.

    All kinds use `Attention` (opset 24), the fastest operator for sequences of different lengths.
    """

    layers: LayerBuilder
    max_positions: int
    size: str  # S, (1,) int64
    lengths: str  # (B,) int64

    def add(self, number: int, attention: Attention, x: str, weights: str = "") -> str:
        """Add a layer's attention to x, both (B, S, M).

        `weights` is the name of its weights; without it, they are an output of the graph.
        """
        layers, graph, position_scores = self.layers, self.layers.graph, self._position_scores
        module, parts = f"{layers.name}.{number}.self_attention", [x, x, x]
        if attention.has_projections:  # as one product
            qkv = layers.linear(x, *(f"{module}.{part}" for part in ("query", "key", "value")))
            parts = layers.heads(module, attention, qkv, attention.head_size)
        if attention.rotary is not None:
            parts[0] = self._rotate(parts[0], attention.heads, attention.rotary)
            parts[1] = self._rotate(parts[1], attention.kv_heads, attention.rotary)
        if attention.projected_keys is None:
            attention_map = weights or self._attention_map(number, attention)
            bias = graph.once(f"{layers.name} bias {attention.window}", partial(self._bias, attention.window))
            if position_scores is not None:
                bias = position_scores.add(module, attention, parts[0], parts[1])
            if attention.relative_keys is not None:
                table = layers.weights.read(f"{module}.relative_keys.weight")
                column = graph.add_once("Unsqueeze", self.positions, graph.constant([1], np.int64))
                scores = relative_key_scores(graph, module, attention, table, parts[0], column, self.positions)
                bias = graph.add("Add", bias, scores) if bias else scores
            attended = operators.attention(graph, attention, parts, attention_map, self.lengths, bias)
        else:
            attended = self._attend_to_projected_keys(number, attention, attention.projected_keys, parts)
        return layers.linear(attended, f"{module}.output") if attention.has_projections else attended

    def _attention_map(self, number: int, attention: Attention) -> str:
        """Declare the attention weights of a layer as an output."""
        shape = ("batch", attention.heads, "source", "source")
        return self.layers.graph.output(f"encoder_attention.{number}", FLOAT, shape)

    def _attend_to_projected_keys(
        self, number: int, attention: Attention, options: ProjectedKeys, parts: Sequence[str]
    ) -> str:
        """Add attention to projected keys and values, with two kinds of weights as graph outputs.

        `encoder_slots.N` has the weights of the projected keys. `encoder_attention.N` has these
        weights times the matrix of the values: the factor of the value of each token.
        """
        assert attention.window is None and self.layers.stack.relative_bias is None, "projected keys have no distance"
        graph, zero = self.layers.graph, self.layers.graph.constant(0.0, np.float32)
        query, *tokens = parts
        is_own = graph.add("Unsqueeze", self.is_token, graph.constant([2], np.int64))  # (B, S, 1)
        matrices = [
            graph.once(f"matrix {index}", partial(self._matrix, index)) for index in (options.key, options.value)
        ]
        projected = [
            graph.add("MatMul", matrix, graph.add("Where", is_own, part, zero))  # (B, k, KV * D)
            for matrix, part in zip(matrices, tokens, strict=True)
        ]
        shape = ("batch", attention.heads, "source", options.size)
        weights = graph.output(f"encoder_slots.{number}", FLOAT, shape)
        attended = operators.attention(graph, attention, [query, *projected], weights)
        columns = graph.add("Unsqueeze", self.is_token, graph.constant([1, 2], np.int64))  # (B, 1, 1, S)
        by_token = graph.add("MatMul", weights, matrices[1])
        graph.add("Where", columns, by_token, zero, output=self._attention_map(number, attention))
        return attended

    @functools.cached_property
    def _position_scores(self) -> PositionScores | None:
        options = self.layers.stack.disentangled
        if options is None:
            return None
        return PositionScores(self.layers, options, self.max_positions, self.size, self.positions)

    @functools.cached_property
    def positions(self) -> str:
        """Name of the positions (S,) int64."""
        begin, step = self.layers.graph.constant(0, np.int64), self.layers.graph.constant(1, np.int64)
        return self.layers.graph.add("Range", begin, self.layers.graph.add("Squeeze", self.size), step)

    @functools.cached_property
    def is_token(self) -> str:
        """Name of the mask (B, S), True for tokens and False for padding."""
        column = self.layers.graph.add("Unsqueeze", self.lengths, self.layers.graph.constant([1], np.int64))
        return self.layers.graph.add("Less", self.positions, column)

    def _matrix(self, number: int) -> str:
        """Add the first S columns of the matrix (k, P) of projected keys or values."""
        graph, name = self.layers.graph, f"encoder.projection.{number}.weight"
        first, axis = graph.constant([0], np.int64), graph.constant([1], np.int64)
        whole = graph.weight(name, self.layers.weights.read(name))
        return graph.add("Slice", whole, first, self.size, axis)

    def _rotate(self, x: str, heads: int, rotary: Rotary) -> str:
        """Add rotary position embedding of queries or keys (B, S, heads * D)."""
        graph = self.layers.graph
        positions = graph.once(f"{self.layers.name} positions", lambda: self._batch_positions(x))
        size = self.layers.stack.attention[0].head_size
        tables = self.layers.rotary_tables(rotary, self.max_positions, size)
        return graph.add("RotaryEmbedding", x, *tables, positions, num_heads=heads)

    def _batch_positions(self, x: str) -> str:
        """Add the positions (B, S) of x (B, S, any)."""
        shape = self.layers.graph.add("Shape", x, start=0, end=2)
        return self.layers.graph.add("Expand", self.positions, shape)

    def _bias(self, window: int | None) -> str:
        """Add the bias of scores for relative positions and a window; "" if there is none.

        Its shape is (1, H, S, S), or (1, 1, S, S) if it is the same for all heads.
        """
        graph, stack = self.layers.graph, self.layers.stack
        is_causal = stack.is_causal or self.layers.name == "decoder"
        is_relative = stack.relative_bias is not None or stack.slopes is not None
        if window is None and not is_relative and not is_causal:
            return ""
        column = graph.add("Unsqueeze", self.positions, graph.constant([1], np.int64))  # (S, 1)
        bias = ""
        if is_relative:
            by_head = relative_bias(self.layers, column, self.positions, self.max_positions)  # (H, S, S)
            bias = graph.add("Unsqueeze", by_head, graph.constant([0], np.int64))
        if window is not None or is_causal:
            # Finite, because a query at padding may have no visible key: its hidden state must not
            # become NaN, which would spread to tokens as 0 * NaN.
            distance = graph.add("Sub", self.positions, column)  # of a key after its query, (S, S)
            if is_causal:
                outside = graph.add("Greater", distance, graph.constant(0, np.int64))
                if window is not None:
                    before = graph.add("LessOrEqual", distance, graph.constant(-window, np.int64))
                    outside = graph.add("Or", outside, before)
            else:
                assert window is not None, "there is a window"
                outside = graph.add("Greater", graph.add("Abs", distance), graph.constant(window // 2, np.int64))
            masked, zero = graph.constant(LOWEST, np.float32), graph.constant(0.0, np.float32)
            local = graph.add("Where", outside, masked, zero)
            local = graph.add("Unsqueeze", local, graph.constant([0, 1], np.int64))  # (1, 1, S, S)
            bias = graph.add("Add", bias, local) if bias else local
        return bias


def _project_cross_attention(layers: LayerBuilder, decoder: Stack, cross: Attention, memory: str) -> None:
    """Add all cross-attention keys and values with one product over `memory` (B, S, M)."""
    graph = layers.graph
    names = [f"cross_{part}.{layer}" for layer in range(decoder.layers) for part in KEY_VALUE]
    modules = [f"decoder.{layer}.cross_attention.{part}" for layer in range(decoder.layers) for part in KEY_VALUE]
    size = attention_size(cross, HEAD_SIZE_STEP)
    arrays = layers.padded(modules, cross, HEAD_SIZE_STEP)
    projected = layers.linear(memory, "decoder.cross_attention.keys_values", arrays=arrays)  # (B, S, 2L * KV * D)
    split = graph.constant([0, 0, len(names) * cross.kv_heads, size], np.int64)
    by_head = graph.add("Transpose", graph.add("Reshape", projected, split), perm=[0, 2, 1, 3])
    for name in names:
        graph.output(name, FLOAT, ("batch", cross.kv_heads, "source", size))
    graph.add_multi("Split", [by_head], names, axis=1, num_outputs=len(names))


def _labels(layers: LayerBuilder, head: Head, labels: Sequence[str], x: str, ids: str, lengths: str, size: str) -> None:
    """Add the outputs with the scores of labels."""
    graph = layers.graph
    if head.pooling == "first":
        x = graph.add("Gather", x, graph.constant(0, np.int64), axis=1)  # (B, M)
    elif head.pooling == "mean":
        x = mean_pool(graph, x, lengths, size)
    elif head.pooling == "last":
        positions, is_kept = token_mask(graph, lengths, graph.add("Squeeze", size))
        if head.padding is not None:
            is_padding = graph.add("Equal", ids, graph.constant(head.padding, np.int64))
            is_kept = graph.add("And", is_kept, graph.add("Not", is_padding))
        x = _last(graph, x, positions, is_kept)
    if head.activation is not None:
        x = activation(graph, layers.linear(x, "head.dense"), head.activation)
    if head.has_norm:
        x = layers.norm(x, "head.norm")
    logits = layers.linear(x, "head.output")
    axes = ("batch", "source") if head.pooling == "tokens" else ("batch",)
    output = graph.output(LABEL_OUTPUTS[head.label_kind], FLOAT, (*axes, len(labels)))
    if head.label_kind == "classes" and any(map(is_entailment, labels)):  # for zero-shot classification
        graph.add("Identity", logits, output=graph.output(LABEL_LOGITS, FLOAT, ("batch", len(labels))))
    if head.label_kind in ("classes", "tokens"):
        graph.add("LogSoftmax", logits, output=output, axis=-1)
    else:
        graph.add("Identity", logits, output=output)


def _last(graph: GraphBuilder, hidden: str, positions: str, is_kept: str) -> str:
    """Add the hidden state (B, M) at the last of the positions (S,) that are kept, (B, S)."""
    last_axis = graph.constant([1], np.int64)
    kept = graph.add("Where", is_kept, positions, graph.constant(0, np.int64))
    last = graph.add("ReduceMax", kept, last_axis)  # (B, 1)
    return graph.add("GatherND", hidden, last, batch_dims=1)


def mean_pool(graph: GraphBuilder, hidden: str, lengths: str, size: str) -> str:
    """Add the mean (B, M) of hidden states (B, S, M) over the tokens of each row."""
    size = whole_blocks(graph, graph.add("Squeeze", size))
    _, is_token = token_mask(graph, lengths, size)
    total = weighted_sum(graph, graph.add("Cast", is_token, to=FLOAT), with_positions(graph, hidden, size), is_token)
    column = graph.add("Unsqueeze", lengths, graph.constant([1], np.int64))  # (B, 1)
    return graph.add("Div", total, graph.add("Cast", column, to=FLOAT))
