"""Slow, obvious twins of `probmask.core.projection.project_`, on one flat fp64 array."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def project(z: Array, keep: float) -> tuple[Array, float]:
    """argmin ‖s - z‖² s.t. 0 ≤ s ≤ 1, Σ s ≤ keep: sort the breakpoints, walk down to the root."""
    return project_with_costs(z, np.ones_like(z), keep)


def project_with_costs(z: Array, c: Array, keep: float) -> tuple[Array, float]:
    """The same with Σ c·s ≤ keep.

    f(v) = Σ c·clip(z - v·c, 0, 1) is a line between neighbouring breakpoints z/c and (z-1)/c. So
    the first breakpoint with f ≤ keep ends the piece on which the root lies.
    """

    def f(v: float) -> float:
        return float(c @ np.clip(z - v * c, 0, 1))

    if f(0) <= keep:
        return np.clip(z, 0, 1), 0.0
    breakpoints = np.concatenate([z / c, (z - 1) / c])
    breakpoints = np.unique(np.append(breakpoints[breakpoints > 0], 0.0))
    low, high = 0, len(breakpoints) - 1  # f(low) > keep ≥ f(high) up to the rounding of z/c
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if f(breakpoints[middle]) > keep else (low, middle)
    a, b = breakpoints[low], breakpoints[high]
    share = (f(a) - keep) / (f(a) - f(b))
    v = a + min(share, 1.0) * (b - a)
    return np.clip(z - v * c, 0, 1), float(v)


def project_huge(z: Array, keep: float) -> Array:
    """Unit costs, any magnitude: where z - v loses all digits, count instead of subtracting.

    With integers above 2^53 nothing lies strictly between two values, so all above the pivot are
    kept, none below, and what remains of the budget is shared by the ties.
    """
    values = np.sort(z)[::-1]
    pivot = values[int(np.ceil(keep)) - 1]
    above, ties = z > pivot, z == pivot
    return np.where(above, 1.0, np.where(ties, (keep - above.sum()) / ties.sum(), 0.0))
