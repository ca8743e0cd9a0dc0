"""Slow, obvious references of `probmask.core.projection.project_`, on one flat fp64 array."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def project(z: Array, keep: float) -> tuple[Array, float]:
    """Return s and v: argmin ‖s - z‖² subject to 0 ≤ s ≤ 1 and Σ s ≤ keep."""
    return project_with_costs(z, np.ones_like(z), keep)


def project_with_costs(z: Array, c: Array, keep: float) -> tuple[Array, float]:
    """Return s and v for the constraint Σ c·s ≤ keep.

    f(v) = Σ c·clip(z - v·c, 0, 1) is linear between neighboring breakpoints z/c and (z-1)/c. The
    first breakpoint with f ≤ keep ends the segment that contains the root.
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
    """Return s for unit costs and huge z, where z - v has no digits left: count, do not subtract.

    No entry is strictly between 0 and 1 except the ties at the pivot. Entries above the pivot are
    kept, entries below are pruned, and the ties share the rest of the budget.
    """
    values = np.sort(z)[::-1]
    pivot = values[int(np.ceil(keep)) - 1]
    above, ties = z > pivot, z == pivot
    return np.where(above, 1.0, np.where(ties, (keep - above.sum()) / ties.sum(), 0.0))
