"""Conversion of graphs to float16 with operators of ONNX Runtime's CUDA provider.

`Attention` and `GroupQueryAttention` become matrix products and softmax, because on CUDA neither
operator returns its attention weights. They attend to the whole cache, so that the shapes of a step
depend only on the batch size and the CPU never waits for a length. `ScatterElements` writes the
cache; it copies nothing if input and output are the same memory.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from sightline.export.convert.products import attributes_of
from sightline.export.graphs.builder import WeightFile, rewritten_tensor

# The oldest version with all operators. The CUDA provider lacks kernels of newer versions and would
# use the CPU.
OPSET = 18
SCORES = ("logits", "logprobs", "top_logprobs")  # stay float32, so that close candidates do not become equal

Array = NDArray[Any]


def half_graphs(models: Sequence[onnx.ModelProto], folder: Path, weights: WeightFile) -> list[onnx.ModelProto]:
    """Convert weights, states, attention weights and activations of graphs to float16.

    The float32 graphs have external weights in `folder`, as `GraphBuilder` builds them. Raises
    `ValueError` if a weight is too large, or an option of the attention has no conversion.
    """
    return [_HalfConverter(model, folder, weights).build() for model in models]


def rows_graph() -> onnx.ModelProto:
    """Build the graph that copies states between rows, see `Manifest.rows`.

    It computes `rows[targets] = new[sources]`. `new` is padded with zeros to the shape of `rows`.
    The caller binds `rows_out` to the memory of `rows`. The graph declares no shapes, because ONNX
    cannot express a variable number of axes.
    """
    nodes = [
        helper.make_node("Gather", ["new", "sources"], ["taken"]),
        helper.make_node("Pad", ["taken", "pads"], ["padded"]),
        helper.make_node("ScatterND", ["rows", "targets", "padded"], ["rows_out"]),
    ]
    kinds = {"rows": TensorProto.FLOAT16, "new": TensorProto.FLOAT16}
    inputs = [
        helper.make_tensor_value_info(name, kinds.get(name, TensorProto.INT64), None)
        for name in ("rows", "new", "sources", "targets", "pads")
    ]
    outputs = [helper.make_tensor_value_info("rows_out", TensorProto.FLOAT16, None)]
    return _model(helper.make_graph(nodes, "rows", inputs, outputs))


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET)]
    version = helper.find_min_ir_version_for(opsets)
    return helper.make_model(graph, opset_imports=opsets, ir_version=version, producer_name="sightline")


class _HalfConverter:
    """Converter of one graph; values are referred to by name."""

    def __init__(self, model: onnx.ModelProto, folder: Path, weights: WeightFile) -> None:
        self._graph = model.graph
        self._folder = folder
        self._weights = weights
        self._nodes: list[NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._biases: dict[tuple[str, str], str] = {}
        self._positions: dict[str, str] = {}
        self._shapes = {
            value.name: [axis.dim_value or axis.dim_param for axis in value.type.tensor_type.shape.dim]
            for value in (*self._graph.input, *self._graph.output)
        }

    def build(self) -> onnx.ModelProto:
        for tensor in self._graph.initializer:
            self._constants[tensor.name] = self._to_half(tensor)
        rewrite = {"Attention": self._attention, "GroupQueryAttention": self._cached_attention}
        for node in self._graph.node:
            rewrite.get(node.op_type, self._plain)(node)
        nodes = _reachable(self._nodes, {value.name for value in self._graph.output})
        used = {name for node in nodes for name in node.input}
        constants = [tensor for name, tensor in self._constants.items() if name in used]
        inputs, outputs = (list(map(_half_type, values)) for values in (self._graph.input, self._graph.output))
        return _model(helper.make_graph(nodes, self._graph.name, inputs, outputs, constants))

    def _to_half(self, tensor: TensorProto) -> TensorProto:
        array: Array = numpy_helper.to_array(tensor, str(self._folder))
        if array.dtype == np.float32:
            with np.errstate(over="ignore"):
                array = array.astype(np.float16)
            if array.ndim and not np.isfinite(array).all():  # a scalar is no weight
                raise ValueError(f"{tensor.name} has weights beyond ±65504, the largest float16 number")
        return rewritten_tensor(tensor, array, self._weights)

    def _plain(self, node: NodeProto) -> None:
        """Copy a node; after the logits, add a cast to float32."""
        copy = NodeProto()
        copy.CopyFrom(node)
        self._nodes.append(copy)
        if list(node.output) == ["logits"]:
            copy.output[0] = "logits_float16"
            self._add("Cast", "logits_float16", output="logits", to=TensorProto.FLOAT)

    def _attention(self, node: NodeProto) -> None:
        """Convert `Attention` of the encoder, whose last input may be lengths (B,)."""
        options = attributes_of(node)
        heads, size = int(options["q_num_heads"]), int(self._shapes["hidden"][-1])
        is_supported = options["kv_num_heads"] == heads and not options.get("softcap")
        _check_supported(node, is_supported, unsupported_inputs=slice(3, 6))
        attended, probabilities = node.output[0], node.output[3] if len(node.output) > 3 else ""
        split = self._constant([0, 0, heads, -1])
        query, key, value = (self._add("Reshape", name, split) for name in node.input[:3])  # (B, S, H, D)
        query, value = (self._add("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, value))  # (B, H, S, D)
        key = self._add("Transpose", key, perm=[0, 2, 3, 1])  # (B, H, D, S)
        scale = options.get("scale", 1 / math.sqrt(size // heads))
        scores = self._add("MatMul", self._scaled(query, scale), key)  # (B, H, S, S)
        bias = self._bias(node.input[6], "Less", key, axis=3) if len(node.input) > 6 else ""
        weights = self._softmax(scores, bias, probabilities)
        context = self._add("Transpose", self._add("MatMul", weights, value), perm=[0, 2, 1, 3])  # (B, S, H, D)
        self._add("Reshape", context, self._constant([0, 0, -1]), output=attended)

    def _cached_attention(self, node: NodeProto) -> None:
        """Convert `GroupQueryAttention` of one token per row.

        Its inputs are queries (B, 1, M), caches (B, H, T, D) and the last cache position of each
        row (B,). If it is causal, it also has the new keys and values, as separate inputs or
        concatenated to the queries.
        """
        query, key, value, past_key, past_value, last = node.input[:6]
        attended, present_key, present_value, probabilities = (*node.output, "", "", "")[:4]
        _, heads, _, size = self._shapes[past_key]
        options = attributes_of(node)
        is_supported = options["num_heads"] == heads and not options.get("do_rotary") and not options.get("softcap")
        is_supported = is_supported and options.get("local_window_size", -1) == -1
        _check_supported(node, is_supported, unsupported_inputs=slice(7, None))
        column = self._constant([0, heads, size, 1])
        if options.get("causal", 1):
            if not key:
                query, key, value = self._split(query)
            past_key = self._written(past_key, key, last, present_key)
            past_value = self._written(past_value, value, last, present_value)
        scale = options.get("scale", 1 / math.sqrt(int(size)))
        query = self._scaled(self._add("Reshape", query, column), scale)  # (B, H, D, 1)
        # keys @ query and not query @ keys^T: transposing the keys would copy the cache.
        scores = self._add("MatMul", past_key, query)  # (B, H, T, 1)
        scores = self._add("Reshape", scores, self._constant([0, 0, 1, -1]))  # (B, H, 1, T)
        bias = self._bias(last, "LessOrEqual", past_key, axis=2)
        weights = self._softmax(scores, bias, probabilities)
        context = self._add("MatMul", weights, past_value)  # (B, H, 1, D)
        self._add("Reshape", context, self._constant([0, 1, int(heads) * int(size)]), output=attended)

    def _split(self, packed: str) -> list[str]:
        """Split a tensor (B, 1, 3M) into queries, keys and values."""
        parts = [f"{packed}_{part}" for part in ("query", "key", "value")]
        self._nodes.append(helper.make_node("Split", [packed], parts, axis=-1, num_outputs=3))
        return parts

    def _written(self, past: str, new: str, last: str, present: str) -> str:
        """Write new keys or values (B, 1, M) to the last position of each row in a cache."""
        _, heads, _, size = self._shapes[past]
        new = self._add("Reshape", new, self._constant([0, heads, 1, size]))
        if last not in self._positions:
            position = self._add("Cast", last, to=TensorProto.INT64)
            position = self._add("Reshape", position, self._constant([-1, 1, 1, 1]))
            self._positions[last] = self._add("Expand", position, self._constant([1, heads, 1, size]))
        return self._add("ScatterElements", past, self._positions[last], new, output=present, axis=2)

    def _bias(self, bounds: str, compare: str, keys: str, axis: int) -> str:
        """Return a bias (B, 1, 1, T): 0 where `position compare bound`, otherwise -inf."""
        if (bounds, compare) not in self._biases:
            length = self._add("Reshape", self._add("Shape", keys, start=axis, end=axis + 1), self._constant([]))
            positions = self._add("Range", self._constant(0), length, self._constant(1))  # (T,)
            row = self._add("Cast", bounds, to=TensorProto.INT64)
            row = self._add("Reshape", row, self._constant([-1, 1, 1, 1]))
            shown, hidden = (self._constant(value, np.float16) for value in (0.0, -math.inf))
            self._biases[bounds, compare] = self._add("Where", self._add(compare, positions, row), shown, hidden)
        return self._biases[bounds, compare]

    def _softmax(self, scores: str, bias: str, output: str) -> str:
        return self._add("Softmax", self._add("Add", scores, bias) if bias else scores, output=output, axis=-1)

    def _scaled(self, queries: str, scale: float) -> str:
        # Scale queries instead of scores: they are smaller, and unscaled products may overflow
        # float16.
        return self._add("Mul", queries, self._constant(scale, np.float16))

    def _add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node with one output, which gets a number as its name by default."""
        output = output or f"half_{op}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [output], f"half_{op}_{len(self._nodes)}", **attributes))
        return output

    def _constant(self, value: Any, dtype: type[np.generic] = np.int64) -> str:
        name = f"half_{dtype.__name__}_{value}".replace(" ", "")
        self._constants.setdefault(name, numpy_helper.from_array(np.array(value, dtype), name))
        return name


def _check_supported(node: NodeProto, is_supported: bool, unsupported_inputs: slice) -> None:
    """Check that a node has no option of attention that the conversion would ignore."""
    if not is_supported or any(node.input[unsupported_inputs]):
        raise ValueError(
            f"{node.name}: float16 bundles do not support relative positions, rotary embedding, windows, causal "
            "encoders or groups of query heads; use an 8-bit bundle"
        )


def _half_type(value: ValueInfoProto) -> ValueInfoProto:
    halved = ValueInfoProto()
    halved.CopyFrom(value)
    if value.name not in SCORES and value.type.tensor_type.elem_type == TensorProto.FLOAT:
        halved.type.tensor_type.elem_type = TensorProto.FLOAT16
    return halved


def _reachable(nodes: Sequence[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """Return the nodes that the outputs depend on, in their order."""
    reachable, needed = set(outputs), []
    for node in reversed(nodes):
        if reachable.intersection(node.output):
            reachable.update(node.input)
            needed.append(node)
    return needed[::-1]
