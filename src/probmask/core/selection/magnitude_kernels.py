"""Kernels of `MagnitudeSearch`: passes over the bits of |x| scale, or of the growth of |x|.

The bits of a nonnegative float, read as an integer, have the order of the floats. Numba infers the
types; pyproject.toml excludes this file from mypy.
"""

import numpy as np

from probmask.core.kernel_cache import cached_njit
from probmask.core.vector_math import bits_of, cubic_growth

_OPTIONS = {"nogil": True, "error_model": "numpy"}
LOW = 15  # number of lower bits; there are 16 upper bits
_LOW = np.int32(LOW)
_ONE = np.float32(1)
_BLOCK = 64  # entries handled together
_GROWN = 1024  # growths computed together: they stay in the first-level cache
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
def mark_window(x, scale, base, end, out, places, inside):
    """out = (bits of |x| scale) >= end, where bits from ``base`` to ``end`` are the window.

    Returns the number of entries above the window, the number inside, and the largest bits of all
    entries. Writes the places and bits of the first entries inside to ``places`` and ``inside``.
    Few entries are inside, so most blocks need only the first, vectorized loop.
    """
    above, found, top = 0, 0, np.int32(0)
    for begin in range(0, len(x), _BLOCK):
        part, o = x[begin : min(len(x), begin + _BLOCK)], out[begin : min(len(x), begin + _BLOCK)]
        over, from_base = np.int32(0), np.int32(0)
        for i in range(len(part)):
            bits = bits_of(abs(part[i]) * scale)
            o[i] = bits >= end
            over = np.int32(over + np.int32(bits >= end))
            from_base = np.int32(from_base + np.int32(bits >= base))
            top = max(top, bits)
        above += over
        if from_base > over:
            for i in range(len(part)):
                bits = bits_of(abs(part[i]) * scale)
                if (bits >= base) & (bits < end):
                    if found < len(places):
                        places[found], inside[found] = begin + i, bits
                    found += 1
    return above, found, top


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


@cached_njit(**_OPTIONS)
def growths(x, start, factor, scale, out):
    """out = (|x|³ - |factor start|³)^⅓ scale where positive, else 0."""
    for i in range(len(x)):
        out[i] = cubic_growth(abs(x[i]), factor * abs(start[i])) * scale


@cached_njit(**_OPTIONS)
def mark_growth_window(x, start, factor, scale, base, end, out, places, inside):
    """Do the same as `mark_window` for growths."""
    above, found, top = 0, 0, np.int32(0)
    grown = np.empty(_GROWN, np.float32)
    for begin in range(0, len(x), _GROWN):
        part = slice(begin, min(len(x), begin + _GROWN))
        u, free = grown[: len(x[part])], min(found, len(places))
        growths(x[part], start[part], factor, scale, u)
        some = places[free:]
        over, more, highest = mark_window(u, _ONE, base, end, out[part], some, inside[free:])
        some[:more] += begin
        above += over
        found += more
        top = max(top, highest)
    return above, found, top


@cached_njit(**_OPTIONS)
def mark_growth(x, start, factor, scale, cut, out, places):
    """Do the same as `mark` for growths."""
    equal, below = 0, np.int32(-1)
    grown = np.empty(_GROWN, np.float32)
    for begin in range(0, len(x), _GROWN):
        part = slice(begin, min(len(x), begin + _GROWN))
        u = grown[: len(x[part])]
        growths(x[part], start[part], factor, scale, u)
        some = places[min(equal, len(places)) :]
        same, highest = mark(u, _ONE, cut, out[part], some)
        some[:same] += begin
        equal += same
        below = max(below, highest)
    return equal, below
