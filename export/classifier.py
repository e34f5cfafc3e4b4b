"""The graph of the classifier: Transformer encoder, mean pooling and a linear layer."""

import onnx

from export.builder import GraphBuilder, WeightFile
from export.graphs.encoder import mean_pool
from export.nodes import FLOAT
from export.parts import linear
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
    logits = linear(graph, "output", mean_pool(graph, hidden, lengths, size), model.output)
    logprobs = graph.output("label_logprobs", FLOAT, ("batch", len(model.config.labels)))
    graph.add("LogSoftmax", logits, output=logprobs, axis=-1)
    return graph.build()
