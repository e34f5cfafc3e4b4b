"""Conversion of values that several families share."""

import math
from collections.abc import Mapping

import numpy as np

from export.errors import ImportFailedError
from export.families.description import Activation
from export.families.weights import Array
from export.sources.checkpoint import Tensors

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def activation(name: str) -> Activation:
    """Return the activation of a configuration's name.

    Raises:
        ValueError: it is not supported.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"the activation {name} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def timescale_sinusoids(positions: int, width: int, first: int = 0) -> Array:
    """Return sinusoids (P, M) as fairseq and Marian have them, in float32 as in training.

    Sines are in the first half of a row and cosines in the second. Unlike those of Vaswani et al.
    2017, the frequencies end at exactly 1 / 10000.

    Args:
        positions: number of rows.
        width: M.
        first: position of the first row.
    """
    half = width // 2
    frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1)))
    angles = np.arange(first, first + positions, dtype=np.float32)[:, None] * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, [(0, 0), (0, width - 2 * half)])


def check_shapes(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that tensors exist with the shapes that follow from the configuration.

    Args:
        tensors: the checkpoint.
        shapes: all tensors that are used, by name.

    Raises:
        ImportFailedError: a tensor is missing or has another shape, or a module has a bias that the
            configuration excludes.
    """
    for name, shape in shapes.items():
        stored = tensors.shape(name)
        if stored != shape:
            raise ImportFailedError(
                f"the tensor {name!r} has the shape {list(stored)}, but config.json implies {list(shape)}; "
                "config.json may belong to another checkpoint"
            )
        bias = f"{name.removesuffix('weight')}bias"
        if name.endswith(".weight") and bias in tensors and bias not in shapes:
            raise ImportFailedError(
                f"the checkpoint has a tensor {bias!r}, but its architecture and config.json exclude this bias; "
                "config.json may belong to another checkpoint"
            )
