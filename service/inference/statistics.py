"""Statistics of attention heads, computed from their maps of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Weights = NDArray[np.float64]


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of one head in one map of tokens, as means over the rows.

    The weights of each row are divided by their sum, and rows whose sum is 0 are left out. All
    values are null for a map with negative weights, and for a map without rows.
    """

    layer: Annotated[int, Field(description="Index of the layer.")]
    head: Annotated[int, Field(description="Index of the head.")]
    entropy: Annotated[
        float | None, Field(description="Entropy of the weights in bits: 0 if a row attends to one token only.")
    ]
    mean_distance: Annotated[
        float | None,
        Field(
            description="Distance between the token of the row and the weighted mean position of the columns: in "
            "tokens for self-attention, as a share of the length for cross-attention. Null if the columns are not "
            "tokens."
        ),
    ]
    special_share: Annotated[
        float | None,
        Field(description="Share of the weight on special tokens. Null if the columns are not tokens."),
    ]
    diagonal_share: Annotated[
        float | None,
        Field(description="Share of the weight of a token on itself; only for self-attention between tokens."),
    ]
    alignment_agreement: Annotated[
        float | None,
        Field(
            description="Share of rows whose strongest column is that of the heads that align words, see "
            "`POST /v1/align`; special tokens and rows without aligned weights are left out. Only for "
            "cross-attention."
        ),
    ]


@dataclass(frozen=True)
class MapAxes:
    """The tokens that the rows and columns of the maps of one kind stand for."""

    special_rows: NDArray[np.bool_]  # (R,)
    special_columns: NDArray[np.bool_] | None  # (C,); None if the columns are not tokens
    # Index of the column with the token of row 0, for self-attention between tokens. The token of
    # row i is in column `first + i`.
    first: int | None = None


def head_statistics(
    maps: NDArray[np.float32],
    layers: Sequence[int],
    heads: Sequence[int],
    axes: MapAxes,
    alignment: NDArray[np.float32] | None = None,
) -> list[HeadStatistics]:
    """Return the statistics of the selected heads, sorted as they are selected.

    `maps` are the weights (L, H, R, C) of the selected layers and heads. `alignment` are weights
    (R, C) that align words, only for cross-attention; a row of zeros is not compared.
    """
    is_cross = axes.special_columns is not None and axes.first is None
    best = aligned = np.zeros(0, np.intp)
    if alignment is not None:
        best = _strongest(alignment, axes)
        aligned = np.flatnonzero(alignment[~axes.special_rows].any(axis=-1))
    statistics: list[HeadStatistics] = []
    for layer, of_layer in zip(layers, maps, strict=True):
        for head, of_head in zip(heads, of_layer, strict=True):  # one at a time, to limit the memory
            raw_weights = of_head.astype(np.float64)
            rows = np.flatnonzero(raw_weights.sum(axis=-1) > 0)
            if raw_weights.size == 0 or raw_weights.min() < 0 or not len(rows):
                statistics.append(HeadStatistics(layer, head, None, None, None, None, None))
                continue
            weights = raw_weights[rows] / raw_weights[rows].sum(axis=-1, keepdims=True)
            distance = special = diagonal = agreement = None
            if axes.special_columns is not None:
                distance = _mean_distance(weights, rows, len(raw_weights), axes.first)
                special = float(weights[:, axes.special_columns].sum(axis=-1).mean())
            if axes.first is not None:
                diagonal = float(weights[np.arange(len(rows)), axes.first + rows].mean())
            if is_cross and len(best) and len(aligned):
                agreement = float(np.mean((_strongest(of_head, axes) == best)[aligned]))
            statistics.append(HeadStatistics(layer, head, _entropy(weights), distance, special, diagonal, agreement))
    return statistics


def _entropy(weights: Weights) -> float:
    """Return the mean entropy of the rows in bits, where 0 log 0 is 0."""
    logarithms = np.log2(weights, where=weights > 0, out=np.zeros_like(weights))
    return max(0.0, float(-(weights * logarithms).sum(axis=-1).mean()))  # never -0.0


def _mean_distance(weights: Weights, rows: NDArray[np.intp], num_rows: int, first: int | None) -> float:
    """Return the mean distance of the rows; positions of two texts are shares of their lengths."""
    num_columns = weights.shape[1]
    centres = weights @ np.arange(num_columns)
    if first is not None:
        return float(np.abs(first + rows - centres).mean())
    return float(np.abs((rows + 0.5) / num_rows - (centres + 0.5) / num_columns).mean())


def _strongest(weights: NDArray[np.float32], axes: MapAxes) -> NDArray[np.intp]:
    """Return the strongest column of each row, both without special tokens."""
    assert axes.special_columns is not None, "the columns of cross-attention are tokens"
    kept = weights[~axes.special_rows][:, ~axes.special_columns]
    return kept.argmax(axis=-1) if kept.size else np.zeros(0, np.intp)
