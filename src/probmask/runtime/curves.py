"""What is computed number by number: activations, sums and products."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from probmask.runtime.fields import Curve

# Sums may be reordered and contracted; that NaN or infinity do not occur may not be assumed.
LOOSE = {"contract", "reassoc", "nsz"}

_SILU, _GELU, _GELU_TANH = int(Curve.SILU), int(Curve.GELU), int(Curve.GELU_TANH)
_HARDSWISH = int(Curve.HARDSWISH)


@intrinsic
def _two_to_the(typing_context: Any, exponent: Any) -> Any:
    """2 to a power between -126 and 127, by its bits."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        int32 = ir.IntType(32)
        biased = builder.add(arguments[0], ir.Constant(int32, 127))
        bits = builder.shl(biased, ir.Constant(int32, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always", error_model="numpy")
def _exp(x):
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1.0)) * _two_to_the(np.int32(n))


@njit(inline="always", error_model="numpy")
def _sigmoid(x):
    # Below, what is left of it would be seen if multiplied with a large number.
    left = np.float32(1.0) / (np.float32(1.0) + _exp(-x))
    return left if x > np.float32(-87.0) else np.float32(0.0)


@njit(inline="always", error_model="numpy")
def _erf(x):
    """Abramowitz and Stegun 7.1.26: wrong by at most 1.5e-7."""
    a = abs(x)
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3275911) * a)
    p = np.float32(1.061405429)
    p = p * t - np.float32(1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t - np.float32(0.284496736)
    p = p * t + np.float32(0.254829592)
    y = np.float32(1.0) - p * t * _exp(-a * a)
    return y if x >= 0 else -y


@njit(error_model="numpy", fastmath=LOOSE)
def activate(x, y, curve, low, high, doubt):
    """y = curve(x), or x between low and high; each of them has 0 where x has."""
    n = len(x)
    total = np.float32(0.0)
    for i in range(n):
        total += x[i]
    doubt[0] += total * np.float32(0.0)
    if curve == _SILU:
        for i in range(n):
            y[i] = x[i] * _sigmoid(x[i])
    elif curve == _GELU:
        for i in range(n):
            v = x[i]
            y[i] = np.float32(0.5) * v * (np.float32(1.0) + _erf(v * np.float32(0.70710678)))
    elif curve == _GELU_TANH:
        for i in range(n):
            v = x[i]
            inner = np.float32(1.5957691216) * (v + np.float32(0.044715) * v * v * v)
            y[i] = v * _sigmoid(inner)
    elif curve == _HARDSWISH:
        for i in range(n):
            gate = min(max(x[i] + np.float32(3.0), np.float32(0.0)), np.float32(6.0))
            y[i] = x[i] * gate / np.float32(6.0)
    else:
        for i in range(n):
            y[i] = min(max(x[i], low), high)


@njit(error_model="numpy", fastmath=LOOSE)
def combine(x, z, y, scale, low, high, doubt):
    """y = x + z or x · z, between low and high."""
    total = np.float32(0.0)
    if scale:
        for i in range(len(x)):
            v = x[i] * z[i]
            total += v
            y[i] = min(max(v, low), high)
    else:
        for i in range(len(x)):
            v = x[i] + z[i]
            total += v
            y[i] = min(max(v, low), high)
    doubt[0] += total * np.float32(0.0)
