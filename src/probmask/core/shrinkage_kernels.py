"""Kernels of `probmask.core.shrinkage`, each one or two passes over memory.

Numba infers the types; pyproject.toml excludes this file from mypy.
"""

import numpy as np

from probmask.core.kernel_cache import cached_njit
from probmask.core.vector_math import (
    cube_root,
    cubic_growth,
    exp2,
    log2,
    log2_one_less,
    one_less_exp2,
)

_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
_ZERO, _ONE, _THREE = np.float32(0), np.float32(1), np.float32(3)
_SMALLEST = np.float32(2.0**-126)  # normal number
_INFINITE = np.float32(np.inf)
_BLOCK = 1024  # entries handled together: they stay in the first-level cache
_MANY = 640  # with more active entries in a block, gathering costs more than it saves
_VECTOR = 8  # fp32 entries per vector
_BELOW_ONE = np.float32(1 - 2.0**-24)  # the largest fp32 number below 1


@cached_njit(**_OPTIONS)
def power(weight, active, threshold, p, out):
    """out = w (1 - r^p)^(1/p) with r = θ / |w| where active, else 0.

    In large layers few weights are active, at scattered places. These are gathered and computed
    together. Gathered or not, an entry gets the same bits. For p = 3 gathering does not pay.
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
        for i in range(len(some)):  # branch-free: the next entry overwrites an inactive place
            places[count] = i
            count += some[i]
        for j in range(count):
            gathered[j] = w[places[j]]
        whole = min(-(-count // _VECTOR) * _VECTOR, _BLOCK)  # partial vectors are slow
        gathered[count:whole] = _ONE
        _power(gathered[:whole], every[:whole], threshold, p, computed[:whole])
        for j in range(count):
            o[places[j]] = computed[j]


@cached_njit(**_OPTIONS)
def _power(weight, active, threshold, p, out):
    inverse = _ONE / p
    for i in range(len(out)):
        w = weight[i]
        size = max(abs(w), _SMALLEST)
        excess = (size - threshold) / size  # 1 - r
        part = one_less_exp2(p * log2_one_less(min(excess, _BELOW_ONE)))
        root = exp2(log2(max(part, _SMALLEST)) * inverse)
        root = _ONE if threshold == _ZERO else root if excess > _ZERO else _ZERO
        out[i] = w * root if active[i] else _ZERO


@cached_njit(**_OPTIONS)
def _cube(weight, active, threshold, out):
    """`power` for p = 3, where 1 - r³ = (1 - r)(1 + r + r²) has no cancellation."""
    for i in range(len(out)):
        w = weight[i]
        size = max(abs(w), _SMALLEST)
        excess = (size - threshold) / size  # 1 - r
        r = _ONE - excess
        root = cube_root(max(excess * (_ONE + r + r * r), _SMALLEST))
        root = _ONE if threshold == _ZERO else root if excess > _ZERO else _ZERO
        out[i] = w * root if active[i] else _ZERO


@cached_njit(nogil=True, error_model="numpy")  # without fastmath: the same bits in every kernel
def outgrow(weight, initial, factor, out):
    """out = sign(w) (|w|³ - |factor w₀|³)^⅓ where positive, else 0."""
    for i in range(len(out)):
        w = weight[i]
        grown = cubic_growth(abs(w), factor * abs(initial[i]))
        out[i] = -grown if w < _ZERO else grown


@cached_njit(**_OPTIONS)
def outgrow_active(weight, initial, factor, active, threshold, out):
    """out = sign(w) (|w|³ - |factor w₀|³ - θ³)^⅓ where active and positive, else 0.

    The calls do not work in place: LLVM's vectorized loops are for arrays that do not overlap.
    """
    grown = np.empty(_BLOCK, np.float32)
    for begin in range(0, len(out), _BLOCK):
        part = slice(begin, min(len(out), begin + _BLOCK))
        u = grown[: len(out[part])]
        outgrow(weight[part], initial[part], factor, u)
        _cube(u, active[part], threshold, out[part])


# "reassoc" lets LLVM vectorize the sum. The order of its terms depends only on their number.
@cached_njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def squares(grad, active):
    """Return Σ g² over the active entries, and their number."""
    total, count = 0.0, 0
    for i in range(len(grad)):
        g, kept = grad[i], active[i]  # loaded unconditionally, so that the loop is vectorized
        g = np.float64(g if kept else _ZERO)
        total += g * g
        count += kept
    return total, count


@cached_njit(**_OPTIONS)
def temper(grad, active, share, limit, out):
    """out = g where active, else share · clip(g, -limit, limit); NaN stays NaN."""
    for i in range(len(grad)):
        g, kept = grad[i], active[i]
        bound = _INFINITE if kept else limit
        factor = _ONE if kept else share
        out[i] = factor * min(max(g, -bound), bound)
