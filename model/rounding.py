"""Limits of the error that float32 rounding causes in a model's results, on any processor.

Libraries add the terms of a product in an order of their own, which depends on the processor and on the sizes. So two
correct programs differ, and by how much depends on the model: one whose attention scores reach 100, or whose state is
fed back for 80 steps, magnifies every rounding error.

The limits follow from backward error analysis. A float32 product of n terms is the exact product of weights that
differ from the given ones by a relative error of about sqrt(n) * u, where u = 2**-24 is the unit roundoff (N. Higham
and T. Mary, "A new approach to probabilistic rounding error analysis", 2019; the worst case is n * u). Functions such
as exp, tanh and division add a few u. With e = (4 + sqrt(n)) * u, where n is the largest number of terms in the
model, a float32 result is accepted if it lies no farther from the exact one, computed in float64, than the exact
results of models whose weights were moved by e times a standard normal number, plus e times the largest result for
the last operation. Depth, steps, and the size of scores need no constants of their own: the moved models contain
them.

In the small copies of all trained systems, ONNX Runtime and PyTorch in float32 reach a quarter of these limits.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

UNIT_ROUNDOFF = 2.0**-24  # of float32: the largest relative error of one rounded operation
ELEMENTARY = 4  # unit roundoffs of a function of one value, such as exp or tanh
PAIRS = 3  # of moved models

AnyModel = TypeVar("AnyModel", bound=nn.Module)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Reference(Generic[AnyModel]):
    """A model in float64, and models that differ from it by as much as float32 rounding may."""

    exact: AnyModel
    moved: tuple[AnyModel, ...]

    def limits(
        self, compute: Callable[[AnyModel], Mapping[str, Array]]
    ) -> tuple[Mapping[str, Array], dict[str, float]]:
        """Return the exact arrays that `compute` gives, and how far float32 results may lie from each."""
        exact = compute(self.exact)
        limits = dict.fromkeys(exact, 0.0)
        for model in self.moved:
            for name, array in compute(model).items():
                limits[name] = float(np.maximum(limits[name], largest(array - exact[name])))  # keeps NaN
        error = relative_error(self.exact)
        return exact, {name: limits[name] + error * largest(array) for name, array in exact.items()}


def reference(model: AnyModel, pairs: int = PAIRS) -> Reference[AnyModel]:
    """Copy a model to float64 and move the weights of the copy, always in the same random directions.

    Each direction is taken forwards and backwards, so that a hard decision near a tie (the largest weight, the edge of
    a window) falls both ways. Several directions are needed because one may by chance leave a result where it is.
    """
    exact = copy.deepcopy(model).double()
    return Reference(exact, tuple(_moved(exact, seed, sign) for seed in range(pairs) for sign in (1, -1)))


def largest(array: Array) -> float:
    """Return the largest absolute value, NaN if there is one, 0 if the array is empty."""
    return float(np.max(np.abs(array), initial=0.0))


def rounding_error(terms: int) -> float:
    """Return the relative error of a float32 sum of products that rounding explains."""
    return float((ELEMENTARY + terms**0.5) * UNIT_ROUNDOFF)


def relative_error(model: nn.Module) -> float:
    """Return `rounding_error` of the model's longest sum of products."""
    return rounding_error(max(parameter.size(-1) for parameter in model.parameters() if parameter.dim() >= 2))


@torch.no_grad()
def _moved(exact: AnyModel, seed: int, sign: int) -> AnyModel:
    model, generator = copy.deepcopy(exact), torch.Generator().manual_seed(seed)
    error = sign * relative_error(exact)
    for parameter in model.parameters():
        parameter.mul_(1 + error * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model
