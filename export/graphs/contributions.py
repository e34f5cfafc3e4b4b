"""The graph of contributions: how much each token adds to the vectors of the others.

One pass over a source and over the inputs of the decoder measures the attention of each layer by
three methods. `docs/explanation/contributions.md` has their equations.

Axes: N tokens of the source or inputs of the decoder, K tokens that they attend to, Z tokens whose
values are zeroed, M width, H heads, D width of a head, L layers.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from sightline.base.errors import UsageError
from sightline.export.families.description import Attention, Description, Stack
from sightline.export.families.weights import Weights
from sightline.export.graphs import operators
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.encoder_graph import SelfAttentionBuilder, attend_memory
from sightline.export.graphs.layers import LayerBuilder
from sightline.export.graphs.nodes import FLOAT, INT64

Measures = defaultdict[str, list[str]]  # of each layer, by the name of the output


def contributions_graph(model: Description | None, weights: Weights | None, file: WeightFile) -> onnx.ModelProto:
    """Build the graph, see `sightline.base.bundle.Graph`. Raises `UsageError` for other models."""
    stacks = [] if model is None else [stack for stack in (model.encoder, model.decoder) if stack is not None]
    rotations = {options.rotary for stack in stacks for options in stack.attention}  # one table for both stacks
    if model is None or weights is None or len(stacks) < 2 or len(rotations) > 1 or not all(map(_is_usual, stacks)):
        raise UsageError(
            "--contributions is only for Transformers with an encoder and a decoder, residual connections, keys and "
            "values of single tokens, and the same positions in both; leave it out"
        )
    graph, measures = GraphBuilder("contributions", file), Measures(list)
    zeroed = graph.input("zeroed_tokens", INT64, (1,))
    memory = ""
    for name, text, stack in zip(("encoder", "decoder"), ("source", "target"), stacks, strict=True):
        layers = LayerBuilder(graph, weights, name, stack)
        ids = graph.input(f"{text}_ids", INT64, (1, text))
        memory = _TextBuilder(layers, model.max_positions, ids, memory, zeroed, measures).add()
    for name, of_layers in measures.items():
        axes = ("heads", "rows", "columns") if name.startswith("norms") else ("columns", "rows")
        graph.output(name, FLOAT, (len(of_layers), *(f"{axis}.{name}" for axis in axes)))
        graph.add("Concat", *of_layers, output=name, axis=0)
    return graph.build()


def _is_usual(stack: Stack) -> bool:
    has_values = all(each.has_projections and each.projected_keys is None for each in stack.attention)
    return has_values and stack.cell == "attention" and stack.has_residual


@dataclass(frozen=True)
class _Attended:
    """Attention of all tokens of a text, before it is added to them."""

    kind: str  # of its maps
    module: str
    options: Attention
    tokens: str  # vectors that are attended to, (1, K, M)
    weights: str  # (1, H, N, K)
    result: str  # (1, N, M)


class _TextBuilder:
    """Adds a stack over all tokens of a text, with the measures of its attention."""

    def __init__(
        self, layers: LayerBuilder, max_positions: int, ids: str, memory: str, zeroed: str, measures: Measures
    ) -> None:
        """Create a builder for `ids` (1, N), which appends to `measures`.

        `memory` are the hidden states (1, S, M) that a decoder attends to. The values of the first
        `zeroed` (1,) tokens are zeroed, one after another.
        """
        self._layers, self._graph, self._stack, self._ids = layers, layers.graph, layers.stack, ids
        self._memory, self._zeroed, self._measures = memory, zeroed, measures
        self._size = self._graph.add("Shape", ids, start=1)
        self._self_attention = SelfAttentionBuilder(layers, max_positions, self._size, self._size)
        self._last = self._graph.constant([-1], np.int64)  # axis

    def add(self) -> str:
        """Add all layers, and return their hidden states (1, N, M)."""
        layers, cross = self._layers, self._stack.cross
        x = layers.embed_text(self._ids, self._size)
        for number, options in enumerate(self._stack.attention):
            module = f"{layers.name}.{number}.self_attention"
            tokens = layers.sublayer_input(x, module, number)
            weights = self._graph.unique("weights")
            result = self._self_attention.add(number, options, tokens, weights)
            attended = _Attended(layers.name, module, options, tokens, weights, result)
            x, finished = self._measure(attended, x, partial(self._finish, number, cross))
            if cross is not None:
                _, finished = self._measure(self._attend(number, cross, x), x, partial(self._finish, number, None))
            x = finished
        return layers.finish(x)

    def _finish(self, number: int, cross: Attention | None, x: str) -> str:
        """Add the rest of a layer to the output x of attention: `cross`, and feed-forward."""
        if cross is not None:
            attended = self._attend(number, cross, x)
            x = self._layers.add_sublayer(x, attended.result, attended.module)
        return self._layers.feed_forward(x, number, x)

    def _attend(self, number: int, options: Attention, x: str) -> _Attended:
        """Add cross-attention of x (1, N, M)."""
        weights = self._graph.unique("weights")
        result = attend_memory(self._layers, number, options, x, weights, self._memory)
        return _Attended("cross", f"decoder.{number}.cross_attention", options, self._memory, weights, result)

    def _measure(self, attended: _Attended, x: str, finish: Callable[[str], str]) -> tuple[str, str]:
        """Add the measures of attention that is added to x (1, N, M).

        Return the outputs (1, N, M) of the sublayer, and of the layer, whose rest `finish` adds.
        """
        graph, layers, last, module = self._graph, self._layers, self._last, attended.module
        heads, axis = attended.options.heads, graph.constant([1], np.int64)
        # f(x) of each head: its values, multiplied by its part of the output matrix.
        values = operators.by_head(graph, layers.linear(attended.tokens, f"{module}.value"), heads)
        matrix = layers.weights.read(f"{module}.output.weight").T.reshape(heads, attended.options.head_size, -1)
        matrices = graph.weight(f"{module}.output.heads", np.ascontiguousarray(matrix))  # (H, D, M)
        vectors = graph.add("MatMul", values, matrices)  # (1, H, K, M)
        lengths = graph.add("Transpose", graph.add("ReduceL2", vectors, last), perm=[0, 1, 3, 2])
        self._measures[f"norms.{attended.kind}"].append(graph.add("Mul", attended.weights, lengths))

        # The part of each token in the result, over all heads: (1, K, N, H) times (1, K, H, M).
        by_token = graph.add("Transpose", attended.weights, perm=[0, 3, 2, 1])
        parts = graph.add("MatMul", by_token, graph.add("Transpose", vectors, perm=[0, 2, 1, 3]))
        output = layers.add_sublayer(x, attended.result, module)
        finished = finish(output)
        first = graph.constant([0], np.int64)
        zeroed = graph.add("Sub", attended.result, graph.add("Slice", parts, first, self._zeroed, axis))
        zeroed = layers.add_sublayer(x, zeroed, module)  # (1, Z, N, M)
        row = graph.add("Reshape", zeroed, graph.constant([1, -1, self._stack.width], np.int64))
        changed = graph.add("Reshape", finish(row), graph.add("Shape", zeroed))
        units = [graph.add("LpNormalization", vector, axis=-1, p=2) for vector in (changed, finished)]
        # The cosine distance is half the squared distance of the unit vectors.
        distances = graph.add("ReduceSumSquare", graph.add("Sub", *units), last, keepdims=0)
        self._measures[f"value_zeroing.{attended.kind}"].append(distances)

        own = graph.add("Unsqueeze", x, axis)  # (1, 1, N, M)
        if attended.kind == "cross":
            parts = graph.add("Concat", parts, own, axis=1)
        else:
            positions = self._self_attention.positions
            is_own = graph.add("Equal", graph.add("Unsqueeze", positions, axis), positions)
            is_own = graph.add("Unsqueeze", is_own, last)  # (N, N, 1)
            parts = graph.add("Where", is_own, graph.add("Add", parts, own), parts)
        if self._stack.norm_place == "post":
            parts = self._normalized(parts, graph.add("Add", x, attended.result), f"{module}_norm.weight")
        far = graph.add("ReduceL1", graph.add("Sub", output, parts), last, keepdims=0)
        near = graph.add("Relu", graph.add("Sub", graph.add("ReduceL1", output, last, keepdims=0), far))
        self._measures[f"alti.{attended.kind}"].append(near)
        return output, finished

    def _normalized(self, parts: str, total: str, weight: str) -> str:
        """Add LayerNorm, without its bias, of parts (1, K, N, M) of a total (1, N, M)."""
        graph, scale = self._graph, self._graph.weight(weight, self._layers.weights.read(weight))
        deviation = graph.unique("inverse_deviation")
        norm = self._stack.norm
        graph.add_multi(
            "LayerNormalization", [total, scale], [graph.unique("normalized"), "", deviation], epsilon=norm.epsilon
        )
        centred = graph.add("Sub", parts, graph.add("ReduceMean", parts, self._last))
        return graph.add("Mul", graph.add("Mul", centred, scale), deviation)
