"""Graphs of described models in a folder, without a tokenizer."""

from pathlib import Path
from typing import Any

from sightline.base.bundle import Limits, Manifest, Tokens
from sightline.export.families.description import Description
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.model import build_graphs
from sightline.export.writing import WEIGHTS, write_graphs


def write_bundle(folder: Path, model: Description, weights: Weights, positions: int) -> Manifest:
    """Write the graphs of a model, and return a manifest that is sufficient for their verification.

    Args:
        folder: an existing folder.
        model: description of the model.
        weights: its weights.
        positions: limit of the length of sequences, if that of the model is not lower.
    """
    with WeightFile(folder / WEIGHTS) as file:
        graphs = build_graphs(model, weights, file)
    entries: dict[str, Any] = {"encoder": None, "decoder": None, "predict": None, **write_graphs(folder, vars(graphs))}
    positions = min(model.max_positions, positions)
    return Manifest.model_construct(
        parameters=1,
        tokens=Tokens(pad_id=0, start_ids=(0,), end_ids=(1,)),
        decoder_start=graphs.decoder_start,
        limits=Limits(max_source_tokens=positions, max_target_tokens=positions, vocabulary=model.vocabulary),
        states=graphs.states,
        attention=graphs.attention,
        **entries,
    )
