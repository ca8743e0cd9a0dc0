"""Passes of the projection, compiled. Mypy is told in pyproject.toml that Numba has the types.

What reads an fp32 number computes in fp64: as vector code this takes no longer than memory does.
"""

import numpy as np
from numba import njit

from probmask.core.vector_math import bits_of, float_of

# Reordered, or a sum would be one long chain; in the same way for the same length. `survey` has
# made sure that there is no NaN.
_SUMS = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "nnan"},
}
_PLAIN = {"nogil": True, "cache": True, "error_model": "numpy"}
_SIGN, _MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)
_LEAST, _MOST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)


@njit(**_PLAIN)
def survey(z):
    """Least and largest entry; one of them is not finite, or NaN, if some entry is.

    By integers in the order of the floats, beyond whose infinities the NaNs lie: those have vector
    instructions that lose none.
    """
    low, high = _MOST, _LEAST
    for i in range(len(z)):
        bits = bits_of(z[i])
        rank = np.int32(bits ^ np.int32(np.int32(bits >> _SIGN) & _MAGNITUDE))
        low, high = min(low, rank), max(high, rank)
    return _ranked(low), _ranked(high)


@njit(inline="always")
def _ranked(rank):
    return float_of(np.int32(rank ^ np.int32(np.int32(rank >> _SIGN) & _MAGNITUDE)))


@njit(inline="always")
def _clipped(z, shift):
    return min(max(np.float64(z) - shift, 0.0), 1.0)


@njit(**_SUMS)
def kept(z, shift):
    """Σ clip(z - shift, 0, 1)."""
    total = 0.0
    for i in range(len(z)):
        total += _clipped(z[i], shift)
    return total


@njit(**_SUMS)
def spent(z, shift):
    """The same, and how many entries are strictly between 0 and 1 after it."""
    total, between = 0.0, 0
    for i in range(len(z)):
        s = _clipped(z[i], shift)
        total += s
        between += (s > 0.0) & (s < 1.0)
    return total, between


@njit(**_SUMS)
def write(z, shift):
    """z <- clip(z - shift, 0, 1)."""
    for i in range(len(z)):
        z[i] = _clipped(z[i], shift)


@njit(**_SUMS)
def write_mixed(z, one, other, share):
    """z <- share clip(z - one, 0, 1) + (1 - share) clip(z - other, 0, 1)."""
    for i in range(len(z)):
        z[i] = share * _clipped(z[i], one) + (1.0 - share) * _clipped(z[i], other)
