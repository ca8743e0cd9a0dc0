"""The largest weights of all tensors, and the threshold between them and the rest.

The value at which the budget ends is found as by Floyd and Rivest: a sample tells about where it
is, and a pass counts what is above that, and every value close to it; if it was not close enough,
once more. If the sample misleads altogether, two histograms, of the upper and of the lower bits of
the magnitudes, find the value in any case. A last pass writes the masks. Exact, and the same as
`select_top` gives.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from probmask.core.kernel_runner import kernels_for
from probmask.core.memory import as_stored
from probmask.core.selection.magnitude_search import MagnitudeSearch
from probmask.core.selection.top_k import select_top


def cut_by_magnitude(
    weights: Sequence[Tensor],
    scales: Sequence[float],
    keep: int,
    names: Sequence[str],
    *,
    into: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], float]:
    """Masks of the `keep` largest |w|·scale jointly, and the threshold of `cut_between` for them.

    Equal values go by the earlier tensor, then by the lower row-major index. The masks are new
    tensors, or, where they can be written there at once, those of ``into``.
    """
    weights = [weight.detach() for weight in weights]
    kernels = kernels_for("selection.magnitude_kernels", *weights)
    size = sum(weight.numel() for weight in weights)
    simple = all(w.dtype == torch.float32 and as_stored(w) for w in weights)
    if kernels is not None and simple and 0 < keep < size:
        found = MagnitudeSearch(kernels, weights, scales).masks(keep, into)
        if found is not None:
            return found
    values = [
        weight.abs() if scale == 1 else weight.abs().float() * scale
        for weight, scale in zip(weights, scales, strict=True)
    ]
    devices, dtypes = {value.device for value in values}, {value.dtype for value in values}
    if len(devices) == len(dtypes) == 1 and "cpu" not in {device.type for device in devices}:
        masks, threshold = cut_joined(values, keep)
        if not math.isnan(threshold):
            return masks, threshold
    masks = select_top(values, keep, names=names)
    return masks, cut_between(values, masks)


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


def cut_joined(values: Sequence[Tensor], keep: int) -> tuple[list[Tensor], float]:
    """The same of values that are joined for it: for a GPU, which has to be waited for only once.

    The threshold is NaN if some value is, and the masks mean nothing.
    """
    flat = torch.cat([value.reshape(-1) for value in values])
    size = len(flat)
    if 0 < keep < size:
        least = _kth_largest(flat, keep)
        above, equal = flat > least, flat == least
        mask = above | (equal & (equal.cumsum(0) <= keep - above.count_nonzero()))
        removed = flat.masked_fill(mask, 0.0).amax().double()
        threshold = removed + keep / size * (least.double() - removed)
        threshold = torch.where(flat.amax().isnan(), torch.nan, threshold)
    else:
        mask = torch.full_like(flat, keep == size, dtype=torch.bool)
        threshold = flat.amax() if keep == 0 else flat.amax() * 0
    parts = torch.split(mask, [value.numel() for value in values])
    masks = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
    return masks, float(threshold)


def _kth_largest(flat: Tensor, k: int) -> Tensor:
    """The k-th largest entry; a NaN counts as the largest."""
    place = len(flat) - k
    if torch.are_deterministic_algorithms_enabled():
        return flat.sort().values[place]  # on a GPU it refuses kthvalue, for the index it gives too
    return flat.kthvalue(place + 1).values


def _extremes(value: Tensor, mask: Tensor) -> Tensor:
    """How many entries are kept, the largest removed (0 if none is), the least kept; in fp64."""
    found = (
        mask.count_nonzero(),
        value.masked_fill(mask, 0.0).amax(),
        value.masked_fill(~mask, torch.inf).amin(),
    )
    return torch.stack([each.double() for each in found])
