"""Kernels of `MagnitudeSearch`: passes over the bits of |x| scale.

The bits of a nonnegative float, read as an integer, have the order of the floats. Numba infers the
types; pyproject.toml excludes this file from mypy.
"""

import numpy as np

from probmask.core.kernel_cache import cached_njit
from probmask.core.vector_math import bits_of

_OPTIONS = {"nogil": True, "error_model": "numpy"}
LOW = 15  # number of lower bits; there are 16 upper bits
_LOW = np.int32(LOW)
_BLOCK = 64  # entries handled together
_LOW_MASK = np.int32((1 << LOW) - 1)


@cached_njit(**_OPTIONS)
def count_upper(x, scale, counts):
    """Add the histogram of the upper bits of |x| scale to ``counts``."""
    for i in range(len(x)):
        counts[bits_of(abs(x[i]) * scale) >> _LOW] += 1


@cached_njit(**_OPTIONS)
def count_lower(x, scale, upper, counts):
    """Add the histogram of the lower bits of the entries with these upper bits to ``counts``."""
    for i in range(len(x)):
        bits = bits_of(abs(x[i]) * scale)
        if bits >> _LOW == upper:
            counts[bits & _LOW_MASK] += 1


@cached_njit(**_OPTIONS)
def count_window(x, scale, base, counts):
    """Count each value of a window that begins at ``base``; ``counts`` has one bin per value.

    Returns the number of entries above the window, and the largest bits of all entries. Few
    entries are inside the window, so most blocks need only the first, vectorized loop.
    """
    end = np.int32(base + len(counts))
    above, top = 0, np.int32(0)
    for begin in range(0, len(x), _BLOCK):
        part = x[begin : min(len(x), begin + _BLOCK)]
        over, from_base = np.int32(0), np.int32(0)
        for i in range(len(part)):
            bits = bits_of(abs(part[i]) * scale)
            over = np.int32(over + np.int32(bits >= end))
            from_base = np.int32(from_base + np.int32(bits >= base))
            top = max(top, bits)
        above += over
        if from_base > over:
            for i in range(len(part)):
                bits = bits_of(abs(part[i]) * scale)
                if (bits >= base) & (bits < end):
                    counts[bits - base] += 1
    return above, top


@cached_njit(**_OPTIONS)
def mark(x, scale, cut, out, places):
    """out = (bits of |x| scale) > cut.

    Returns the number of entries equal to the cut, and the largest bits below it, or -1. Writes
    the places of the first equal entries to ``places``.
    """
    equal, below = 0, np.int32(-1)
    for begin in range(0, len(x), _BLOCK):
        part, o = x[begin : min(len(x), begin + _BLOCK)], out[begin : min(len(x), begin + _BLOCK)]
        same = np.int32(0)
        for i in range(len(part)):
            bits = bits_of(abs(part[i]) * scale)
            o[i] = bits > cut
            same = np.int32(same + np.int32(bits == cut))
            below = max(below, bits if bits < cut else np.int32(-1))
        if same > 0:
            for i in range(len(part)):
                if bits_of(abs(part[i]) * scale) == cut:
                    if equal < len(places):
                        places[equal] = begin + i
                    equal += 1
    return equal, below
