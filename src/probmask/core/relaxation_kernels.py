"""Kernels of `masked_draw`: forward and backward in one pass over memory each.

All arithmetic is fp32 and branch-free, so that LLVM vectorizes it. Logarithm and power come from
`vector_math`. Numba infers the types; pyproject.toml excludes this file from mypy.

During most of a training, most probabilities are 0 or 1. There m = s, and no noise is needed. If
few probabilities of a block are strictly between 0 and 1 ("open"), these are gathered and computed
together. Gathered or not, an entry gets the same bits. (They are gathered into separate arrays:
LLVM does not vectorize over the rows of one array.)
"""

import numpy as np
from numba import njit

from probmask.core.kernel_cache import cached_njit
from probmask.core.noise import MULTIPLIERS, SHIFTS
from probmask.core.vector_math import exp2, log2

_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}

_ZERO, _HALF, _ONE = (np.float32(x) for x in (0, 0.5, 1))
_STEP = np.float32(2.0**-24)
_TINY = np.float32(2.0**-70)  # replaces 0 in logarithms
_LOWEST = np.float32(-126.0)  # 2 to this power is the smallest normal number
_NOTHING = np.float32(-100.0)  # masks below 2^-100 are set to 0: their products would be denormal

_BLOCK = 512  # entries handled together: they stay in the first-level cache
# With more than _MANY open entries among the first _PROBE of a block, gathering does not pay.
_PROBE, _MANY = 64, 20
_VECTOR = 8  # fp32 entries per vector

_M0, _M1, _M2 = (np.uint32(m) for m in MULTIPLIERS)
_S0, _S1, _S2, _S3 = (np.uint32(s) for s in SHIFTS)


@njit(inline="always")
def _uniform(position, key0, key1):
    """u = (2 k + 1) 2⁻²⁴ with k the upper 23 bits of `noise.hashed`."""
    x = np.uint32(position + key0)
    x = np.uint32(x ^ (x >> _S0))
    x = np.uint32(np.uint32(x * _M0) + key1)
    x = np.uint32(x ^ (x >> _S1))
    x = np.uint32(x * _M1)
    x = np.uint32(x ^ (x >> _S2))
    x = np.uint32(x * _M2)
    x = np.uint32(x ^ (x >> _S3))
    return np.float32(np.int32((x >> np.uint32(9)) * np.uint32(2) + np.uint32(1))) * _STEP


@njit(inline="always")
def _log2_odds(s, u):
    """log2(s u / ((1 - s)(1 - u))), with 2^-70 for s = 0 and for 1 - s = 0."""
    return log2((max(s, _TINY) * u) / (max(_ONE - s, _TINY) * (_ONE - u)))


@njit(inline="always")
def _tail(odds, a):
    """t = 2^(-a |odds|); m is t / (1 + t) for negative odds, else 1 / (1 + t)."""
    x = -a * abs(odds)
    t = exp2(max(x, _LOWEST))
    return t if x > _NOTHING else _ZERO


@njit(inline="always")
def _mask(s, odds, t):
    """m = 1 / (1 + 2^(-a odds)) for 0 < s < 1; s itself where it is 0, 1 or NaN."""
    m = (t if odds < _ZERO else _ONE) / (_ONE + t)
    return m if (s > _ZERO) & (s < _ONE) else s


@njit(inline="always")
def _slope(s, t, a, at_ends):
    """dm/ds = a t / ((1 + t)² s (1 - s)); times ``at_ends`` at s = 0 and s = 1."""
    slope = a * t / ((_ONE + t) * (_ONE + t) * (max(s, _TINY) * max(_ONE - s, _TINY)))
    return slope if (s > _ZERO) & (s < _ONE) else slope * at_ends


@cached_njit(**_OPTIONS)
def uniforms(out, first, key0, key1):
    """Fill ``out`` with the uniforms of the positions from ``first`` on."""
    for i in range(len(out)):
        out[i] = _uniform(np.uint32(first + i), key0, key1)


@njit(inline="always")
def _open(s):
    """Return whether s is neither 0 nor 1. NaN counts as open, so that it reaches the output."""
    return (s != _ZERO) & (s != _ONE)


@njit(inline="always")
def _count_open(prob):
    count = np.int32(0)  # 32 bits like the entries, or LLVM does not vectorize the loop
    for i in range(len(prob)):
        count = np.int32(count + np.int32(_open(prob[i])))
    return count


@njit(inline="always")
def _find_open(prob, places):
    """Write the places of the open entries to ``places`` and return their number."""
    count = 0
    for i in range(len(prob)):  # branch-free: the next entry overwrites a place that is not open
        places[count] = i
        count += _open(prob[i])
    return count


@njit(inline="always")
def _padded(count):
    """Round up to whole vectors: LLVM handles the rest of a vector entry by entry."""
    return min(-(-count // _VECTOR) * _VECTOR, _BLOCK)


@cached_njit(**_OPTIONS)
def forward(weight, prob, out, first, key0, key1, a):
    """out = w m, for the entries at the positions from ``first`` on."""
    everywhere = np.arange(_BLOCK).astype(np.int32)
    places = np.zeros(_BLOCK, np.int32)
    few_w, few_out = np.ones(_BLOCK, weight.dtype), np.ones(_BLOCK, weight.dtype)
    few_s = np.ones(_BLOCK, prob.dtype)
    for begin in range(0, len(out), _BLOCK):
        part = slice(begin, min(len(out), begin + _BLOCK))
        w, s, o, start = weight[part], prob[part], out[part], first + begin
        if _count_open(s[:_PROBE]) > _MANY:
            _forward(w, s, everywhere, o, start, key0, key1, a)
            continue
        for i in range(len(o)):
            o[i] = w[i] * s[i]
        if _count_open(s) == 0:
            continue
        count = _find_open(s, places)
        for j in range(count):
            few_w[j], few_s[j] = w[places[j]], s[places[j]]
        n = _padded(count)
        _forward(few_w[:n], few_s[:n], places, few_out[:n], start, key0, key1, a)
        for j in range(count):
            o[places[j]] = few_out[j]


@cached_njit(**_OPTIONS)
def _forward(weight, prob, places, out, first, key0, key1, a):
    """out = w m, for the entries at ``places``, relative to ``first``."""
    for i in range(len(out)):
        s = prob[i]
        odds = _log2_odds(s, _uniform(np.uint32(first + places[i]), key0, key1))
        out[i] = weight[i] * _mask(s, odds, _tail(odds, a))


@cached_njit(**_OPTIONS)
def backward(grad, weight, prob, grad_weight, grad_prob, first, key0, key1, a, at_ends):
    """grad_weight = g m and grad_prob = g w dm/ds, for the positions from ``first`` on.

    ``at_ends`` multiplies the slope at s = 0 and s = 1.
    """
    everywhere = np.arange(_BLOCK).astype(np.int32)
    places = np.zeros(_BLOCK, np.int32)
    few_g, few_w = np.ones(_BLOCK, weight.dtype), np.ones(_BLOCK, weight.dtype)
    few_s, few_gs = np.ones(_BLOCK, prob.dtype), np.ones(_BLOCK, prob.dtype)
    few_gw = np.ones(_BLOCK, weight.dtype)
    for begin in range(0, len(grad), _BLOCK):
        part = slice(begin, min(len(grad), begin + _BLOCK))
        g, w, s, start = grad[part], weight[part], prob[part], first + begin
        gw, gs = grad_weight[part], grad_prob[part]
        if at_ends != _ZERO or _count_open(s[:_PROBE]) > _MANY:
            _backward(g, w, s, everywhere, gw, gs, start, key0, key1, a, at_ends)
            continue
        for i in range(len(g)):
            gw[i] = g[i] * s[i]
            gs[i] = np.float32(g[i] * w[i]) * _ZERO  # 0, or NaN if g w is not finite
        if _count_open(s) == 0:
            continue
        count = _find_open(s, places)
        for j in range(count):
            i = places[j]
            few_g[j], few_w[j], few_s[j] = g[i], w[i], s[i]
        n = _padded(count)
        g, w, s = few_g[:n], few_w[:n], few_s[:n]
        _backward(g, w, s, places, few_gw[:n], few_gs[:n], start, key0, key1, a, at_ends)
        for j in range(count):
            i = places[j]
            gw[i], gs[i] = few_gw[j], few_gs[j]


@cached_njit(**_OPTIONS)
def _backward(grad, weight, prob, places, grad_weight, grad_prob, first, key0, key1, a, at_ends):
    """Backward pass for the entries at ``places``, relative to ``first``."""
    for i in range(len(grad)):
        s, g = prob[i], grad[i]
        odds = _log2_odds(s, _uniform(np.uint32(first + places[i]), key0, key1))
        t = _tail(odds, a)
        grad_prob[i] = np.float32(g * weight[i]) * _slope(s, t, a, at_ends)
        grad_weight[i] = g * _mask(s, odds, t)
