"""Outputs of the encoder that requests need, and the labels and predicted tokens of one request."""

from collections.abc import Iterable, Mapping

import numpy as np

from sightline.base.bundle import LABEL_LOGITS, LABEL_OUTPUTS, TOKEN_LABEL_KINDS, Manifest
from sightline.service.engine.checks import checked_outputs
from sightline.service.engine.recorded_maps import ENCODER_KINDS, map_outputs
from sightline.service.engine.request import EncodeRequest, GenerateRequest, Request
from sightline.service.runtime.runner import Array, Runner

# Positions whose logits are computed at a time for the largest logit of each token.
PREDICTED_ROWS = 64


def encoder_outputs(manifest: Manifest, requests: Iterable[Request]) -> tuple[str, ...]:
    """Return the encoder outputs that a batch needs, in the order of the graph."""
    names: set[str | None] = set()
    for request in requests:
        if isinstance(request, GenerateRequest):
            names.update(state.encoder_output for state in manifest.states)
            names.update(checked_outputs(manifest.states))
        else:
            names.add("hidden")
            names.add(_label_output(manifest, request))
        names |= map_outputs(manifest, request.attention, ENCODER_KINDS)
    return tuple(name for name in manifest.encoder_graph.outputs if name in names)


def _label_output(manifest: Manifest, request: EncodeRequest) -> str | None:
    """Return the encoder output with the labels that a request needs, None if it needs none."""
    if request.return_logits:
        return LABEL_LOGITS
    return LABEL_OUTPUTS[manifest.label_kind] if request.return_labels else None


def label_scores(manifest: Manifest, request: EncodeRequest, encoded: Mapping[str, Array], index: int) -> Array | None:
    """Return the scores of the labels for one request: (C,), or (S, C) for those of tokens."""
    output = _label_output(manifest, request)
    if output is None:
        return None
    scores = encoded[output][index]
    is_of_tokens = manifest.label_kind in TOKEN_LABEL_KINDS
    labels: Array = (scores[: len(request.source_ids)] if is_of_tokens else scores).astype(np.float32)
    return labels


def predict(runner: Runner, request: EncodeRequest, hidden: Array) -> tuple[Array | None, Array | None]:
    """Return the logits (N, V) and the largest logits (V,) that a request needs.

    The logits of a whole text would need much memory: those of a few positions exist at once.
    """
    predictions: Array | None = None
    largest: Array | None = None
    if request.predicted:
        predictions = runner.predict(hidden[list(request.predicted)]).astype(np.float32)
    for start in range(0, len(hidden) if request.return_largest else 0, PREDICTED_ROWS):
        maxima = runner.predict(hidden[start : start + PREDICTED_ROWS]).max(axis=0).astype(np.float32)
        largest = maxima if largest is None else np.maximum(largest, maxima)
    return predictions, largest
