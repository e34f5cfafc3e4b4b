"""The graph that compares tokens by their embeddings, for all architectures."""

import numpy as np
import onnx
from numpy.typing import NDArray

from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.nodes import FLOAT, INT64


def similar_graph(table: NDArray[np.float32], weights: WeightFile) -> onnx.ModelProto:
    """Build the graph that maps `token_ids` (N,) to their `cosines` (N, V) with all tokens.

    They are cosines of rows of the table (V, M). The cosine with an embedding of zeros is 0.
    """
    graph = GraphBuilder("similar", weights)
    token_ids = graph.input("token_ids", INT64, ("tokens",))
    lengths = np.linalg.norm(table, axis=1)
    # The norms are stored inside the graph, so that the weight file only has tensors that other
    # graphs use too.
    norms = graph.constant(np.where(lengths == 0, 1.0, lengths).tolist(), np.float32, "embedding.norms")
    embedding = graph.weight("embedding", table)
    own_norms = graph.add("Unsqueeze", graph.add("Gather", norms, token_ids), graph.constant([1], np.int64))  # (N, 1)
    units = graph.add("Div", graph.add("Gather", embedding, token_ids), own_norms)  # (N, M)
    # The same operator as the output projection (`sightline.export.graphs.nodes.scores`), so that
    # both are quantized together.
    products = graph.add("Gemm", units, embedding, transB=1)  # (N, V)
    graph.add("Div", products, norms, output=graph.output("cosines", FLOAT, ("tokens", len(table))))
    return graph.build()
