"""Rounding one channel to its best integer grid, in plain Python."""

import math

import torch

SMALLEST = {torch.float32: -149, torch.float64: -1074}


def scale(code: int) -> float:
    return math.ldexp(4 + code % 4, code // 4)


def quantized_channel(values: list[float], bits: int, dtype: torch.dtype) -> list[float]:
    """Try every scale, from that of the largest value down two octaves."""
    most = 2 ** (bits - 1) - 1
    kept = [abs(value) for value in values if value]
    if not kept:
        return values
    first = -5000
    while most * scale(first) < max(kept):
        first += 1
    codes = [max(first - k, 4 * SMALLEST[dtype]) for k in range(9)]
    if exact_grid(kept, most):
        return values
    grids = [[max(1, min(most, round(v / scale(c)))) * scale(c) for v in kept] for c in codes]
    errors = [math.fsum((a - b) ** 2 for a, b in zip(kept, grid, strict=True)) for grid in grids]
    best = codes[errors.index(min(errors))]
    return [
        math.copysign(max(1, min(most, round(abs(v) / scale(best)))) * scale(best), v) if v else v
        for v in values
    ]


def exact_grid(kept: list[float], most: int) -> bool:
    """Return whether one scale divides all values into integers of at most `most`."""
    low = 4 * math.frexp(max(kept) / most)[1] - 20
    scales = [scale(c) for c in range(low, 4 * math.frexp(max(kept))[1] + 5)]
    return any(s > 0 and all(math.fmod(v, s) == 0 and v / s <= most for v in kept) for s in scales)
