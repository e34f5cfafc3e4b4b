"""The graph of the encoder classifier: the Transformer's encoder, and the labels of the mean over its tokens."""

import numpy as np
import onnx

from export.builder import GraphBuilder, WeightFile
from export.parts import FLOAT, linear, token_mask
from export.transformer import encoder_layers, encoder_maps
from model.classifier import Classifier
from model.config import ClassifierConfig
from service.bundle import Attention


def attention_maps(config: ClassifierConfig) -> tuple[Attention, ...]:
    """Which outputs hold attention maps."""
    return (encoder_maps(config.encoder_layers, config.num_heads),)


def encoder_graph(model: Classifier, weights: WeightFile) -> onnx.ModelProto:
    """`source_ids` (B, S) and `source_lengths` (B,) to `hidden`, maps, and `label_logprobs` (B, C)."""
    graph = GraphBuilder("encoder", weights)
    hidden, lengths, size = encoder_layers(graph, model)
    logits = linear(graph, "output", _mean_pool(graph, hidden, lengths, size), model.output)
    logprobs = graph.output("label_logprobs", FLOAT, ("batch", len(model.config.labels)))
    graph.add("LogSoftmax", logits, output=logprobs, axis=-1)
    return graph.build()


def _mean_pool(graph: GraphBuilder, hidden: str, lengths: str, size: str) -> str:
    """(B, S, M) to (B, M): the mean over a row's own tokens; what stands in its padding is no part of it."""
    rows, last = graph.constant([1], np.int64), graph.constant([2], np.int64)
    _, is_token = token_mask(graph, lengths, graph.add("Squeeze", size))
    column = graph.add("Unsqueeze", is_token, last)  # (B, S, 1)
    own = graph.add("Where", column, hidden, graph.constant(0.0, np.float32))
    total = graph.add("ReduceSum", own, rows, keepdims=0)  # (B, M)
    return graph.add("Div", total, graph.add("Cast", graph.add("Unsqueeze", lengths, rows), to=FLOAT))
