"""Nodes that the graphs of every architecture share."""

import math

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from export.builder import CONTRIB, GraphBuilder
from model.layers.embedding import Embedded
from model.layers.transformer_layer import AddNorm, FeedForward
from service.bundle import TOP_TOKENS

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
LOWEST = float(np.finfo(np.float32).min)  # a score that no weight comes of
KEY_VALUE = ("key", "value")  # as names of states have them
# Sums over the source run over whole blocks of this many positions. ONNX Runtime adds up the terms of a product in
# groups of at most 16 and rounds a shorter last group otherwise, so that a sum over exactly the batch's longest source
# would depend on that length. With whole blocks every term of a row has the same place in its group in every batch,
# and what other rows add are groups of zeros, which change nothing.
SOURCE_BLOCK = 16


def linear(graph: GraphBuilder, name: str, x: str, *linears: nn.Linear) -> str:
    """A product and, where there is one, a bias; the outputs of several layers side by side."""
    weight = graph.weight(f"{name}.weight", torch.cat([layer.weight for layer in linears]).T)
    product = graph.add("MatMul", x, weight)
    if linears[0].bias is None:
        return product
    return graph.add("Add", product, graph.weight(f"{name}.bias", torch.cat([layer.bias for layer in linears])))


def scaled_embedding(graph: GraphBuilder, table: Tensor, ids: str) -> str:
    """Rows of the table times the square root of their width."""
    # The table stays unscaled: the output projection is the same tensor.
    embedded = graph.add("Gather", graph.weight("embedding", table), ids)
    return graph.add("Mul", embedded, graph.constant(math.sqrt(table.size(1)), np.float32))


def embedded_source(graph: GraphBuilder, model: Embedded, ids: str) -> tuple[str, str]:
    """`Embedded.embed` of ids (B, S): the vectors (B, S, M), and S as (1,) int64."""
    size, first = graph.add("Shape", ids, start=1), graph.constant([0], np.int64)
    positions = graph.add("Slice", graph.weight("positions", model.positions), first, size, first)  # (S, M)
    return graph.add("Add", scaled_embedding(graph, model.embedding.weight, ids), positions), size


def embedded_tokens(graph: GraphBuilder, model: Embedded, ids: str, positions: str) -> str:
    """`Embedded.embed` of one id a row (B,), each at a position of its own (B,): (B, 1, M)."""
    position = graph.add("Gather", graph.weight("positions", model.positions), positions)  # (B, M)
    x = graph.add("Add", scaled_embedding(graph, model.embedding.weight, ids), position)
    return graph.add("Unsqueeze", x, graph.constant([1], np.int64))


def token_mask(graph: GraphBuilder, lengths: str, size: str) -> tuple[str, str]:
    """What stands for a token and what for padding: positions (S,), and (B, S) whether they are below lengths (B,).

    `lengths`, `size` () which is S, and the positions are int64.
    """
    positions = graph.add("Range", graph.constant(0, np.int64), size, graph.constant(1, np.int64))
    column = graph.add("Unsqueeze", lengths, graph.constant([1], np.int64))  # (B, 1)
    return positions, graph.add("Less", positions, column)


def whole_blocks(graph: GraphBuilder, longest: str) -> str:
    """A number of positions () int64, rounded up to whole blocks of `SOURCE_BLOCK`."""
    block = graph.constant(SOURCE_BLOCK, np.int64)
    rounded_up = graph.add("Add", longest, graph.constant(SOURCE_BLOCK - 1, np.int64))
    return graph.add("Mul", graph.add("Div", rounded_up, block), block)


def with_positions(graph: GraphBuilder, x: str, size: str) -> str:
    """Cut x (B, any, ...), or pad it with zeros, to (B, S, ...); `size` () int64 is S."""
    first, axis = graph.constant([0], np.int64), graph.constant([1], np.int64)
    missing = graph.add("Sub", graph.add("Unsqueeze", size, first), graph.add("Shape", x, start=1, end=2))
    # Negative pads cut.
    return graph.add("Pad", x, graph.add("Concat", first, missing, axis=0), "", axis)


def products(graph: GraphBuilder, vector: str, rows: str) -> str:
    """The products (B, S) of a row's vector (B, 1, K) or one vector (1, 1, K) with each of its rows (B, S, K).

    S must be whole blocks. The vector is on the left because ONNX Runtime then shares columns out among its threads by
    whole blocks too; on the right the vector would have the rows shared out one by one, and a last odd row is summed in
    another order.
    """
    products = graph.add("FusedMatMul", vector, rows, domain=CONTRIB, transB=1)  # (B, 1, S)
    return graph.add("Squeeze", products, graph.constant([1], np.int64))


def weighted_sum(graph: GraphBuilder, weights: str, x: str, is_token: str) -> str:
    """The sum (B, M) of a row's own positions of x (B, S, M), each times its weight (B, S).

    S must be whole blocks. Whatever x has beyond a row's own tokens is replaced by zeros, because a weight of zero
    would keep infinities and NaN.
    """
    middle, last = graph.constant([1], np.int64), graph.constant([2], np.int64)
    own = graph.add("Where", graph.add("Unsqueeze", is_token, last), x, graph.constant(0.0, np.float32))
    return graph.add("Squeeze", graph.add("MatMul", graph.add("Unsqueeze", weights, middle), own), middle)


def scores(graph: GraphBuilder, features: str, table: Tensor) -> None:
    """`logits` of every token from features (B, M), and what picking one needs of them."""
    vocab_size = table.size(0)
    embedding = graph.weight("embedding", table)
    logits = graph.add(
        "Gemm", features, embedding, output=graph.output("logits", FLOAT, ("batch", vocab_size)), transB=1
    )
    logprobs = graph.output("logprobs", FLOAT, ("batch", vocab_size))
    # Over ten times as fast as ReduceLogSumExp.
    graph.add("LogSoftmax", logits, output=logprobs, axis=-1)
    count = min(TOP_TOKENS, vocab_size)
    top = [graph.output("top_logprobs", FLOAT, ("batch", count)), graph.output("top_ids", INT64, ("batch", count))]
    graph.add_multi("TopK", [logprobs, graph.constant([count], np.int64)], top)


def before(graph: GraphBuilder, name: str, x: str, module: AddNorm) -> str:
    """What a sublayer reads."""
    return layer_norm(graph, name, x, module.norm) if module.pre_norm else x


def add_norm(graph: GraphBuilder, name: str, x: str, inner: str, module: AddNorm) -> str:
    """LayerNorm(x + inner), or pre-norm the sum. Two nodes: the one that ONNX Runtime has takes four times as long."""
    total = graph.add("Add", x, inner)
    return total if module.pre_norm else layer_norm(graph, name, total, module.norm)


def layer_norm(graph: GraphBuilder, name: str, x: str, norm: nn.LayerNorm) -> str:
    vectors = {"norm.weight": norm.weight, "norm.bias": norm.bias}
    parameters = [graph.weight(f"{name}.{part}", vector) for part, vector in vectors.items()]
    return graph.add("LayerNormalization", x, *parameters, axis=-1, epsilon=norm.eps)


def feed_forward(graph: GraphBuilder, name: str, x: str, module: FeedForward, norm: AddNorm) -> str:
    read = before(graph, f"{name}.feed_forward.outer", x, norm)
    inner = graph.add("Relu", linear(graph, f"{name}.feed_forward.inner", read, module.inner))
    outer = linear(graph, f"{name}.feed_forward.outer", inner, module.outer)
    return add_norm(graph, f"{name}.feed_forward.outer", x, outer, norm)
