"""A draw, the masked weight and both gradients, compiled: one pass over memory each way.

Numba has no vector logarithm, so these are polynomials that LLVM turns into vector code. Everything
is fp32 and branch-free. Compiled code has no types to check here: mypy is told so in
pyproject.toml. `masked_draw` says what is computed, in plain operations.

Most probabilities of a training are 0 or 1, and need no draw: m = s. The open ones among them, at
whatever places, are gathered and computed side by side. By either way an entry gets the same bits.
(They are gathered into arrays of their own: rows of one array would not be vector code.)
"""

import numpy as np
from numba import njit

from probmask.core.noise import MULTIPLIERS, SHIFTS
from probmask.core.vector_math import exp2, log2

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}

_ZERO, _HALF, _ONE = (np.float32(x) for x in (0, 0.5, 1))
_STEP = np.float32(2.0**-24)
_TINY = np.float32(2.0**-70)  # stands for s = 0 and s = 1 in logarithms
_LOWEST = np.float32(-126.0)  # the least power of two that is a normal number
_NOTHING = np.float32(-100.0)  # a mask below 2^-100 is 0: products with it would be denormal

_BLOCK = 512  # entries that are looked at together: they stay in the first cache
_PROBE, _MANY = 64, 20  # the first of a block; open ones beyond which gathering does not pay
_VECTOR = 8

_M0, _M1, _M2 = (np.uint32(m) for m in MULTIPLIERS)
_S0, _S1, _S2, _S3 = (np.uint32(s) for s in SHIFTS)


@njit(inline="always")
def _uniform(position, key0, key1):
    """u = (2 k + 1) 2⁻²⁴, k the 23 upper bits of `counter_noise.hashed`."""
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
    """log2 of s u / ((1 - s)(1 - u)); s = 0 and s = 1 are close to it."""
    return log2((max(s, _TINY) * u) / (max(_ONE - s, _TINY) * (_ONE - u)))


@njit(inline="always")
def _tail(odds, a):
    """t = 2^(-a |odds|): the mask, or one less the mask, is t / (1 + t)."""
    x = -a * abs(odds)
    t = exp2(max(x, _LOWEST))
    return t if x > _NOTHING else _ZERO


@njit(inline="always")
def _mask(s, odds, t):
    """m = 1 / (1 + 2^(-a odds)); s itself where that is 0, 1 or not a number."""
    m = (t if odds < _ZERO else _ONE) / (_ONE + t)
    return m if (s > _ZERO) & (s < _ONE) else s


@njit(inline="always")
def _slope(s, t, a, at_ends):
    """dm/ds = a t / ((1 + t)² s (1 - s))."""
    slope = a * t / ((_ONE + t) * (_ONE + t) * (max(s, _TINY) * max(_ONE - s, _TINY)))
    return slope if (s > _ZERO) & (s < _ONE) else slope * at_ends


@njit(**_OPTIONS)
def uniforms(out, first, key0, key1):
    """Fill in the uniforms of the positions from ``first`` on."""
    for i in range(len(out)):
        out[i] = _uniform(np.uint32(first + i), key0, key1)


@njit(inline="always")
def _open(s):
    """Neither 0 nor 1; a NaN is, so that it shows."""
    return (s != _ZERO) & (s != _ONE)


@njit(inline="always")
def _count_open(prob):
    count = np.int32(0)  # as wide as the entries, or it would not be vector code
    for i in range(len(prob)):
        count = np.int32(count + np.int32(_open(prob[i])))
    return count


@njit(inline="always")
def _find_open(prob, places):
    """Fill in where they are; how many there are."""
    count = 0
    for i in range(len(prob)):  # no branch: what is not open is overwritten by the next
        places[count] = i
        count += _open(prob[i])
    return count


@njit(inline="always")
def _padded(count):
    """Up to whole vectors: what is left of one is slow."""
    return min(-(-count // _VECTOR) * _VECTOR, _BLOCK)


@njit(**_OPTIONS)
def forward(weight, prob, out, first, key0, key1, a):
    """out = w m."""
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


@njit(**_OPTIONS)
def _forward(weight, prob, places, out, first, key0, key1, a):
    """out = w m of entries that are so many places behind the first."""
    for i in range(len(out)):
        s = prob[i]
        odds = _log2_odds(s, _uniform(np.uint32(first + places[i]), key0, key1))
        out[i] = weight[i] * _mask(s, odds, _tail(odds, a))


@njit(**_OPTIONS)
def backward(grad, weight, prob, to_weight, to_prob, first, key0, key1, a, at_ends):
    """to_weight = g m, to_prob = g w dm/ds; `at_ends` multiplies the slope at s = 0 and s = 1."""
    everywhere = np.arange(_BLOCK).astype(np.int32)
    places = np.zeros(_BLOCK, np.int32)
    few_g, few_w = np.ones(_BLOCK, weight.dtype), np.ones(_BLOCK, weight.dtype)
    few_s, few_to_s = np.ones(_BLOCK, prob.dtype), np.ones(_BLOCK, prob.dtype)
    few_to_w = np.ones(_BLOCK, weight.dtype)
    for begin in range(0, len(grad), _BLOCK):
        part = slice(begin, min(len(grad), begin + _BLOCK))
        g, w, s, start = grad[part], weight[part], prob[part], first + begin
        to_w, to_s = to_weight[part], to_prob[part]
        if at_ends != _ZERO or _count_open(s[:_PROBE]) > _MANY:
            _backward(g, w, s, everywhere, to_w, to_s, start, key0, key1, a, at_ends)
            continue
        for i in range(len(g)):
            to_w[i] = g[i] * s[i]
            to_s[i] = np.float32(g[i] * w[i]) * _ZERO  # NaN if that is not finite
        if _count_open(s) == 0:
            continue
        count = _find_open(s, places)
        for j in range(count):
            i = places[j]
            few_g[j], few_w[j], few_s[j] = g[i], w[i], s[i]
        f = slice(0, _padded(count))
        g, w, s, few_gw, few_gs = few_g[f], few_w[f], few_s[f], few_to_w[f], few_to_s[f]
        _backward(g, w, s, places, few_gw, few_gs, start, key0, key1, a, at_ends)
        for j in range(count):
            i = places[j]
            to_w[i], to_s[i] = few_to_w[j], few_to_s[j]


@njit(**_OPTIONS)
def _backward(grad, weight, prob, places, to_weight, to_prob, first, key0, key1, a, at_ends):
    """The same of entries that are so many places behind the first."""
    for i in range(len(grad)):
        s, g = prob[i], grad[i]
        odds = _log2_odds(s, _uniform(np.uint32(first + places[i]), key0, key1))
        t = _tail(odds, a)
        to_prob[i] = np.float32(g * weight[i]) * _slope(s, t, a, at_ends)
        to_weight[i] = g * _mask(s, odds, t)
