"""Kernels of `CompiledPasses`.

They read fp32 and compute in fp64: vectorized, this is as fast as memory. Numba infers the types;
pyproject.toml excludes this file from mypy.
"""

import numpy as np
from numba import njit

from probmask.core.kernel_cache import cached_njit
from probmask.core.vector_math import bits_of, float_of

# "reassoc" lets LLVM vectorize a sum; the order of its terms depends only on their number. "nnan"
# is safe, because the projection raises first if `survey` finds a NaN.
_SUMS = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "nnan"},
}
_PLAIN = {"nogil": True, "error_model": "numpy"}
_SIGN, _MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)
_LEAST, _MOST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)


@cached_njit(**_PLAIN)
def survey(z):
    """Return the smallest and the largest entry; one of them is infinite or NaN if an entry is.

    Compares integers in the order of the floats, in which NaNs are beyond the infinities. Minimum
    and maximum of integers are vectorized and, unlike those of floats, do not lose a NaN.
    """
    low, high = _MOST, _LEAST
    for i in range(len(z)):
        bits = bits_of(z[i])
        rank = np.int32(bits ^ np.int32(np.int32(bits >> _SIGN) & _MAGNITUDE))
        low, high = min(low, rank), max(high, rank)
    return _float_of_rank(low), _float_of_rank(high)


@njit(inline="always")
def _float_of_rank(rank):
    return float_of(np.int32(rank ^ np.int32(np.int32(rank >> _SIGN) & _MAGNITUDE)))


@njit(inline="always")
def _clipped(z, shift):
    return min(max(np.float64(z) - shift, 0.0), 1.0)


@cached_njit(**_SUMS)
def clipped_sum(z, shift):
    """Σ clip(z - shift, 0, 1)."""
    total = 0.0
    for i in range(len(z)):
        total += _clipped(z[i], shift)
    return total


@cached_njit(**_SUMS)
def sum_and_count(z, shift):
    """Return Σ s with s = clip(z - shift, 0, 1), and the number of entries with 0 < s < 1."""
    total, between = 0.0, 0
    for i in range(len(z)):
        s = _clipped(z[i], shift)
        total += s
        between += (s > 0.0) & (s < 1.0)
    return total, between


@cached_njit(**_SUMS)
def write(z, shift):
    """z ← clip(z - shift, 0, 1), in place."""
    for i in range(len(z)):
        z[i] = _clipped(z[i], shift)


@cached_njit(**_SUMS)
def write_mixed(z, one, other, share):
    """z ← share clip(z - one, 0, 1) + (1 - share) clip(z - other, 0, 1), in place."""
    for i in range(len(z)):
        z[i] = share * _clipped(z[i], one) + (1.0 - share) * _clipped(z[i], other)
