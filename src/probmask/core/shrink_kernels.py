"""Feather's rule in one compiled pass. Mypy is told in pyproject.toml that Numba has the types."""

import numpy as np
from numba import njit

from probmask.core.draw_kernels import _exp2, _log2

_ZERO, _ONE, _THIRD = (np.float32(x) for x in (0, 1, 1 / 3))
_SMALLEST = np.float32(2.0**-126)  # of the normal numbers


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def cubic(weight, active, threshold, out):
    """out = w (1 - r³)^⅓ with r = θ / |w| where active, else 0."""
    for i in range(len(out)):
        w = weight[i]
        size = max(abs(w), _SMALLEST)
        r = threshold / size
        excess = (size - threshold) / size * (_ONE + r * (_ONE + r))
        root = _exp2(_log2(max(excess, _SMALLEST)) * _THIRD)
        root = root if excess > _ZERO else _ZERO
        out[i] = w * root if active[i] else _ZERO
