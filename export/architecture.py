"""The graphs of a model, whatever its architecture."""

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
    """What a bundle says of a model, and computes of it."""

    encoder: onnx.ModelProto
    step: onnx.ModelProto | None  # None where nothing is generated
    states: tuple[State, ...]
    attention: tuple[Attention, ...]
    similar: onnx.ModelProto
    labels: tuple[str, ...] = ()
    begins_with: Literal["start_token", "source"] = "start_token"


def graphs_of(model: Model, weights: WeightFile) -> Graphs:
    """`weights` takes the constants of all graphs."""
    similar = similar_graph(model.embedding.weight, weights)
    if isinstance(model, Classifier):
        encoder, attention = classifier.encoder_graph(model, weights), classifier.attention_maps(model.config)
        return Graphs(encoder, None, (), attention, similar, model.config.labels)
    if isinstance(model, CausalModel):
        return Graphs(
            causal.encoder_graph(model, weights),
            causal.step_graph(model, weights),
            causal.states(model.config),
            causal.attention_maps(model.config),
            similar,
            begins_with="source",
        )
    if isinstance(model, RecurrentModel):
        return Graphs(
            recurrent.encoder_graph(model, weights),
            recurrent.step_graph(model, weights),
            recurrent.states(model),
            recurrent.attention_maps(model.config),
            similar,
        )
    return Graphs(
        transformer.encoder_graph(model, weights),
        transformer.step_graph(model, weights),
        transformer.states(model.config),
        transformer.attention_maps(model.config),
        similar,
    )
