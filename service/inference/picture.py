"""Pictures of attention maps as SVG: the maps to request, and the drawing of a result."""

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from sightline.base.bundle import Manifest, MapKind
from sightline.service import drawing
from sightline.service.api_errors import ApiError
from sightline.service.drawing import Matrix
from sightline.service.inference.maps import AttentionMap, TargetAttention
from sightline.service.parameters import AttentionSelection

View = Literal["heatmap", "alignment", "heads"]
PREFERRED: tuple[MapKind, ...] = ("cross", "encoder", "decoder", "encoder_slots")
TITLES: dict[MapKind, str] = {
    "encoder": "Encoder self-attention",
    "encoder_slots": "Encoder attention to projected keys",
    "cross": "Cross-attention",
    "decoder": "Decoder self-attention",
}

_MARKS = {" ": "␣", "\n": r"\n", "\t": r"\t", "\r": r"\r"}
# All but whitespace and characters without width; `visible` of the page does the same.
_VISIBLE = re.compile(
    "[^\\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]"
)


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
    kind = selection.kinds[0] if selection.kinds else next(map_kind for map_kind in PREFERRED if map_kind in available)
    changes: dict[str, object] = {"kinds": [kind], "encoding": "float", "reduce": "none"}
    if view == "heads":
        return selection.model_copy(update=changes)
    if selection.layers is not None and len(selection.layers) > 1:
        message = "A picture of this view shows one layer; select one, or the view heads."
        raise ApiError("invalid_parameter", message, field="layers")
    if selection.layers is None:
        alignment = manifest.alignment if kind == "cross" else None
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
    rows, columns = _labels(output, maps)
    weights = np.asarray(maps.data, np.float32).reshape(maps.shape)
    if view == "heads":
        grid = [
            (layer, [(head, Matrix("", rows, columns, weights[i, j])) for j, head in enumerate(maps.heads)])
            for i, layer in enumerate(maps.layers)
        ]
        return drawing.heads(f"{model}: {TITLES[maps.kind]}", grid)
    reduction = "maximum" if selection.reduce == "max" else "mean"
    heads = f"head {maps.heads[0]}" if len(maps.heads) == 1 else f"{reduction} of {len(maps.heads)} heads"
    title = f"{model}: {TITLES[maps.kind]}, layer {maps.layers[0]}, {heads}"
    matrix = Matrix(title, rows, columns, weights[0, 0])
    return drawing.alignment(matrix) if view == "alignment" else drawing.heat_map(matrix)


def _labels(output: TargetAttention, maps: AttentionMap) -> tuple[Sequence[str], Sequence[str]]:
    """Return the labels of the rows and columns of a map."""
    source, target = _visible(output.source_tokens), _visible(output.target_tokens)
    if maps.kind == "cross":
        return target, source
    if maps.kind == "decoder":
        return target, _visible(output.decoder_input_tokens)
    return source, source if maps.kind == "encoder" else [f"key {index}" for index in range(maps.columns)]


def _visible(tokens: Sequence[str]) -> list[str]:
    """Return tokens without whitespace around them, and those of invisible characters as marks."""
    return [
        token.strip() if _VISIBLE.search(token) else "".join(_MARKS.get(c, f"\\u{ord(c):04x}") for c in token)
        for token in tokens
    ]
