"""The graph that compares tokens by their embeddings, the same for every architecture."""

import numpy as np
import onnx
from torch import Tensor

from export.builder import GraphBuilder, WeightFile
from export.parts import FLOAT, INT64


def similar_graph(table: Tensor, weights: WeightFile) -> onnx.ModelProto:
    """`token_ids` (N,) to `cosines` (N, V): the cosine of each one's row of the table (V, M) and every row.

    A row of zeros has no direction; its cosine with any is 0.
    """
    graph = GraphBuilder("similar", weights)
    token_ids = graph.input("token_ids", INT64, ("tokens",))
    lengths = table.detach().norm(dim=1)
    # Inside the graph: in the file of weights it has nothing of its own, what it reads there the others read too.
    norms = graph.constant(lengths.masked_fill(lengths == 0, 1.0).tolist(), np.float32, "embedding.norms")
    embedding = graph.weight("embedding", table)
    own_norms = graph.add("Unsqueeze", graph.add("Gather", norms, token_ids), graph.constant([1], np.int64))  # (N, 1)
    units = graph.add("Div", graph.add("Gather", embedding, token_ids), own_norms)  # (N, M)
    # The form of the product to the vocabulary (`export.parts.scores`), so that where that is quantised this is too.
    products = graph.add("Gemm", units, embedding, transB=1)  # (N, V)
    graph.add("Div", products, norms, output=graph.output("cosines", FLOAT, ("tokens", table.size(0))))
    return graph.build()
