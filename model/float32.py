"""Size of float32 rounding errors, from which limits of comparisons are derived.

A float32 product of n terms equals the exact product with weights that differ from the given ones
by a relative error of about sqrt(n) * u, where u = 2**-24 is the unit roundoff (N. Higham and T.
Mary, "A new approach to probabilistic rounding error analysis", 2019; the worst case is n * u).
Functions such as exp, tanh and division add a few u.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIT_ROUNDOFF = 2.0**-24  # largest relative error of one float32 operation
ELEMENTARY = 4  # error of a function of one value, such as exp or tanh, in units of UNIT_ROUNDOFF


def rounding_error(terms: int) -> float:
    """Return the relative error of a float32 sum of products that rounding explains."""
    return float((ELEMENTARY + terms**0.5) * UNIT_ROUNDOFF)


def max_abs(array: NDArray[Any]) -> float:
    """Return the largest absolute value; NaN if the array contains NaN, and 0 if it is empty."""
    return float(np.max(np.abs(array), initial=0.0))
