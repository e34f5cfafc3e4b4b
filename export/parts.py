"""Nodes that the graphs of all architectures share."""

import math

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from export.builder import CONTRIB, GraphBuilder
from model.layers.embedding import TransformerBase
from model.layers.transformer_layer import AddNorm, FeedForward
from service.bundle import TOP_TOKENS

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
LOWEST = float(np.finfo(np.float32).min)  # a score whose softmax weight is 0
KEY_VALUE = ("key", "value")  # parts of the names of states
# Sums over the source are padded to multiples of this many positions. ONNX Runtime sums the terms
# of a product in groups of at most 16 and rounds a shorter last group differently, so that a sum
# over exactly the longest source of the batch would depend on its length. With padding, every term
# of a row has the same position in its group in every batch. Longer rows of the batch only add
# groups of zeros, which do not change the sum.
SOURCE_BLOCK = 16


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


def token_mask(graph: GraphBuilder, lengths: str, size: str) -> tuple[str, str]:
    """Add a mask of tokens and padding.

    Args:
        graph: the graph to add nodes to.
        lengths: (B,) int64.
        size: S, () int64.

    Returns:
        The positions (S,) int64, and the mask (B, S), True where the position is less than the
        length.
    """
    positions = graph.add("Range", graph.constant(0, np.int64), size, graph.constant(1, np.int64))
    column = graph.add("Unsqueeze", lengths, graph.constant([1], np.int64))  # (B, 1)
    return positions, graph.add("Less", positions, column)


def whole_blocks(graph: GraphBuilder, longest: str) -> str:
    """Round a number of positions () int64 up to a multiple of `SOURCE_BLOCK`."""
    block = graph.constant(SOURCE_BLOCK, np.int64)
    rounded_up = graph.add("Add", longest, graph.constant(SOURCE_BLOCK - 1, np.int64))
    return graph.add("Mul", graph.add("Div", rounded_up, block), block)


def with_positions(graph: GraphBuilder, x: str, size: str) -> str:
    """Truncate or zero-pad x (B, any, ...) to (B, S, ...); `size` is S, () int64."""
    first, axis = graph.constant([0], np.int64), graph.constant([1], np.int64)
    missing = graph.add("Sub", graph.add("Unsqueeze", size, first), graph.add("Shape", x, start=1, end=2))
    # A negative pad truncates.
    return graph.add("Pad", x, graph.add("Concat", first, missing, axis=0), "", axis)


def products(graph: GraphBuilder, vector: str, keys: str) -> str:
    """Add the dot products (B, S) of a vector (B, 1, K) or (1, 1, K) with keys (B, S, K).

    S must be a multiple of `SOURCE_BLOCK`. The vector is the left operand, because ONNX Runtime
    then distributes the work over threads in whole blocks of columns. With the vector on the right,
    it distributes single rows and sums an odd last row in another order.
    """
    products = graph.add("FusedMatMul", vector, keys, domain=CONTRIB, transB=1)  # (B, 1, S)
    return graph.add("Squeeze", products, graph.constant([1], np.int64))


def weighted_sum(graph: GraphBuilder, weights: str, x: str, is_token: str) -> str:
    """Add the weighted sum (B, M) of x (B, S, M) over the tokens of each row, with weights (B, S).

    S must be a multiple of `SOURCE_BLOCK`. Padding of x is replaced by zeros, because infinity or
    NaN times a weight of zero is NaN.
    """
    middle, last = graph.constant([1], np.int64), graph.constant([2], np.int64)
    own = graph.add("Where", graph.add("Unsqueeze", is_token, last), x, graph.constant(0.0, np.float32))
    return graph.add("Squeeze", graph.add("MatMul", graph.add("Unsqueeze", weights, middle), own), middle)


def scores(graph: GraphBuilder, features: str, table: Tensor) -> None:
    """Add the outputs `logits`, `logprobs`, `top_logprobs` and `top_ids`, given features (B, M)."""
    vocab_size = table.size(0)
    embedding = graph.weight("embedding", table)
    logits = graph.add(
        "Gemm", features, embedding, output=graph.output("logits", FLOAT, ("batch", vocab_size)), transB=1
    )
    logprobs = graph.output("logprobs", FLOAT, ("batch", vocab_size))
    # Over ten times faster than ReduceLogSumExp.
    graph.add("LogSoftmax", logits, output=logprobs, axis=-1)
    count = min(TOP_TOKENS, vocab_size)
    top = [graph.output("top_logprobs", FLOAT, ("batch", count)), graph.output("top_ids", INT64, ("batch", count))]
    graph.add_multi("TopK", [logprobs, graph.constant([count], np.int64)], top)


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
