"""The threshold at which a selection by value cuts."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cut_between(values: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
    """θ = (1 - k)·max removed + k·min kept, k the fraction kept: the (1 - k)-quantile of values.

    That is the linearly interpolated quantile at position (1 - k)(n - 1), so that exactly the kept
    entries lie above it, but for ties. It is 0 if everything is kept. Values are not negative.
    """
    pairs = [pair for pair in zip(values, masks, strict=True) if pair[0].numel()]
    kept = sum(int(torch.count_nonzero(mask)) for _, mask in pairs)
    size = sum(value.numel() for value, _ in pairs)
    if kept == size:
        return 0.0
    removed = max(float(value.masked_fill(mask, 0.0).amax()) for value, mask in pairs)
    if kept == 0:
        return removed
    least = min(float(value.masked_fill(~mask, torch.inf).amin()) for value, mask in pairs)
    return removed + kept / size * (least - removed)
