"""Nodes from modules of `model` that the graphs of several architectures share."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from export.builder import GraphBuilder
from model.layers.embedding import TransformerBase
from model.layers.transformer_layer import AddNorm, FeedForward


def linear(graph: GraphBuilder, name: str, x: str, *linears: nn.Linear) -> str:
    """Add linear layers as one product; the outputs of several layers are concatenated."""
    weight = graph.weight(f"{name}.weight", torch.cat([layer.weight for layer in linears]).T)
    product = graph.add("MatMul", x, weight)
    if linears[0].bias is None:
        return product
    return graph.add("Add", product, graph.weight(f"{name}.bias", torch.cat([layer.bias for layer in linears])))


def scaled_embedding(graph: GraphBuilder, table: Tensor, ids: str) -> str:
    """Look up embeddings and multiply them by the square root of their width."""
    # The table itself is not scaled, because the output projection uses the same tensor.
    embedded = graph.add("Gather", graph.weight("embedding", table), ids)
    return graph.add("Mul", embedded, graph.constant(math.sqrt(table.size(1)), np.float32))


def embedded_source(graph: GraphBuilder, model: TransformerBase, ids: str) -> tuple[str, str]:
    """Add `TransformerBase.embed` of ids (B, S); return (B, S, M), and S as (1,) int64."""
    size, first = graph.add("Shape", ids, start=1), graph.constant([0], np.int64)
    positions = graph.add("Slice", graph.weight("positions", model.positions), first, size, first)  # (S, M)
    return graph.add("Add", scaled_embedding(graph, model.embedding.weight, ids), positions), size


def embedded_tokens(graph: GraphBuilder, model: TransformerBase, ids: str, positions: str) -> str:
    """Add `TransformerBase.embed` of one id per row (B,) at positions (B,); return (B, 1, M)."""
    position = graph.add("Gather", graph.weight("positions", model.positions), positions)  # (B, M)
    x = graph.add("Add", scaled_embedding(graph, model.embedding.weight, ids), position)
    return graph.add("Unsqueeze", x, graph.constant([1], np.int64))


def sublayer_input(graph: GraphBuilder, name: str, x: str, module: AddNorm) -> str:
    """Add the input of a sublayer, see `AddNorm.sublayer_input`."""
    return layer_norm(graph, name, x, module.norm) if module.pre_norm else x


def add_norm(graph: GraphBuilder, name: str, x: str, inner: str, module: AddNorm) -> str:
    """Add LayerNorm(x + inner), or x + inner for pre-norm.

    Post-norm uses two nodes, because the fused operator of ONNX Runtime takes four times as long.
    """
    total = graph.add("Add", x, inner)
    return total if module.pre_norm else layer_norm(graph, name, total, module.norm)


def layer_norm(graph: GraphBuilder, name: str, x: str, norm: nn.LayerNorm) -> str:
    vectors = {"norm.weight": norm.weight, "norm.bias": norm.bias}
    parameters = [graph.weight(f"{name}.{part}", vector) for part, vector in vectors.items()]
    return graph.add("LayerNormalization", x, *parameters, axis=-1, epsilon=norm.eps)


def feed_forward(graph: GraphBuilder, name: str, x: str, module: FeedForward, norm: AddNorm) -> str:
    normalized = sublayer_input(graph, f"{name}.feed_forward.outer", x, norm)
    inner = graph.add("Relu", linear(graph, f"{name}.feed_forward.inner", normalized, module.inner))
    outer = linear(graph, f"{name}.feed_forward.outer", inner, module.outer)
    return add_norm(graph, f"{name}.feed_forward.outer", x, outer, norm)
