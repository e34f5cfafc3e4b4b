"""Conversion of values that several families share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sightline.export.families.description import Activation, Attention
from sightline.export.families.weights import Array
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config

MAX_COUNT = 1000  # of layers or heads
MAX_HEAD_SIZE = 4096
MAX_WINDOW = 2**31 - 1  # the operators have 32 bits for it
LAYER_KINDS = ("sliding_attention", "full_attention")

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_10": "gelu_10",
    "gelu_accurate": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "mish": "mish",
    "tanh": "tanh",
}


def activation(name: str) -> Activation:
    """Return the activation of a configuration's name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"the activation {name} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def count(config: Config, key: str, default: int | None = None) -> int:
    """Return a number of layers or heads, at least 1 and at most what any model has."""
    return config.integer(key, default, least=1, most=MAX_COUNT)


def equal_heads(config: Config, key: str, width: int) -> Attention:
    """Return attention whose heads share the width equally."""
    heads = count(config, key)
    if width < 1 or width % heads:
        raise ValueError(f"{key} must be a divisor of the width {width}, got {heads}")
    return Attention(heads, heads, width // heads, scale=(width // heads) ** -0.5)


def of_layers(config: Config, key: str, supported: Sequence[object], layers: int) -> list[Any] | None:
    """Return the value of a key for each layer, None if the key is missing or null."""
    values = config.get(key, None)
    if values is None or (
        isinstance(values, list) and len(values) == layers and all(one in supported for one in values)
    ):
        return values
    raise ImportFailedError(f"config.json: {key} must have {layers} values, each {' or '.join(map(str, supported))}")


def local_layers(config: Config, defaults: Sequence[bool]) -> list[bool]:
    """Return for each layer whether it has a window: `layer_types`, or else the defaults."""
    kinds = of_layers(config, "layer_types", LAYER_KINDS, len(defaults))
    return list(defaults) if kinds is None else [kind == "sliding_attention" for kind in kinds]


def check_rotary_head(size: int) -> None:
    """Check that the size of a head with rotary embedding is even and not too large."""
    if size % 2 or size > MAX_HEAD_SIZE:
        raise ImportFailedError(
            f"config.json: the size of a head must be even and at most {MAX_HEAD_SIZE} for rotary embedding, got {size}"
        )


def sinusoids(positions: int, width: int) -> Array:
    """Return sinusoids (P, M) as the models of this project have them (Vaswani et al. 2017).

    They equal those of `sightline.model.layers.embedding.sinusoidal_positions` in PyTorch.
    """
    rates = 10000.0 ** (-np.arange(0, width, 2, dtype=np.float64) / width)  # (M / 2,)
    angles = np.arange(positions, dtype=np.float64)[:, None] * rates  # (P, M / 2)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(positions, -1).astype(np.float32)


def timescale_sinusoids(positions: int, width: int, first: int = 0) -> Array:
    """Return sinusoids (P, M) from position `first`, as fairseq and Marian have them.

    They are float32 as in training. Sines are in the first half of a row and cosines in the second.
    Unlike those of Vaswani et al. 2017, the frequencies end at exactly 1 / 10000.
    """
    half = width // 2
    frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1)))
    angles = np.arange(first, first + positions, dtype=np.float32)[:, None] * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, [(0, 0), (0, width - 2 * half)])
