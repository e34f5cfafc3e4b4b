"""Self-attention of an encoder layer as a graph: as exported, without maps, and as plain products.

Axes: B batch, S source, M model width, H heads, D width of a head.
"""

import math
from pathlib import Path

import numpy as np
import onnx

from sightline.export.families.description import Attention, FeedForward, ProjectedKeys, Stack, TokenEmbedding
from sightline.export.families.trained import NORM
from sightline.export.families.weights import Source, Weights
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.encoder_graph import SelfAttentionBuilder
from sightline.export.graphs.layers import LayerBuilder
from sightline.export.graphs.nodes import FLOAT, INT32, INT64, LOWEST, token_mask
from sightline.model.config import matrix_indices
from sightline.model.layers.linformer import Projections
from sightline.model.layers.multi_head_attention import MultiHeadAttention
from tests.support.tensors import state_tensors

RESULT = "hidden"  # the only output that is not an attention map
MODULE = "encoder.0.self_attention"  # the builder's name of the attention


def exported_graph(module: MultiHeadAttention, projections: Projections | None, weights: WeightFile) -> onnx.ModelProto:
    """Build the graph with the export's own code: `x` (B, S, M) and `lengths` (B,) to `hidden` (B,
    S, M) and maps.
    """
    graph = GraphBuilder("exported", weights)
    x, lengths, size = _inputs(graph, module.query.in_features)
    layers = _layer_builder(graph, module, projections)
    max_positions = 0 if projections is None else projections.matrices.size(2)
    attention = SelfAttentionBuilder(layers, max_positions, size, lengths)
    _output(graph, attention.add(0, layers.stack.attention[0], x), module)
    return graph.build()


def plain_graph(module: MultiHeadAttention, weights: WeightFile) -> onnx.ModelProto:
    """Build the same graph without maps from MatMul, Softmax and MatMul, as older exporters do."""
    graph = GraphBuilder("plain", weights)
    x, lengths, size = _inputs(graph, module.query.in_features)
    head_size = module.query.out_features // module.num_heads
    parts = [graph.unique(part) for part in ("query", "key", "value")]
    layers = _layer_builder(graph, module, None)
    qkv = layers.linear(x, *(f"{MODULE}.{part}" for part in ("query", "key", "value")))
    graph.add_multi("Split", [qkv], parts, axis=-1, num_outputs=3)
    split = graph.constant([0, 0, module.num_heads, head_size], np.int64)
    perms = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])  # keys (B, H, D, S), the others (B, H, S, D)
    query, key, value = (
        graph.add("Transpose", graph.add("Reshape", part, split), perm=perm)
        for part, perm in zip(parts, perms, strict=True)
    )
    scores = graph.add(
        "Mul", graph.add("MatMul", query, key), graph.constant(1 / math.sqrt(head_size), np.float32)
    )  # (B, H, S, S)
    _, is_token = token_mask(graph, lengths, graph.add("Squeeze", size))
    row = graph.add("Unsqueeze", is_token, graph.constant([1, 2], np.int64))  # (B, 1, 1, S)
    masked = graph.add("Where", row, scores, graph.constant(LOWEST, np.float32))
    heads = graph.add("MatMul", graph.add("Softmax", masked, axis=-1), value)  # (B, H, S, D)
    merged = graph.add("Reshape", graph.add("Transpose", heads, perm=perms[0]), graph.constant([0, 0, -1], np.int64))
    _output(graph, layers.linear(merged, f"{MODULE}.output"), module)
    return graph.build()


def without_maps(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove all outputs but `hidden`, and the nodes that only the maps need. ONNX Runtime itself
    does not skip such nodes, even if a run requests only `hidden`.
    """
    pruned = onnx.ModelProto()
    pruned.CopyFrom(model)
    needed, kept = {RESULT}, []
    for node in reversed(pruned.graph.node):
        if needed.isdisjoint(node.output):
            continue
        outputs = [name if name in needed else "" for name in node.output]
        while not outputs[-1]:
            outputs.pop()
        node.output[:] = outputs
        needed.update(filter(None, node.input))
        kept.append(node)
    kept.reverse()
    for field, values in (
        (pruned.graph.node, kept),
        (pruned.graph.output, [output for output in pruned.graph.output if output.name == RESULT]),
        (pruned.graph.initializer, [tensor for tensor in pruned.graph.initializer if tensor.name in needed]),
    ):
        values = [type(value).FromString(value.SerializeToString()) for value in values]  # copies survive `del`
        del field[:]
        field.extend(values)
    return pruned


def save_graph(model: onnx.ModelProto, folder: Path) -> Path:
    """Write a graph beside its weights and return its path."""
    path = folder / "attention.onnx"
    onnx.save(model, path)
    return path


def _layer_builder(graph: GraphBuilder, module: MultiHeadAttention, projections: Projections | None) -> LayerBuilder:
    """Describe the attention of a module as that of an encoder of one layer."""
    width, heads = module.query.in_features, module.num_heads
    modules: dict[str, Source] = {f"{MODULE}.{part}": part for part in ("query", "key", "value", "output")}
    projected = None
    if projections is not None:
        projected = ProjectedKeys(projections.size, *matrix_indices(projections.sharing, 0))
        for number, matrix in enumerate(projections.matrices.detach().numpy()):
            modules[f"encoder.projection.{number}"] = lambda matrix=matrix: matrix  # type: ignore[misc]
    attention = Attention(heads, heads, width // heads, (width // heads) ** -0.5, projected_keys=projected)
    stack = Stack(width, NORM, "post", (attention,), FeedForward("relu", width), TokenEmbedding())
    return LayerBuilder(graph, Weights(state_tensors(module), modules), "encoder", stack)


def _inputs(graph: GraphBuilder, d_model: int) -> tuple[str, str, str]:
    """Add the inputs; return `x`, the lengths (B,) as int64, and S (1,)."""
    x = graph.input("x", FLOAT, ("batch", "source", d_model))
    lengths = graph.add("Cast", graph.input("lengths", INT32, ("batch",)), to=INT64)
    return x, lengths, graph.add("Shape", x, start=1, end=2)


def _output(graph: GraphBuilder, attended: str, module: MultiHeadAttention) -> None:
    shape = ("batch", "source", module.output.out_features)
    graph.add("Identity", attended, output=graph.output(RESULT, FLOAT, shape))
