"""Attention maps of responses as arrays, quantities computed from them, and pictures of all heads.

Shapes use L layers, H heads, R rows and C columns of a map, S source tokens.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

Weights = NDArray[np.float64]
LIGHT_TEXT = 0.6  # text on darker cells than this share of the colour range is white


def array_of(entry: Mapping[str, Any]) -> Weights:
    """Return a map of a response in base64, (L, H, R, C)."""
    return np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(entry["shape"]).astype(np.float64)


def rollout(weights: Weights) -> Weights:
    """Return the attention rollout up to each layer (Abnar and Zuidema 2020, section 3), (L, S, S):
    the product over the layers of (A + I) / 2, where A is the mean over the heads of self-attention
    (L, H, S, S).
    """
    product, products = np.eye(weights.shape[-1]), []
    for layer in weights.mean(axis=1):
        product = (layer + np.eye(len(layer))) / 2 @ product
        products.append(product)
    return np.stack(products)


def entropies(weights: Weights) -> Weights:
    """Return the entropy of each row in bits, (..., R) from (..., R, C); 0 log 0 is 0."""
    logarithms = np.log2(weights, where=weights > 0, out=np.zeros_like(weights))
    bits: Weights = np.abs((weights * logarithms).sum(axis=-1))
    return bits


def share_of_rank(weights: Weights, share: float) -> float:
    """Return the smallest number of singular values of a map of one head (R, C) with `share` of the
    sum of all, as in figure 1 of Wang et al. 2020, divided by the number of all.
    """
    curve = cumulative(weights)
    return float(np.searchsorted(curve, share - 1e-9) + 1) / len(curve)


def cumulative(weights: Weights) -> Weights:
    """Return the share of the first 1, 2, ... singular values in the sum of all, (min(R, C),)."""
    values = np.linalg.svd(weights, compute_uv=False)
    shares: Weights = np.cumsum(values) / values.sum()
    return shares


def draw_cells(axes: Axes, values: Weights, columns: Sequence[str], cell: Callable[[float], str], top: float) -> None:
    """Draw a table of numbers (L, columns) whose rows are layers, darker for larger values, from
    white for 0 to the darkest colour for `top`. `cell` formats a number.
    """
    axes.imshow(values, cmap="Blues", vmin=0, vmax=top, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(values)), [f"layer {index}" for index in range(len(values))])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value > LIGHT_TEXT * top else "black"
        axes.text(column, row, cell(float(value)), ha="center", va="center", color=colour, fontsize=7)
