"""Nodes that the graphs of all models share."""

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from sightline.base.bundle import TOP_TOKENS
from sightline.export.graphs.builder import CONTRIB, GraphBuilder

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
LOWEST = float(np.finfo(np.float32).min)  # a score whose softmax weight is 0
KEY_VALUE = ("key", "value")  # parts of the names of states
SCORES = ("logits", "logprobs", "top_logprobs", "top_ids")  # outputs of a decoder graph
# Outputs of the product with the table of the vocabulary, if they are the logits and if not.
PROJECTIONS = ("logits", "unrestricted_logits")
# Sums over the source are padded to multiples of this many positions. ONNX Runtime sums the terms
# of a product in groups of at most 16 and rounds a shorter last group differently, so that a sum
# over exactly the longest source of the batch would depend on its length. With padding, every term
# of a row has the same position in its group in every batch. Longer rows of the batch only add
# groups of zeros, which do not change the sum.
SOURCE_BLOCK = 16


def token_mask(graph: GraphBuilder, lengths: str, size: str) -> tuple[str, str]:
    """Add the positions (S,) int64 of `size` S () int64, and a mask (B, S) of tokens and padding.

    The mask is True where the position is less than the length of the row, (B,) int64.
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


def scores(
    graph: GraphBuilder, features: str, projection: Sequence[str], vocab_size: int, cap: float | None = None
) -> None:
    """Add the outputs `logits`, `logprobs`, `top_logprobs` and `top_ids`.

    Args:
        features: (B, M).
        projection: names of the matrix (V, M), and of the bias (V,) if there is one.
        cap: logits x become cap * tanh(x / cap); None leaves them unchanged.
    """
    logits = graph.output("logits", FLOAT, ("batch", vocab_size))
    product = graph.add("Gemm", features, *projection, output=PROJECTIONS[cap is not None], transB=1)
    if cap is not None:
        limit = graph.constant(cap, np.float32)
        graph.add("Mul", graph.add("Tanh", graph.add("Div", product, limit)), limit, output=logits)
    logprobs = graph.output("logprobs", FLOAT, ("batch", vocab_size))
    # Over ten times faster than ReduceLogSumExp.
    graph.add("LogSoftmax", logits, output=logprobs, axis=-1)
    count = min(TOP_TOKENS, vocab_size)
    top = [graph.output("top_logprobs", FLOAT, ("batch", count)), graph.output("top_ids", INT64, ("batch", count))]
    graph.add_multi("TopK", [logprobs, graph.constant([count], np.int64)], top)
