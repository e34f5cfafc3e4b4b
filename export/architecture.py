"""Construction of the graphs of a model of any architecture."""

from dataclasses import dataclass
from typing import Literal

import onnx

from export import causal, classifier, recurrent, transformer
from export.builder import WeightFile
from export.similar import similar_graph
from model.architectures.causal import CausalModel
from model.architectures.classifier import Classifier
from model.architectures.factory import Model
from model.architectures.recurrent import RecurrentModel
from service.bundle import Attention, State


@dataclass(frozen=True)
class Graphs:
    """Graphs of a model, and their description in the manifest."""

    encoder: onnx.ModelProto | None  # None for a decoder-only model
    decoder: onnx.ModelProto | None  # None if the model does not generate text
    states: tuple[State, ...]
    attention: tuple[Attention, ...]
    similar: onnx.ModelProto
    labels: tuple[str, ...] = ()
    decoder_start: Literal["start_token", "source"] = "start_token"


def build_graphs(model: Model, weights: WeightFile) -> Graphs:
    """Build the graphs of a model; their constants are added to `weights`."""
    similar = similar_graph(model.embedding.weight.detach().numpy(), weights)
    if isinstance(model, Classifier):
        encoder, attention = classifier.encoder_graph(model, weights), classifier.attention_maps(model.config)
        return Graphs(encoder, None, (), attention, similar, model.config.labels)
    if isinstance(model, CausalModel):
        return Graphs(
            None,
            causal.decoder_graph(model, weights),
            causal.states(model.config),
            causal.attention_maps(model.config),
            similar,
            decoder_start="source",
        )
    if isinstance(model, RecurrentModel):
        return Graphs(
            recurrent.encoder_graph(model, weights),
            recurrent.decoder_graph(model, weights),
            recurrent.states(model),
            recurrent.attention_maps(model.config),
            similar,
        )
    return Graphs(
        transformer.encoder_graph(model, weights),
        transformer.decoder_graph(model, weights),
        transformer.states(model.config),
        transformer.attention_maps(model.config),
        similar,
    )
