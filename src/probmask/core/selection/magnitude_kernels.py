"""Kernels of `MagnitudeSearch`: passes over the bits of |x| scale, or of the growth of |x|.

The bits of a nonnegative float, read as an integer, have the order of the floats. Numba infers the
types; pyproject.toml excludes this file from mypy.
"""

import numpy as np

from probmask.core.kernel_cache import cached_njit
from probmask.core.vector_math import bits_of, cubic_growth, float_of

_OPTIONS = {"nogil": True, "error_model": "numpy"}
LOW = 15  # number of lower bits; there are 16 upper bits
_LOW = np.int32(LOW)
_ONE = np.float32(1)
_BLOCK = 64  # entries handled together
_GROWN = 1024  # growths computed together: they stay in the first-level cache
_MANY = 320  # with more candidates in a block, finding them costs more than it saves
# Factors on a cube and on the lower edge that cover the rounding errors of both.
_MORE, _MARGIN = np.float32(1 + 1e-6), np.float32(1 - 1e-5)
_LEAST_CUBE = np.float32(1e-30)
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
    """Do the same as `mark_window` for growths; the third result covers only what is not finite.

    A growth is compared by its cube first, with a margin for rounding errors. Where few entries of
    a block may be above the window's lower edge, only their growths are computed.
    """
    above, found, top = 0, 0, np.int32(0)
    low = float_of(base) / scale * _MARGIN
    low = low * low * low
    if low < _LEAST_CUBE:  # the cubes of some numbers above it may be denormal
        low = -np.float32(np.inf)
    grown, maybe = np.empty(_GROWN, np.float32), np.empty(_GROWN, np.bool_)
    near = np.empty(_GROWN + 1, np.int32)
    for begin in range(0, len(x), _GROWN):
        part = slice(begin, min(len(x), begin + _GROWN))
        size, first, o = x[part], start[part], out[part]
        count = _mark_candidates(size, first, factor, low, maybe[: len(o)])
        if count > _MANY:
            u, free = grown[: len(o)], min(found, len(places))
            growths(size, first, factor, scale, u)
            some = places[free:]
            over, more, highest = mark_window(u, _ONE, base, end, o, some, inside[free:])
            some[:more] += begin
            above += over
            found += more
            top = max(top, highest)
            continue
        o[:] = False
        if count == 0:
            continue
        _find(maybe[: len(o)], near)
        for j in range(count):
            place = near[j]
            grown_here = cubic_growth(abs(size[place]), factor * abs(first[place])) * scale
            bits = bits_of(grown_here)
            top = max(top, bits)
            if bits >= end:
                o[place] = True
                above += 1
            elif bits >= base:
                if found < len(places):
                    places[found], inside[found] = begin + place, bits
                found += 1
    return above, found, top


@cached_njit(**_OPTIONS)
def _mark_candidates(x, start, factor, low, out):
    """out = whether |x|³ - |factor start|³ may reach ``low``, or is not finite.

    Returns the number of such entries.
    """
    count = np.int32(0)
    for i in range(len(x)):
        size, first = abs(x[i]), factor * abs(start[i])
        cube = size * size * size
        out[i] = not (cube * _MORE - first * first * first < low)
        count = np.int32(count + np.int32(out[i]))
    return count


@cached_njit(**_OPTIONS)
def _find(marked, places):
    """Write the places of the marked entries, without branches inside eight entries."""
    count = 0
    whole = len(marked) // 8 * 8
    words = marked[:whole].view(np.uint64)
    for k in range(len(words)):
        if words[k] != 0:
            for i in range(8 * k, 8 * k + 8):
                places[count] = i  # the next entry overwrites the place of one that is not marked
                count += marked[i]
    for i in range(whole, len(marked)):
        places[count] = i
        count += marked[i]


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
