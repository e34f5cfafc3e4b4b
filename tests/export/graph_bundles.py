"""Graphs of described models in a folder, without a tokenizer."""

from pathlib import Path
from typing import Any

import onnx

from sightline.base.bundle import Graph, Limits, Manifest, Tokens
from sightline.export.families.description import Description
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.decoder import decoder_graph, states
from sightline.export.graphs.encoder_graph import encoder_graph
from sightline.export.graphs.model import attention_maps
from sightline.export.graphs.predict import predict_graph


def write_bundle(folder: Path, model: Description, weights: Weights, positions: int) -> Manifest:
    """Write the graphs of a model, and return a manifest that is sufficient for their verification.

    Args:
        folder: an existing folder.
        model: description of the model.
        weights: its weights.
        positions: limit of the length of sequences, if that of the model is not lower.
    """
    graphs: dict[str, Any] = {"encoder": None, "decoder": None, "predict": None}
    with WeightFile(folder / "weights.bin") as file:
        for name, part, build in (
            ("encoder", model.encoder, encoder_graph),
            ("decoder", model.decoder, decoder_graph),
            ("predict", model.predictions, predict_graph),
        ):
            if part is not None:
                proto = build(model, weights, file)
                assert proto is not None
                onnx.save_model(proto, folder / f"{name}.onnx")
                inputs, outputs = (tuple(one.name for one in ends) for ends in (proto.graph.input, proto.graph.output))
                graphs[name] = Graph(file=f"{name}.onnx", inputs=inputs, outputs=outputs)
    positions = min(model.max_positions, positions)
    return Manifest.model_construct(
        parameters=1,
        tokens=Tokens(pad_id=0, start_ids=(0,), end_ids=(1,)),
        decoder_start="source" if model.is_decoder_only else "start_token",
        limits=Limits(max_source_tokens=positions, max_target_tokens=positions, vocabulary=model.vocabulary),
        states=states(model),
        attention=attention_maps(model),
        **graphs,
    )
