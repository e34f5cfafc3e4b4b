"""The graph of the classifier: Transformer encoder, mean pooling and a linear layer."""

import numpy as np
import onnx

from export.builder import GraphBuilder, WeightFile
from export.parts import FLOAT, linear, token_mask, weighted_sum, whole_blocks, with_positions
from export.transformer import encoder_layers, encoder_maps
from model.architectures.classifier import Classifier
from model.config import ClassifierConfig
from service.bundle import Attention


def attention_maps(config: ClassifierConfig) -> tuple[Attention, ...]:
    """Describe the outputs with attention weights."""
    return (encoder_maps(config.encoder_layers, config.num_heads),)


def encoder_graph(model: Classifier, weights: WeightFile) -> onnx.ModelProto:
    """Build the encoder graph.

    It maps `source_ids` (B, S) and `source_lengths` (B,) to `hidden`, attention weights and
    `label_logprobs` (B, C).
    """
    graph = GraphBuilder("encoder", weights)
    hidden, lengths, size = encoder_layers(graph, model)
    logits = linear(graph, "output", _mean_pool(graph, hidden, lengths, size), model.output)
    logprobs = graph.output("label_logprobs", FLOAT, ("batch", len(model.config.labels)))
    graph.add("LogSoftmax", logits, output=logprobs, axis=-1)
    return graph.build()


def _mean_pool(graph: GraphBuilder, hidden: str, lengths: str, size: str) -> str:
    """Add the mean (B, M) of hidden states (B, S, M) over the tokens of each row."""
    size = whole_blocks(graph, graph.add("Squeeze", size))
    _, is_token = token_mask(graph, lengths, size)
    ones = graph.add("Cast", is_token, to=FLOAT)
    total = weighted_sum(graph, ones, with_positions(graph, hidden, size), is_token)
    column = graph.add("Unsqueeze", lengths, graph.constant([1], np.int64))  # (B, 1)
    return graph.add("Div", total, graph.add("Cast", column, to=FLOAT))
