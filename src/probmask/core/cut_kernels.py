"""Passes of the magnitude cut, compiled. Mypy is told in pyproject.toml that Numba has the types.

The bits of a float that is not negative, read as an integer, are in the order of the floats.
"""

import numpy as np
from numba import njit

from probmask.core.vector_math import bits_of

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
LOW = 15  # bits of the second digit; the first has the 16 above it
_LOW = np.int32(LOW)
_LOW_MASK = np.int32((1 << LOW) - 1)


@njit(**_OPTIONS)
def count_first(x, scale, counts):
    """Count the first digits of |x| scale."""
    for i in range(len(x)):
        counts[bits_of(abs(x[i]) * scale) >> _LOW] += 1


@njit(**_OPTIONS)
def count_second(x, scale, first, counts):
    """Count the second digits of those with this first digit."""
    for i in range(len(x)):
        bits = bits_of(abs(x[i]) * scale)
        if bits >> _LOW == first:
            counts[bits & _LOW_MASK] += 1


@njit(**_OPTIONS)
def mark(x, scale, cut, out):
    """out = |x| scale > cut, by their bits; how many are equal, and the largest below, or -1."""
    equal = 0
    below = np.int32(-1)
    for i in range(len(x)):
        bits = bits_of(abs(x[i]) * scale)
        out[i] = bits > cut
        equal += bits == cut
        below = max(below, bits if bits < cut else np.int32(-1))
    return equal, below
