"""Rounding limits for float32 results; `sightline.model.rounding` derives them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.model.float32 import rounding_error
from sightline.model.rounding import AnyModel, Reference

Compute = Callable[[AnyModel], Mapping[str, NDArray[Any]]]


def rounding_bound(terms: int, magnitude: float = 1.0) -> float:
    """Return the rounding limit of a float32 sum: (4 + sqrt(terms)) * 2**-24 * magnitude.

    Args:
        terms: number of products in the sum, in any order.
        magnitude: sum of their absolute values, or an upper bound.
    """
    return rounding_error(terms) * magnitude


def assert_within_rounding(
    models: Reference[AnyModel], compute: Compute[AnyModel], given: Mapping[str, NDArray[Any]]
) -> None:
    """Compare float32 arrays of a bundle with the model in float64, within rounding limits.

    Args:
        models: the model in float64, see `sightline.model.rounding.reference`.
        compute: the arrays that a model gives, by name.
        given: the served arrays, by the same names.
    """
    expected, limits = models.limits(compute)
    assert given.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(given[name], array, rtol=0, atol=limits[name], err_msg=name)


def rows_sum_to_one(weights: NDArray[Any]) -> bool:
    """Return True if float32 attention weights sum to 1 over the last axis, up to rounding."""
    columns = weights.shape[-1]
    return bool(np.abs(weights.astype(np.float64).sum(axis=-1) - 1).max() <= rounding_bound(columns))
