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
    if not pairs:
        return 0.0
    # Together, for a GPU waits whenever a number is asked for.
    facts = torch.stack([_extremes(value, mask).to(pairs[0][0].device) for value, mask in pairs])
    counts, most, smallest = facts.cpu().unbind(1)
    kept, size = int(counts.sum()), sum(value.numel() for value, _ in pairs)
    removed, least = float(most.amax()), float(smallest.amin())
    if kept == size:
        return 0.0
    return removed if kept == 0 else removed + kept / size * (least - removed)


def _extremes(value: Tensor, mask: Tensor) -> Tensor:
    """How many entries are kept, the largest removed (0 if none is), the least kept; in fp64."""
    found = (
        mask.count_nonzero(),
        value.masked_fill(mask, 0.0).amax(),
        value.masked_fill(~mask, torch.inf).amin(),
    )
    return torch.stack([each.double() for each in found])
