"""A draw, the masked weight and both gradients, compiled: one pass over memory each way.

Numba has no vector logarithm, so these are polynomials that LLVM turns into vector code. Everything
is fp32 and branch-free. Compiled code has no types to check here: mypy is told so in
pyproject.toml. `masked_draw` says what is computed, in plain operations.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from probmask.core.counter_noise import MULTIPLIERS, SHIFTS

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}

_ZERO, _HALF, _ONE = (np.float32(x) for x in (0, 0.5, 1))
_STEP = np.float32(2.0**-24)
_TINY = np.float32(2.0**-70)  # stands for s = 0 and s = 1 in logarithms
_LOWEST = np.float32(-126.0)  # the least power of two that is a normal number
_NOTHING = np.float32(-100.0)  # a mask below 2^-100 is 0: products with it would be denormal

# ln(1 + r) = r - r²/2 + r³ P(r) for √½ ≤ 1 + r < √2 (Cephes, S. Moshier).
_L8, _L7, _L6 = (np.float32(x) for x in (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1))
_L5, _L4, _L3 = (np.float32(x) for x in (-1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1))
_L2, _L1, _L0 = (np.float32(x) for x in (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1))
_LOG2_E = np.float32(1.4426950408889634)
# 2^f for |f| ≤ ½ (Cephes).
_E6, _E5, _E4 = (np.float32(x) for x in (1.5353362e-4, 1.3398874e-3, 9.6184374e-3))
_E3, _E2, _E1 = (np.float32(x) for x in (5.5503325e-2, 2.4022648e-1, 6.9314720e-1))
_ROUND = np.float32(12582912.0)  # 1.5 · 2^23: adding it rounds to a whole number
_SQRT_HALF = np.int32(0x3F3504F3)
_MANTISSA, _BIAS = np.int32(23), np.int32(127)

_M0, _M1, _M2 = (np.uint32(m) for m in MULTIPLIERS)
_S0, _S1, _S2, _S3 = (np.uint32(s) for s in SHIFTS)


@intrinsic
def _bits(typing_context, x):
    """The bits of an fp32 number."""

    def generate(context, builder, _, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def _float(typing_context, bits):
    """The fp32 number of these bits."""

    def generate(context, builder, _, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


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
def _log2(x):
    """Base 2, of a positive normal number."""
    bits = _bits(x)
    exponent = np.int32(np.int32(bits - _SQRT_HALF) >> _MANTISSA)
    r = _float(np.int32(bits - np.int32(exponent << _MANTISSA))) - _ONE
    r2 = r * r
    r4 = r2 * r2
    # In pairs, not one after the other: shorter chains of dependent operations.
    low = (_L1 * r + _L0) + (_L3 * r + _L2) * r2
    high = (_L5 * r + _L4) + (_L7 * r + _L6) * r2
    p = low + r4 * (high + r4 * _L8)
    ln = r + r2 * (r * p - _HALF)
    return np.float32(exponent) + ln * _LOG2_E


@njit(inline="always")
def _exp2(x):
    """2^x for -126 ≤ x < 128."""
    shifted = x + _ROUND
    whole = shifted - _ROUND
    f = x - whole
    f2 = f * f
    p = (_E1 * f + _ONE) + f2 * ((_E3 * f + _E2) + f2 * ((_E5 * f + _E4) + f2 * _E6))
    scale = _float(np.int32(np.int32(np.int32(whole) + _BIAS) << _MANTISSA))
    return p * scale


@njit(inline="always")
def _log2_odds(s, u):
    """log2 of s u / ((1 - s)(1 - u)); s = 0 and s = 1 are close to it."""
    return _log2((max(s, _TINY) * u) / (max(_ONE - s, _TINY) * (_ONE - u)))


@njit(inline="always")
def _tail(odds, a):
    """t = 2^(-a |odds|): the mask, or one less the mask, is t / (1 + t)."""
    x = -a * abs(odds)
    t = _exp2(max(x, _LOWEST))
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
