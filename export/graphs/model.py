"""All graphs of a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import onnx

from sightline.base.bundle import AttentionMaps, LabelKind, MapKind, State, Task
from sightline.export.families.description import Attention, Description, Stack
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.decoder import decoder_graph, states
from sightline.export.graphs.encoder_graph import encoder_graph
from sightline.export.graphs.layers import LayerBuilder, activation
from sightline.export.graphs.nodes import FLOAT


@dataclass(frozen=True)
class Graphs:
    """Graphs of a model, whose weights are in a file, with the parts of the manifest about them."""

    encoder: onnx.ModelProto | None  # None for decoder-only models
    decoder: onnx.ModelProto | None  # None for models that generate no text
    states: tuple[State, ...]
    attention: tuple[AttentionMaps, ...]
    decoder_start: Literal["start_token", "source"] = "start_token"
    labels: tuple[str, ...] = ()
    label_kind: LabelKind = "classes"
    predict: onnx.ModelProto | None = None  # only of masked language models
    contributions: onnx.ModelProto | None = None  # only if an option of the export asks for it

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks that a bundle with these graphs can do."""
        kind = self.label_kind if self.labels else None
        can_do: dict[Task, bool] = {
            "generate": self.decoder is not None,
            "encode": True,
            "attention": bool(self.attention),
            "classify": kind in ("classes", "independent"),
            "rerank": kind == "score",
            "tag": kind == "tokens",
            "answer": kind == "span",
            "fill-mask": self.predict is not None,
            "sparse": self.predict is not None,
        }
        return tuple(task for task, is_possible in can_do.items() if is_possible)


def build_graphs(model: Description, weights: Weights, file: WeightFile) -> Graphs:
    """Build the graphs of a described model; their constants are added to `file`."""
    encoder = None if model.encoder is None else encoder_graph(model, weights, file)
    decoder = None if model.decoder is None else decoder_graph(model, weights, file)
    return Graphs(
        encoder,
        decoder,
        states(model),
        attention_maps(model),
        "source" if model.is_decoder_only else "start_token",
        model.labels,
        "classes" if model.head is None else model.head.label_kind,
        predict_graph(model, weights, file),
    )


def attention_maps(model: Description) -> tuple[AttentionMaps, ...]:
    """Describe the outputs with attention weights."""
    maps = list[AttentionMaps]()

    def add(kind: MapKind, outputs: Iterable[str], stack: Stack, options: Attention, **more: Any) -> None:
        maps.append(AttentionMaps(kind=kind, outputs=tuple(outputs), layers=stack.layers, heads=options.heads, **more))

    if (stack := model.encoder) is not None:
        options, layers = stack.attention[0], range(stack.layers)
        projected = options.projected_keys
        names = (f"encoder_attention.{layer}" for layer in layers)
        add("encoder", names, stack, options, normalized=projected is None)
        if projected is not None:  # their weights, converted to tokens, do not sum to 1
            names = (f"encoder_slots.{layer}" for layer in layers)
            add("encoder_slots", names, stack, options, columns=projected.size)
    if (stack := model.decoder) is not None and stack.cross is not None:
        add("cross", ["cross_attention"], stack, stack.cross)
    if stack is not None and stack.cell == "attention":
        add("decoder", ["decoder_attention"], stack, stack.attention[0])
    return tuple(maps)


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
