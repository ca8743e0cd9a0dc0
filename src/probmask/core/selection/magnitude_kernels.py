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


@cached_njit(**_OPTIONS)
def growths(x, start, factor, scale, out):
    """out = (|x|³ - |factor start|³)^⅓ scale where positive, else 0."""
    for i in range(len(x)):
        out[i] = cubic_growth(abs(x[i]), factor * abs(start[i])) * scale


@cached_njit(**_OPTIONS)
def _largest_bits(x, scale):
    """Return the largest bits of |x| scale."""
    top = np.int32(0)
    for i in range(len(x)):
        top = max(top, bits_of(abs(x[i]) * scale))
    return top


@cached_njit(**_OPTIONS)
def count_growth_window(x, start, factor, scale, base, counts):
    """Do the same as `count_window` for growths.

    A growth never exceeds |x|, so a block in which every |x| is below the window has no growths
    inside or above it, whatever ``start`` is.
    """
    above, top = 0, np.int32(0)
    grown = np.empty(_BLOCK, np.float32)
    for begin in range(0, len(x), _BLOCK):
        part = slice(begin, min(len(x), begin + _BLOCK))
        highest = _largest_bits(x[part], scale)
        top = max(top, highest)
        if highest >= base:
            u = grown[: len(x[part])]
            growths(x[part], start[part], factor, scale, u)
            over, _ = count_window(u, _ONE, base, counts)
            above += over
    return above, top


@cached_njit(**_OPTIONS)
def mark_growth(x, start, factor, scale, cut, out, places):
    """Do the same as `mark` for growths.

    A block in which no |x| exceeds the largest growth below the cut that was found so far has
    neither entries to keep nor a larger one.
    """
    equal, below = 0, np.int32(-1)
    grown = np.empty(_BLOCK, np.float32)
    for begin in range(0, len(x), _BLOCK):
        part = slice(begin, min(len(x), begin + _BLOCK))
        highest, o = _largest_bits(x[part], scale), out[part]
        if (highest < cut) & (highest <= below):
            o[:] = False
            continue
        u = grown[: len(o)]
        growths(x[part], start[part], factor, scale, u)
        some = places[min(equal, len(places)) :]
        same, highest = mark(u, _ONE, cut, o, some)
        some[:same] += begin
        equal += same
        below = max(below, highest)
    return equal, below
