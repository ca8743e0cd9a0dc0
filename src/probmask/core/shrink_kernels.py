"""Shrinking, and the gradient of what is removed, compiled: one pass over memory each.

Mypy is told in pyproject.toml that Numba has the types.
"""

import numpy as np
from numba import njit

from probmask.core.vector_math import exp2, log2, log2_one_less, one_less_exp2

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}
_ZERO, _ONE = np.float32(0), np.float32(1)
_SMALLEST = np.float32(2.0**-126)  # of the normal numbers
_ALL_BUT_ONE = np.float32(1 - 2.0**-24)


@njit(**_OPTIONS)
def power(weight, active, threshold, p, out):
    """out = w (1 - r^p)^(1/p) with r = θ / |w| where active, else 0."""
    inverse = _ONE / p
    for i in range(len(out)):
        w = weight[i]
        size = max(abs(w), _SMALLEST)
        excess = (size - threshold) / size  # 1 - r
        part = one_less_exp2(p * log2_one_less(min(excess, _ALL_BUT_ONE)))
        root = exp2(log2(max(part, _SMALLEST)) * inverse)
        root = _ONE if threshold == _ZERO else root if excess > _ZERO else _ZERO
        out[i] = w * root if active[i] else _ZERO


# Reordered, or the sum would be one long chain; in the same way for the same length.
@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def squares(grad, active):
    """Σ g² over the active entries, and their number."""
    total, count = 0.0, 0
    for i in range(len(grad)):
        g = np.float64(grad[i])
        total += g * g if active[i] else 0.0
        count += active[i]
    return total, count


@njit(**_OPTIONS)
def temper(grad, active, share, limit):
    """Where not active: g <- share g, g first clamped to ± limit; NaN stays."""
    for i in range(len(grad)):
        g = grad[i]
        clamped = limit if g > limit else -limit if g < -limit else g
        grad[i] = g if active[i] else share * clamped
