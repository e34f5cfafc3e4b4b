"""The graph that predicts tokens from hidden states of an encoder."""

import onnx

from sightline.export.families.description import Description
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.layers import LayerBuilder, activation
from sightline.export.graphs.nodes import FLOAT


def predict_graph(model: Description, weights: Weights, file: WeightFile) -> onnx.ModelProto | None:
    """Build the graph from `hidden` (N, M) to `logits` (N, V), None without token predictions."""
    stack, options = model.encoder, model.predictions
    if stack is None or options is None:
        return None
    graph = GraphBuilder("predict", file)
    layers = LayerBuilder(graph, weights, "encoder", stack)
    x = layers.linear(graph.input("hidden", FLOAT, ("tokens", stack.width)), "prediction.dense")
    x = layers.norm(activation(graph, x, options.activation), "prediction.norm")
    # A tied table has the name that it has in the other graphs, so that all are quantized together.
    table = graph.weight(
        "embedding" if options.is_tied else "prediction.output.weight", weights.read("prediction.output.weight")
    )
    factors = [x, table]
    if options.has_output_bias:
        factors.append(graph.weight("prediction.output.bias", weights.read("prediction.output.bias")))
    graph.add("Gemm", *factors, output=graph.output("logits", FLOAT, ("tokens", model.vocabulary)), transB=1)
    return graph.build()
