"""The graph of contributions: how much each token adds to the vectors of the others.

One pass over a source and over the inputs of the decoder measures the attention of each layer by
three methods. `docs/explanation/contributions.md` has their equations.

Axes: N tokens of the source or inputs of the decoder, K tokens that they attend to, Z tokens whose
values are zeroed, M width, H heads, D width of a head, L layers.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx

from sightline.base.errors import UsageError
from sightline.export.families.description import Description, Stack
from sightline.export.families.weights import Weights
from sightline.export.graphs import operators
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.encoder_graph import Attended, SelfAttentionBuilder, add_stack, attend_memory
from sightline.export.graphs.layers import LayerBuilder
from sightline.export.graphs.nodes import FLOAT, INT64

Measures = defaultdict[str, list[str]]  # of each layer, by the name of the output


def contributions_graph(model: Description | None, weights: Weights | None, file: WeightFile) -> onnx.ModelProto:
    """Build the graph, see `sightline.base.bundle.Graph`. Raises `UsageError` for other models."""
    stacks = [] if model is None else [stack for stack in (model.encoder, model.decoder) if stack is not None]
    rotations = {options.rotary for stack in stacks for options in stack.attention}  # one table for both stacks
    if model is None or weights is None or len(stacks) < 2 or len(rotations) > 1 or not all(map(_is_usual, stacks)):
        raise UsageError(
            "--contributions is only for Transformers with self-attention in encoder and decoder, residual "
            "connections, keys and values of single tokens, and the same positions in both; leave it out"
        )
    graph, measures = GraphBuilder("contributions", file), Measures(list)
    zeroed = graph.input("zeroed_tokens", INT64, (1,))
    memory: tuple[str, str] | None = None
    for name, text, stack in zip(("encoder", "decoder"), ("source", "target"), stacks, strict=True):
        layers, ids = LayerBuilder(graph, weights, name, stack), graph.input(f"{text}_ids", INT64, (1, text))
        size = graph.add("Shape", ids, start=1)
        attend = SelfAttentionBuilder(layers, model.max_positions, size, size)
        memory = add_stack(attend, ids, memory, _MeasureBuilder(attend, memory, zeroed, measures).add), ""
    for name, of_layers in measures.items():
        axes = ("heads", "rows", "columns") if name.startswith("norms") else ("columns", "rows")
        graph.output(name, FLOAT, (len(of_layers), *(f"{axis}.{name}" for axis in axes)))
        graph.add("Concat", *of_layers, output=name, axis=0)
    return graph.build()


def _is_usual(stack: Stack) -> bool:
    has_values = all(each.has_projections and each.projected_keys is None for each in stack.attention)
    return has_values and stack.cell == "attention" and stack.has_residual


@dataclass(frozen=True)
class _MeasureBuilder:
    """Adds the measures of the attention of one stack to those of others."""

    attend: SelfAttentionBuilder
    memory: tuple[str, str] | None  # that a decoder attends to, see `add_stack`
    zeroed: str  # number of the first tokens whose values are zeroed, one after another, (1,)
    measures: Measures

    def add(self, number: int, attended: Attended, finished: str) -> None:
        """Add the measures of attention in a layer with the output `finished` (1, N, M)."""
        layers, graph, module = self.attend.layers, self.attend.layers.graph, attended.module
        heads, size, width = attended.options.heads, attended.options.head_size, layers.stack.width
        kind = "cross" if module.endswith("cross_attention") else layers.name
        first, axis, last = (graph.constant([index], np.int64) for index in (0, 1, -1))
        # f(x) of each head: its values, multiplied by its part of the output matrix.
        values = operators.by_head(graph, layers.linear(attended.tokens, f"{module}.value"), heads)
        matrix = layers.weights.read(f"{module}.output.weight").T.reshape(heads, size, width)
        matrices = graph.weight(f"{module}.output.heads", np.ascontiguousarray(matrix))  # (H, D, M)
        vectors = graph.add("MatMul", values, matrices)  # (1, H, K, M)
        lengths = graph.add("Transpose", graph.add("ReduceL2", vectors, last), perm=[0, 1, 3, 2])
        self.measures[f"norms.{kind}"].append(graph.add("Mul", attended.weights, lengths))

        # The part of each token in the result, over all heads: (1, K, N, H) times (1, K, H, M).
        by_token = graph.add("Transpose", attended.weights, perm=[0, 3, 2, 1])
        parts = graph.add("MatMul", by_token, graph.add("Transpose", vectors, perm=[0, 2, 1, 3]))
        zeroed = graph.add("Sub", attended.result, graph.add("Slice", parts, first, self.zeroed, axis))
        zeroed = layers.add_sublayer(attended.x, zeroed, module)  # (1, Z, N, M)
        x = graph.add("Reshape", zeroed, graph.constant([1, -1, width], np.int64))
        if self.memory is not None and kind != "cross":
            x = attend_memory(layers, number, x, *self.memory).output
        changed = graph.add("Reshape", layers.feed_forward(x, number, x), graph.add("Shape", zeroed))
        units = [graph.add("LpNormalization", vector, axis=-1, p=2) for vector in (changed, finished)]
        # The cosine distance is half the squared distance of the unit vectors.
        distances = graph.add("ReduceSumSquare", graph.add("Sub", *units), last, keepdims=0)
        self.measures[f"value_zeroing.{kind}"].append(distances)

        own = graph.add("Unsqueeze", attended.x, axis)  # (1, 1, N, M)
        if kind == "cross":
            parts = graph.add("Concat", parts, own, axis=1)
        else:
            positions = self.attend.positions
            is_own = graph.add("Equal", graph.add("Unsqueeze", positions, axis), positions)
            is_own = graph.add("Unsqueeze", is_own, last)  # (N, N, 1)
            parts = graph.add("Where", is_own, graph.add("Add", parts, own), parts)
        if layers.stack.norm_place == "post":  # LayerNorm without its bias
            total, name = graph.add("Add", attended.x, attended.result), f"{module}_norm.weight"
            scale, outputs = graph.weight(name, layers.weights.read(name)), [graph.unique("normalized"), ""]
            deviation = graph.unique("inverse_deviation")
            graph.add_multi(
                "LayerNormalization", [total, scale], [*outputs, deviation], epsilon=layers.stack.norm.epsilon
            )
            centred = graph.add("Sub", parts, graph.add("ReduceMean", parts, last))
            parts = graph.add("Mul", graph.add("Mul", centred, scale), deviation)
        far = graph.add("ReduceL1", graph.add("Sub", attended.output, parts), last, keepdims=0)
        near = graph.add("Relu", graph.add("Sub", graph.add("ReduceL1", attended.output, last, keepdims=0), far))
        self.measures[f"alti.{kind}"].append(near)
