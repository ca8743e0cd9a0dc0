"""Logarithm, power and cube root of fp32 numbers, as polynomials that LLVM vectorizes.

Numba has no vectorized logarithm. All functions are branch-free and inlined into the loops that
call them. Numba infers the types; pyproject.toml excludes this file from mypy.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_SMALLEST = np.float32(2.0**-126)  # normal number
# ln(1 + r) = r - r²/2 + r³ P(r) for √½ ≤ 1 + r < √2 (Cephes, S. Moshier).
_L8, _L7, _L6 = (np.float32(x) for x in (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1))
_L5, _L4, _L3 = (np.float32(x) for x in (-1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1))
_L2, _L1, _L0 = (np.float32(x) for x in (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1))
_LOG2_E = np.float32(1.4426950408889634)
# 2^f for |f| ≤ ½ (Cephes).
_E6, _E5, _E4 = (np.float32(x) for x in (1.5353362e-4, 1.3398874e-3, 9.6184374e-3))
_E3, _E2, _E1 = (np.float32(x) for x in (5.5503325e-2, 2.4022648e-1, 6.9314720e-1))
_ROUND = np.float32(12582912.0)  # 1.5 · 2^23: adding it rounds to an integer
_SQRT_HALF = np.int32(0x3F3504F3)
_MANTISSA, _BIAS = np.int32(23), np.int32(127)
_LOWEST = np.float32(-126.0)  # 2 to this power is the smallest normal number
_THIRD, _TWO_NINTHS = np.float32(1 / 3), np.float32(2 / 9)
# This minus a third of the bits of x gives the bits of x^(-1/3) to 3.5 %, because the bits of a
# float are nearly linear in its logarithm.
_CUBE_ROOT_BITS = np.float32(0x54A20000)


@intrinsic
def bits_of(typing_context, x):
    """Return the bits of an fp32 number as int32."""

    def generate(context, builder, _, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def float_of(typing_context, bits):
    """Return the fp32 number with these bits."""

    def generate(context, builder, _, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always")
def log2(x):
    """log2(x) for a positive normal number x."""
    exponent, r = _split(x)
    return np.float32(exponent) + _ln_1p(r) * _LOG2_E


@njit(inline="always")
def log2_one_less(d):
    """log2(1 - d) for 0 ≤ d < 1, accurate for small d too."""
    exponent, r = _split(_ONE - d)
    return np.float32(exponent) + _ln_1p(-d if exponent == 0 else r) * _LOG2_E


@njit(inline="always")
def exp2(x):
    """2^x for -126 ≤ x < 128."""
    whole, f = _round(x)
    return (_ONE + f * _exp2_slope(f)) * _power(whole)


@njit(inline="always")
def one_less_exp2(x):
    """1 - 2^x for x ≤ 0, accurate close to x = 0 too."""
    whole, f = _round(max(x, _LOWEST))
    rise = f * _exp2_slope(f)
    return -rise if whole == 0 else _ONE - (_ONE + rise) * _power(whole)


@njit(inline="always")
def cube_root(x):
    """x^⅓ for a positive normal number x, to four units in the last place.

    Computed as x z² with z = x^(-⅓), which needs no division. For an approximate z and
    e = 1 - x z³, the exact value is z (1 - e)^(-⅓). Two terms of this series, applied twice, leave
    only rounding errors.
    """
    z = float_of(np.int32(_CUBE_ROOT_BITS - np.float32(bits_of(x)) * _THIRD))
    e = _ONE - x * z * z * z
    z += z * e * (_THIRD + _TWO_NINTHS * e)
    e = _ONE - x * z * z * z
    z += z * e * (_THIRD + _TWO_NINTHS * e)
    return x * z * z


@njit(inline="always")
def cubic_growth(size, start):
    """(size³ - start³)^⅓, or 0 if start > size. It never exceeds size; NaN stays NaN."""
    large = max(size, _SMALLEST)
    excess = max((large - start) / large, _ZERO)
    r = _ONE - excess  # 1 - r³ = (1 - r)(1 + r + r²) has no cancellation
    return size * min(cube_root(excess * (_ONE + r + r * r)), _ONE)


@njit(inline="always")
def _split(x):
    """Split x = 2^exponent (1 + r) with √½ ≤ 1 + r < √2."""
    bits = bits_of(x)
    exponent = np.int32(np.int32(bits - _SQRT_HALF) >> _MANTISSA)
    return exponent, float_of(np.int32(bits - np.int32(exponent << _MANTISSA))) - _ONE


@njit(inline="always")
def _ln_1p(r):
    r2 = r * r
    r4 = r2 * r2
    # Evaluated in pairs, which gives shorter dependency chains than Horner's scheme.
    low = (_L1 * r + _L0) + (_L3 * r + _L2) * r2
    high = (_L5 * r + _L4) + (_L7 * r + _L6) * r2
    p = low + r4 * (high + r4 * _L8)
    return r + r2 * (r * p - _HALF)


@njit(inline="always")
def _round(x):
    """Split x = whole + f with |f| ≤ ½."""
    whole = (x + _ROUND) - _ROUND
    return whole, x - whole


@njit(inline="always")
def _exp2_slope(f):
    """(2^f - 1) / f."""
    f2 = f * f
    return (_E2 * f + _E1) + f2 * ((_E4 * f + _E3) + f2 * (_E6 * f + _E5))


@njit(inline="always")
def _power(whole):
    """2^whole for an integer ``whole``."""
    return float_of(np.int32(np.int32(np.int32(whole) + _BIAS) << _MANTISSA))
