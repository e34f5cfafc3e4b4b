"""The decoder graph of a described model.

A decoder-only model has one graph for prefill and steps: `token_ids` (B, S), called with one token
for each of several rows, or with several tokens of one row. The decoder of an encoder-decoder reads
one token for each row, (B,).

By default, all attention uses `GroupQueryAttention`. Its cost depends on the length of each
sequence instead of the size of the cache, and it writes new keys and values into the cache in
place. Cross-attention is the same operator without new keys.
"""

import functools

import numpy as np
import onnx

from sightline.base.bundle import State
from sightline.export.families.description import Attention, Description, Stack
from sightline.export.families.weights import Weights
from sightline.export.graphs import operators
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.layers import LayerBuilder, attention_size, padded_heads
from sightline.export.graphs.nodes import FLOAT, INT32, INT64, KEY_VALUE, scores
from sightline.export.graphs.relative import relative_bias, relative_key_scores

HEAD_SIZE_STEP = 8  # ONNX Runtime needs a head size that is a multiple of this
ROTARY_SIZE_STEP = 16  # the same, with rotary embedding


def states(model: Description) -> tuple[State, ...]:
    """Describe the states of each decoder layer.

    The cache of self-attention grows. That of cross-attention and the cell of a recurrent unit keep
    their size.
    """
    stack = model.decoder
    made: list[State] = []
    for layer, attention in enumerate(stack.attention if stack else ()):
        if stack is not None and stack.cell == "ssru":
            made.append(State(input=f"cell.{layer}", output=f"cell_out.{layer}", init="zeros", shape=(1, stack.width)))
        for part in KEY_VALUE:
            if stack is not None and stack.cell == "attention":
                own, output = f"self_{part}.{layer}", f"self_{part}_out.{layer}"
                size = padded_size(attention)
                made.append(State(input=own, output=output, init="zeros", shape=(attention.kv_heads, "target", size)))
            if stack is not None and stack.cross is not None:
                name, size = f"cross_{part}.{layer}", attention_size(stack.cross, HEAD_SIZE_STEP)
                made.append(
                    State(input=name, init="encoder", encoder_output=name, shape=(stack.cross.kv_heads, "source", size))
                )
    return tuple(made)


def padded_size(attention: Attention) -> int:
    """Return the size of a head in the graph: the head size, rounded up for ONNX Runtime."""
    return attention_size(attention, _step(attention))


def _step(attention: Attention) -> int:
    return HEAD_SIZE_STEP if attention.rotary is None else ROTARY_SIZE_STEP


def decoder_graph(model: Description, weights: Weights, file: WeightFile) -> onnx.ModelProto:
    """Build the decoder graph, see `sightline.base.bundle.Graph`.

    Attention weights beyond the length of a row are undefined.
    """
    return _DecoderBuilder(model, model.decoder_stack, weights, file).build()


class _DecoderBuilder:
    """Builder of one decoder graph."""

    def __init__(self, model: Description, stack: Stack, weights: Weights, file: WeightFile) -> None:
        self._model = model
        self._stack = stack
        self._graph = graph = GraphBuilder("step", file)
        self._layers = LayerBuilder(graph, weights, "decoder", stack)
        self._maps: dict[str, list[str]] = {"decoder_attention": [], "cross_attention": []}
        axes = ("batch", "tokens") if model.is_decoder_only else ("batch",)
        self._ids = graph.input("token_ids", INT64, axes)
        lengths = graph.input("lengths", INT32, ("batch",))
        one = graph.constant(1, np.int32)
        if model.is_decoder_only:
            num_new = graph.add("Cast", graph.add("Squeeze", graph.add("Shape", self._ids, start=1)), to=INT32)  # ()
            offsets = graph.add("Range", graph.constant(0, np.int32), num_new, one)  # (S,)
            column = graph.add("Unsqueeze", lengths, graph.constant([1], np.int64))
            self._new_positions = graph.add("Add", column, offsets)  # (B, S)
            total = graph.add("Add", lengths, num_new)
            last = graph.add("Sub", total, one)
        else:
            self._new_positions = last = lengths  # (B,), of one token for each row
            total = graph.add("Add", lengths, one)
        # The last valid position of each row, and the number of positions of the longest row.
        self._self_columns = last, graph.add("ReduceMax", total, keepdims=0)
        self._bias = ""  # of self-attention, (B, H, S, K), which all layers share
        if stack.relative_bias is not None or stack.slopes is not None:
            bias = relative_bias(self._layers, *self._distances, model.max_positions)
            self._bias = graph.add("Transpose", bias, perm=[1, 0, 2, 3])
        if stack.cross is not None:
            source_lengths = graph.input("source_lengths", INT32, ("batch",))
            self._source_columns = (
                graph.add("Sub", source_lengths, one),
                graph.add("ReduceMax", source_lengths, keepdims=0),
            )

    def build(self) -> onnx.ModelProto:
        graph, stack, layers = self._graph, self._stack, self._layers
        x = layers.embed(self._ids, lambda table: graph.add("Gather", table, self._new_positions))
        if not self._model.is_decoder_only:
            x = graph.add("Unsqueeze", x, graph.constant([1], np.int64))  # (B, 1, M)
        for number, attention in enumerate(stack.attention):
            before, module = x, f"decoder.{number}.self_attention"
            normalized = layers.sublayer_input(x, module, number)
            if stack.cell == "ssru":
                x = layers.add_sublayer(x, self._recur(number, normalized), module)
            else:
                x = layers.add_sublayer(x, self._attend_self(number, attention, normalized), module)
            if stack.cross is not None:
                module = f"decoder.{number}.cross_attention"
                normalized = layers.sublayer_input(x, module)
                x = layers.add_sublayer(x, self._attend_source(number, stack.cross, normalized), module)
            x = layers.feed_forward(x, number, before)
        x = layers.finish(x)
        if stack.cell == "attention":
            self._stack_maps("decoder_attention", stack.attention[0].heads)
        if stack.cross is not None:
            self._stack_maps("cross_attention", stack.cross.heads)
        if self._model.is_decoder_only:
            graph.add("Identity", x, output=graph.output("hidden", FLOAT, ("batch", "tokens", stack.output_size)))
        x = graph.add("Gather", x, graph.constant(-1, np.int64), axis=1)  # (B, M)
        if self._model.is_decoder_only:  # only the last chunk of a prompt needs scores
            x = graph.add("Compress", x, graph.input("scored", onnx.TensorProto.BOOL, ("batch",)), axis=0)
        if self._model.logits_scale != 1.0:
            x = graph.add("Mul", x, graph.constant(self._model.logits_scale, np.float32))
        scores(graph, x, self._projection(), self._model.vocabulary, self._model.logits_softcap)
        return graph.build()

    @functools.cached_property
    def _positions(self) -> str:
        """Name of the positions of the new tokens, (B, S) int64."""
        positions = self._graph.add("Cast", self._new_positions, to=INT64)
        if self._model.is_decoder_only:
            return positions
        return self._graph.add("Unsqueeze", positions, self._graph.constant([1], np.int64))

    def _attend_self(self, number: int, attention: Attention, x: str) -> str:
        graph, module = self._graph, f"decoder.{number}.self_attention"
        modules = [f"{module}.{part}" for part in ("query", "key", "value")]
        qkv = self._layers.linear(x, *modules, arrays=self._layers.padded(modules, attention, _step(attention)))
        size, tables = padded_size(attention), list[str]()
        parts = [qkv] if attention.head_norm is None else self._layers.heads(module, attention, qkv, size)
        if attention.rotary is not None:
            tables = self._layers.rotary_tables(attention.rotary, self._model.max_positions, size)
        shape = ("batch", attention.kv_heads, "target", size)
        past = [graph.input(f"self_{part}.{number}", FLOAT, shape) for part in KEY_VALUE]
        present = [graph.output(f"self_{part}_out.{number}", FLOAT, shape) for part in KEY_VALUE]
        cache = operators.Cache(past[0], past[1], *self._self_columns, size)
        bias = self._bias
        if attention.relative_keys is not None:
            parts = operators.split_heads(graph, qkv, attention, size)
            table = self._layers.weights.read(f"{module}.relative_keys.weight")
            queries, keys = self._distances
            bias = relative_key_scores(graph, module, attention, table, parts[0], queries, keys)
        attended, attention_map = operators.self_attention(graph, attention, parts, cache, present, tables, bias)
        self._maps["decoder_attention"].append(attention_map)
        return self._output(module, attention, attended)

    def _attend_source(self, number: int, attention: Attention, x: str) -> str:
        graph, module = self._graph, f"decoder.{number}.cross_attention"
        name = f"{module}.query"
        query = self._layers.linear(x, name, arrays=self._layers.padded([name], attention, HEAD_SIZE_STEP))
        size = attention_size(attention, HEAD_SIZE_STEP)
        shape = ("batch", attention.kv_heads, "source", size)
        memory = [graph.input(f"cross_{part}.{number}", FLOAT, shape) for part in KEY_VALUE]
        cache = operators.Cache(memory[0], memory[1], *self._source_columns, size)
        attended, attention_map = operators.cross_attention(graph, attention, query, cache)
        self._maps["cross_attention"].append(attention_map)
        return self._output(module, attention, attended)

    @functools.cached_property
    def _distances(self) -> tuple[str, str]:
        """Names of the positions of the queries (B, S, 1) and of the keys (K,), int64.

        Shorter rows have queries before keys of longer rows, which the operator masks.
        """
        graph = self._graph
        longest = graph.add("Cast", self._self_columns[1], to=INT64)
        keys = graph.add("Range", graph.constant(0, np.int64), longest, graph.constant(1, np.int64))
        return graph.add("Unsqueeze", self._positions, graph.constant([-1], np.int64)), keys

    def _recur(self, number: int, x: str) -> str:
        """Add one step of a simpler simple recurrent unit (Kim et al. 2019, section 3.1).

        The new cell is `f * cell + (1 - f) * input(x)` with `f = sigmoid(forget(x))`, and the
        output is `relu(cell)`, (B, 1, M).
        """
        graph, module, shape = self._graph, f"decoder.{number}.cell", ("batch", 1, self._stack.width)
        keep = graph.add("Sigmoid", self._layers.linear(x, f"{module}.forget"))
        new = self._layers.linear(x, f"{module}.input")
        cell = graph.input(f"cell.{number}", FLOAT, shape)
        kept = graph.add("Mul", keep, graph.add("Sub", cell, new))
        output = graph.output(f"cell_out.{number}", FLOAT, shape)
        return graph.add("Relu", graph.add("Add", kept, new, output=output))

    def _output(self, module: str, attention: Attention, attended: str) -> str:
        name = f"{module}.output"
        weight, bias = self._layers.matrices(name)
        padded = padded_heads(weight.T, attention.heads, padded_size(attention), halves=False)
        return self._layers.linear(attended, name, arrays=(padded.T, bias))

    def _stack_maps(self, name: str, heads: int) -> None:
        """Add one output with the attention weights of all layers.

        Its shape is (B, H, L, columns), or (B, H, L, S, columns) for a decoder-only model. Binding
        one output costs less than binding one per layer.
        """
        graph, maps = self._graph, self._maps[name]
        shape: tuple[int | str, ...] = ("batch", heads, len(maps), f"longest_{name}")
        if self._model.is_decoder_only:
            axis = graph.constant([2], np.int64)
            maps = [graph.add("Unsqueeze", layer_map, axis) for layer_map in maps]
            shape = (*shape[:3], "tokens", shape[3])
        graph.output(name, FLOAT, shape)
        graph.add("Concat", *maps, output=name, axis=2)

    def _projection(self) -> list[str]:
        """Add the projection to the vocabulary: the matrix (V, M), and the bias if there is one."""
        graph, weights = self._graph, self._layers.weights
        if "output.weight" in weights:
            names = [graph.weight("output", weights.read("output.weight"))]
        else:
            names = [self._layers.embedding()]
        if "output.bias" in weights:
            names.append(graph.weight("output.bias", weights.read("output.bias")))
        return names
