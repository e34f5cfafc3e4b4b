"""Bounds on the error that float32 rounding causes in a model's results, on any processor.

Libraries sum the terms of a product in different orders, depending on the processor and on the
sizes. Two correct programs therefore give different results. The size of the difference depends on
the model: attention scores near 100, or a state that is fed back for 80 steps, amplify every
rounding error.

The limits follow from backward error analysis. Let e be the relative error of
`sightline.model.float32` for the largest number of terms of a product in the model. The exact
result is computed in float64, and so are the results of perturbed models, whose weights are
multiplied by 1 + e * z with z from the standard normal distribution. A float32 result is accepted
if its distance from the exact result is at most the largest distance of a perturbed model's result,
plus e times the largest result for the rounding of the last operation. The limits need no constants
for depth, number of steps or size of scores, because the perturbed models have the same ones.

On small copies of all trained systems, ONNX Runtime and PyTorch in float32 reach a quarter of these
limits.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sightline.model.float32 import max_abs, rounding_error

PAIRS = 3  # number of pairs of perturbed models

AnyModel = TypeVar("AnyModel", bound=nn.Module)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Reference(Generic[AnyModel]):
    """Model in float64, and copies with perturbations the size of float32 rounding."""

    exact: AnyModel
    perturbed: tuple[AnyModel, ...]

    def limits(
        self, compute: Callable[[AnyModel], Mapping[str, Array]]
    ) -> tuple[Mapping[str, Array], dict[str, float]]:
        """Return the exact float64 arrays that `compute` returns by name, and by name the largest
        absolute difference that float32 rounding explains.
        """
        exact = compute(self.exact)
        limits = dict.fromkeys(exact, 0.0)
        for model in self.perturbed:
            for name, array in compute(model).items():
                limits[name] = float(np.maximum(limits[name], max_abs(array - exact[name])))  # keeps NaN
        error = relative_error(self.exact)
        return exact, {name: limits[name] + error * max_abs(array) for name, array in exact.items()}


def reference(model: AnyModel, pairs: int = PAIRS) -> Reference[AnyModel]:
    """Copy a model to float64 and perturb the weights of further copies, with fixed random seeds.

    Each random direction is used with both signs, so that a discrete decision near a tie (the
    largest weight, the edge of a window) has both outcomes. Several directions are needed, because
    a single one may leave a result unchanged by chance.
    """
    exact = copy.deepcopy(model).double()
    return Reference(exact, tuple(_perturbed(exact, seed, sign) for seed in range(pairs) for sign in (1, -1)))


def relative_error(model: nn.Module) -> float:
    """Return `rounding_error` of the model's longest sum of products."""
    return rounding_error(max(parameter.size(-1) for parameter in model.parameters() if parameter.dim() >= 2))


@torch.no_grad()
def _perturbed(exact: AnyModel, seed: int, sign: int) -> AnyModel:
    model, generator = copy.deepcopy(exact), torch.Generator().manual_seed(seed)
    error = sign * relative_error(exact)
    for parameter in model.parameters():
        parameter.mul_(1 + error * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model
