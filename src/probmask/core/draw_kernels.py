"""A draw, the masked weight and both gradients, compiled: one pass over memory each way.

Numba has no vector logarithm, so these are polynomials that LLVM turns into vector code. Everything
is fp32 and branch-free. Compiled code has no types to check here: mypy is told so in
pyproject.toml. `masked_draw` says what is computed, in plain operations.
"""

import numpy as np
from numba import njit

from probmask.core.counter_noise import MULTIPLIERS, SHIFTS
from probmask.core.vector_math import exp2, log2

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}

_ZERO, _HALF, _ONE = (np.float32(x) for x in (0, 0.5, 1))
_STEP = np.float32(2.0**-24)
_TINY = np.float32(2.0**-70)  # stands for s = 0 and s = 1 in logarithms
_LOWEST = np.float32(-126.0)  # the least power of two that is a normal number
_NOTHING = np.float32(-100.0)  # a mask below 2^-100 is 0: products with it would be denormal

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


@njit(**_OPTIONS)
def forward(weight, prob, out, first, key0, key1, a):
    """out = w m."""
    for i in range(len(out)):
        s = prob[i]
        odds = _log2_odds(s, _uniform(np.uint32(first + i), key0, key1))
        out[i] = weight[i] * _mask(s, odds, _tail(odds, a))


@njit(**_OPTIONS)
def backward(grad, weight, prob, to_weight, to_prob, first, key0, key1, a, at_ends):
    """to_weight = g m, to_prob = g w dm/ds; `at_ends` multiplies the slope at s = 0 and s = 1."""
    for i in range(len(grad)):
        s, g = prob[i], grad[i]
        odds = _log2_odds(s, _uniform(np.uint32(first + i), key0, key1))
        t = _tail(odds, a)
        to_prob[i] = np.float32(g * weight[i]) * _slope(s, t, a, at_ends)
        to_weight[i] = g * _mask(s, odds, t)
