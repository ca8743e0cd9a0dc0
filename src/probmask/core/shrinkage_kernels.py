"""Shrinking, and the gradient of what is removed, compiled: one pass over memory each.

Mypy is told in pyproject.toml that Numba has the types.
"""

import numpy as np
from numba import njit

from probmask.core.vector_math import cube_root, exp2, log2, log2_one_less, one_less_exp2

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}
_ZERO, _ONE, _THREE = np.float32(0), np.float32(1), np.float32(3)
_SMALLEST = np.float32(2.0**-126)  # of the normal numbers
_INFINITE = np.float32(np.inf)
_BLOCK = 1024  # entries that are looked at together: they stay in the first cache
_MANY = 640  # active ones in a block beyond which gathering them costs more than it saves
_VECTOR = 8
_ALL_BUT_ONE = np.float32(1 - 2.0**-24)


@njit(**_OPTIONS)
def power(weight, active, threshold, p, out):
    """out = w (1 - r^p)^(1/p) with r = θ / |w| where active, else 0.

    In large layers few weights are active, and anywhere: these are gathered and computed side by
    side. By either way an entry gets the same bits. Cubes are so cheap that it would not pay.
    """
    if p == _THREE:
        _cube(weight, active, threshold, out)
        return
    places, gathered = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32)
    computed, every = np.empty(_BLOCK, np.float32), np.ones(_BLOCK, np.bool_)
    for begin in range(0, len(out), _BLOCK):
        part = slice(begin, min(len(out), begin + _BLOCK))
        w, some, o = weight[part], active[part], out[part]
        found = 0
        for i in range(len(some)):
            found += some[i]
        if found > _MANY:
            _power(w, some, threshold, p, o)
            continue
        o[:] = _ZERO
        if found == 0:
            continue
        count = 0
        for i in range(len(some)):  # no branch: what is not active is overwritten by the next
            places[count] = i
            count += some[i]
        for j in range(count):
            gathered[j] = w[places[j]]
        whole = min(-(-count // _VECTOR) * _VECTOR, _BLOCK)  # what is left of a vector is slow
        gathered[count:whole] = _ONE
        _power(gathered[:whole], every[:whole], threshold, p, computed[:whole])
        for j in range(count):
            o[places[j]] = computed[j]


@njit(**_OPTIONS)
def _power(weight, active, threshold, p, out):
    inverse = _ONE / p
    for i in range(len(out)):
        w = weight[i]
        size = max(abs(w), _SMALLEST)
        excess = (size - threshold) / size  # 1 - r
        part = one_less_exp2(p * log2_one_less(min(excess, _ALL_BUT_ONE)))
        root = exp2(log2(max(part, _SMALLEST)) * inverse)
        root = _ONE if threshold == _ZERO else root if excess > _ZERO else _ZERO
        out[i] = w * root if active[i] else _ZERO


@njit(**_OPTIONS)
def _cube(weight, active, threshold, out):
    """The same for p = 3: 1 - r³ = (1 - r)(1 + r + r²), of which no digits are lost."""
    for i in range(len(out)):
        w = weight[i]
        size = max(abs(w), _SMALLEST)
        excess = (size - threshold) / size  # 1 - r
        r = _ONE - excess
        root = cube_root(max(excess * (_ONE + r + r * r), _SMALLEST))
        root = _ONE if threshold == _ZERO else root if excess > _ZERO else _ZERO
        out[i] = w * root if active[i] else _ZERO


# Reordered, or the sum would be one long chain; in the same way for the same length.
@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def squares(grad, active):
    """Σ g² over the active entries, and their number."""
    total, count = 0.0, 0
    for i in range(len(grad)):
        g, kept = grad[i], active[i]  # loaded in any case: a choice among values is vectorised
        g = np.float64(g if kept else _ZERO)
        total += g * g
        count += kept
    return total, count


@njit(**_OPTIONS)
def temper(grad, active, share, limit, out):
    """out = g where active, else share g, g first clamped to ± limit; NaN stays."""
    for i in range(len(grad)):
        g, kept = grad[i], active[i]
        bound = _INFINITE if kept else limit
        factor = _ONE if kept else share
        out[i] = factor * min(max(g, -bound), bound)
