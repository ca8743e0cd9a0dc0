"""Slow, obvious references of `probmask.core.allocation`, which cap and add one at a time."""

import math
from collections.abc import Sequence
from fractions import Fraction


def largest_remainder(shares: Sequence[float], total: int, caps: Sequence[int]) -> list[int]:
    """Give each unit to the entry that is furthest below its quota."""
    quotas = _quotas([Fraction(s) for s in shares], total, caps)
    counts = [0] * len(shares)
    for _ in range(total):
        missing = [quota - count for quota, count in zip(quotas, counts, strict=True)]
        counts[missing.index(max(missing))] += 1
    return counts


def _quotas(shares: list[Fraction], total: int, caps: Sequence[int]) -> list[Fraction]:
    """Cap the entry that exceeds its cap by the largest factor, and start again."""
    full: set[int] = set()
    while True:
        rest = [i for i, cap in enumerate(caps) if i not in full and cap > 0]
        left = total - sum(caps[i] for i in full)
        weights = shares if any(shares[i] for i in rest) else [Fraction(c) for c in caps]
        parts = [Fraction(caps[i]) if i in full else Fraction(0) for i in range(len(caps))]
        for i in rest:
            parts[i] = left * weights[i] / sum(weights[j] for j in rest)
        over = [i for i in rest if parts[i] > caps[i]]
        if not over:
            return parts
        full.add(max(over, key=lambda i: parts[i] / caps[i]))


def erdos_renyi_densities(
    shapes: Sequence[tuple[int, ...]], keep: int, *, kernel: bool
) -> list[float]:
    """Return densities min(1, ε·raw) with ε by bisection, so that Σ density·size = keep."""
    sizes = [math.prod(s) for s in shapes]
    raw = [sum(s) / math.prod(s) if kernel else (s[0] + s[1]) / (s[0] * s[1]) for s in shapes]
    low, high = 0.0, 1 / min(raw)
    for _ in range(200):
        middle = (low + high) / 2
        kept = sum(n * min(1.0, middle * r) for n, r in zip(sizes, raw, strict=True))
        low, high = (middle, high) if kept < keep else (low, middle)
    return [min(1.0, high * r) for r in raw]
