"""Graphs of described models in a folder, without a tokenizer."""

from pathlib import Path
from typing import Any

import onnx

from export.families.description import Description
from export.families.weights import Weights
from export.graphs.builder import WeightFile
from export.graphs.decoder import decoder_graph, states
from export.graphs.encoder import encoder_graph
from export.graphs.model import attention_maps
from service.bundle import Graph, Limits, Manifest, Tokens


def write_bundle(folder: Path, model: Description, weights: Weights, positions: int) -> Manifest:
    """Write the graphs of a model, and return a manifest that is sufficient for their verification.

    Args:
        folder: an existing folder.
        model: description of the model.
        weights: its weights.
        positions: limit of the length of sequences, if that of the model is not lower.
    """
    graphs: dict[str, Any] = {"encoder": None, "decoder": None}
    with WeightFile(folder / "weights.bin") as file:
        for name, stack, build in (
            ("encoder", model.encoder, encoder_graph),
            ("decoder", model.decoder, decoder_graph),
        ):
            if stack is not None:
                proto = build(model, weights, file)
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
