"""Pictures of attention maps as SVG: the maps to request, and the drawing of a result."""

import numpy as np

from sightline.base.bundle import Manifest
from sightline.service import drawing
from sightline.service.api_errors import ApiError
from sightline.service.drawing import View
from sightline.service.inference.maps import TargetAttention
from sightline.service.parameters import AttentionSelection


def selection_to_draw(manifest: Manifest, selection: AttentionSelection, view: View) -> AttentionSelection:
    """Return the maps to request for a picture, with defaults for what a selection leaves out.

    A picture shows one kind of attention: cross-attention if the model has it. A grid shows all
    heads. The other views show the mean over the selected heads: by default those that align words
    best for cross-attention, and all heads of the last layer for other kinds. Rows of a picture are
    steps that write, so that heads that align words at the step that reads are no default.
    """
    available = [attention.kind for attention in manifest.attention]
    if not available:
        raise ApiError("unsupported_parameter", f"{manifest.name} has no attention maps.", field="draw")
    if selection.kinds is not None and len(selection.kinds) > 1:
        raise ApiError("invalid_parameter", "A picture shows one kind of attention; select one.", field="kinds")
    kind = selection.kinds[0] if selection.kinds else next(each for each in drawing.TITLES if each in available)
    changes: dict[str, object] = {"kinds": [kind], "encoding": "float", "reduce": "none"}
    if view == "heads":
        return selection.model_copy(update=changes)
    if selection.layers is not None and len(selection.layers) > 1:
        message = "A picture of this view shows one layer; select one, or the view heads."
        raise ApiError("invalid_parameter", message, field="layers")
    if selection.layers is None:
        alignment = manifest.alignment if kind == "cross" and selection.method == "weights" else None
        if alignment is not None and alignment.step == "reads":
            alignment = None
        changes["layers"] = [-1 if alignment is None else alignment.layer]
        if alignment is not None and selection.heads is None:
            changes["heads"] = list(alignment.heads)
    changes["reduce"] = "max" if selection.reduce == "max" else "mean"
    return selection.model_copy(update=changes)


def draw(model: str, output: TargetAttention, selection: AttentionSelection, view: View) -> str:
    """Return the SVG of maps that were requested with a selection of `selection_to_draw`."""
    (maps,) = output.maps
    labels = drawing.axis_labels(maps.kind, vars(output), maps.shape[-1])
    weights = np.asarray(maps.data, np.float32).reshape(maps.shape)
    reduction = "maximum" if selection.reduce == "max" else "mean"
    title = f"{model}: {drawing.TITLES[maps.kind]}"
    return drawing.draw(view, title, maps.layers, maps.heads, labels, weights, reduction)
