"""Linear layers of pooled vectors, which some sentence-transformers models have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import BundleError, Dense

Array = NDArray[np.float32]


@dataclass(frozen=True)
class DenseLayer:
    """A layer with its weights, see `sightline.base.bundle.Dense`."""

    weight: Array  # (outputs, inputs)
    bias: Array | None  # (outputs,)
    activation: Literal["identity", "tanh"]

    def apply(self, vector: Array) -> Array:
        """Return the output (outputs,) for a vector (inputs,)."""
        # `einsum` starts no threads, unlike BLAS, and so takes no processors from the engine.
        output: Array = np.einsum("oi,i->o", self.weight, vector)
        if self.bias is not None:
            output = output + self.bias
        return np.tanh(output) if self.activation == "tanh" else output


def read_dense(folder: Path, layer: Dense) -> DenseLayer:
    """Read the weights of a layer from a bundle. Raises `BundleError`."""
    path = folder / layer.file
    values = np.fromfile(path, "<f4").astype(np.float32, copy=False)
    expected = layer.outputs * (layer.inputs + layer.has_bias)
    if len(values) != expected or path.stat().st_size != values.nbytes:
        raise BundleError(f"{path} must have {expected} numbers, got {len(values)}; export the bundle again")
    if not np.isfinite(values).all():
        raise BundleError(f"{path} has weights that are not finite numbers (NaN or infinity); export the bundle again")
    weight, bias = np.split(values, [layer.outputs * layer.inputs])
    return DenseLayer(weight.reshape(layer.outputs, layer.inputs), bias if layer.has_bias else None, layer.activation)
