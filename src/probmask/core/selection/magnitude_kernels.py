"""Passes of the magnitude cut, compiled. Mypy is told in pyproject.toml that Numba has the types.

The bits of a float that is not negative, read as an integer, are in the order of the floats.
"""

import numpy as np
from numba import njit

from probmask.core.vector_math import bits_of

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
LOW = 15  # bits of the second digit; the first has the 16 above it
_LOW = np.int32(LOW)
_BLOCK = 64
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
def count_window(x, scale, base, counts):
    """Count the bits of |x| scale from ``base`` on; how many are above them, and the largest bits.

    Few are inside: most blocks are looked at by vector code only.
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


@njit(**_OPTIONS)
def mark(x, scale, cut, out, places):
    """out = |x| scale > cut, by their bits; how many are equal, and the largest below, or -1.

    ``places`` takes where the equal ones are, as far as there is room.
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
