"""Self-attention of the encoder as ONNX nodes, for each kind in `model.layers.transformer_layer`.

All kinds use `Attention` (opset 24), the fastest operator for sequences of different lengths. Axes:
B batch, S source, M width, H heads, k projected keys of a Linformer.
"""

from collections.abc import Sequence

import numpy as np

from export.builder import Axis, GraphBuilder
from export.nodes import FLOAT, token_mask
from export.parts import linear
from model.layers.attention import AttentionWithoutWeights
from model.layers.linformer import LinformerAttention, Projections
from model.layers.transformer_layer import SelfAttention

AFTER_SOFTMAX = 3  # value of `qk_matmul_output_mode`: return the attention weights


class EncoderAttention:
    """Builder of the attention of several layers, with the weights as graph outputs."""

    def __init__(self, graph: GraphBuilder, lengths: str, size: str, projections: Projections | None) -> None:
        """Create a builder.

        Args:
            graph: the graph to add nodes to.
            lengths: name of the source lengths (B,) int64.
            size: name of S, (1,) int64.
            projections: E and F of a Linformer; None for other models.
        """
        self._graph = graph
        self._lengths = lengths
        self._size = size
        self._projections = projections
        if projections is not None:
            _, self._is_token = token_mask(graph, lengths, graph.add("Squeeze", size))  # (B, S)

    def add(self, number: int, x: str, module: SelfAttention) -> str:
        """Add the attention of layer `number`, from x (B, S, M) to the same shape."""
        if isinstance(module, AttentionWithoutWeights):
            return self._attend(number, [x, x, x], module.num_heads)
        graph, name = self._graph, f"encoder.{number}.self_attention"
        parts = [graph.unique(part) for part in ("query", "key", "value")]
        qkv = linear(graph, f"{name}.qkv", x, module.query, module.key, module.value)
        graph.add_multi("Split", [qkv], parts, axis=-1, num_outputs=3)
        attend = self._attend_to_projected if isinstance(module, LinformerAttention) else self._attend
        return linear(graph, f"{name}.output", attend(number, parts, module.num_heads), module.output)

    def _attend(self, number: int, parts: Sequence[str], heads: int) -> str:
        """Attend with queries, keys and values (B, S, M); padding has weight 0."""
        shape = ("batch", heads, "source", "source")
        return self._attention([*parts, "", "", "", self._lengths], heads, f"encoder_attention.{number}", shape)

    def _attend_to_projected(self, number: int, parts: Sequence[str], heads: int) -> str:
        """Attend to projected keys and values, as `model.layers.linformer` does."""
        graph, projections = self._graph, self._projections
        assert projections is not None, "a Linformer has projections"
        query, key, value = parts
        key_matrix, value_matrix = (self._matrix(projections, index) for index in projections.matrix_indices(number))
        zero = graph.constant(0.0, np.float32)
        column = graph.add("Unsqueeze", self._is_token, graph.constant([2], np.int64))  # (B, S, 1)
        projected = [
            graph.add("MatMul", matrix, graph.add("Where", column, tokens, zero))  # (B, k, M)
            for matrix, tokens in ((key_matrix, key), (value_matrix, value))
        ]
        name = f"encoder_slots.{number}"
        attended = self._attention([query, *projected], heads, name, ("batch", heads, "source", projections.size))
        row = graph.add("Unsqueeze", self._is_token, graph.constant([1, 2], np.int64))  # (B, 1, 1, S)
        token_weights = graph.output(f"encoder_attention.{number}", FLOAT, ("batch", heads, "source", "source"))
        graph.add("Where", row, graph.add("MatMul", name, value_matrix), zero, output=token_weights)
        return attended

    def _attention(self, inputs: Sequence[str], heads: int, name: str, shape: Sequence[Axis]) -> str:
        """Add the operator, with its attention weights as an output of the graph."""
        graph = self._graph
        attended = graph.unique("attended")
        graph.add_multi(
            "Attention",
            inputs,
            [attended, "", "", graph.output(name, FLOAT, shape)],
            q_num_heads=heads,
            kv_num_heads=heads,
            qk_matmul_output_mode=AFTER_SOFTMAX,
        )
        return attended

    def _matrix(self, projections: Projections, index: int) -> str:
        """Add the first S columns of a projection, (k, S)."""
        graph = self._graph
        first, axis = graph.constant([0], np.int64), graph.constant([1], np.int64)
        whole = graph.weight(f"encoder.projection.{index}", projections.matrices[index])  # (k, n)
        return graph.add("Slice", whole, first, self._size, axis)
