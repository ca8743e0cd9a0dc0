"""The largest weights of all tensors, and the threshold between them and the rest.

The value at which the budget ends is found from two histograms, of the upper and of the lower bits
of the magnitudes; a third pass writes the masks. Exact, and the same as `select_top` gives.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.core.compiled import in_parts, kernels_for
from probmask.core.selection import select_top
from probmask.core.threshold import cut_between

_INFINITY = 0x7F800000  # the bits of the largest fp32 value; what is above is no number


def cut_by_magnitude(
    weights: Sequence[Tensor], scales: Sequence[float], keep: int, names: Sequence[str]
) -> tuple[list[Tensor], float]:
    """Masks of the `keep` largest |w|·scale jointly, and the threshold of `cut_between` for them.

    Equal values go by the earlier tensor, then by the lower row-major index.
    """
    weights = [weight.detach() for weight in weights]
    kernels = kernels_for("cut_kernels", *weights)
    size = sum(weight.numel() for weight in weights)
    simple = all(w.dtype == torch.float32 and w.is_contiguous() for w in weights)
    if kernels is not None and simple and 0 < keep < size:
        cut = _Cut(kernels, weights, scales)
        if cut.ordered:
            return cut.masks(keep, size)
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


class _Cut:
    """One cut through these weights; `ordered` unless some are NaN."""

    def __init__(self, kernels: Any, weights: Sequence[Tensor], scales: Sequence[float]) -> None:
        self._kernels = kernels
        self._weights = weights
        self._entries = [
            (weight.reshape(-1).numpy(), np.float32(scale))
            for weight, scale in zip(weights, scales, strict=True)
        ]
        self._first = self._histogram(1 << 31 - kernels.LOW, kernels.count_first)
        # Infinity is the first entry of its digit, NaNs are the others.
        self.ordered = not self._first[_INFINITY >> kernels.LOW :].any()

    def masks(self, keep: int, size: int) -> tuple[list[Tensor], float]:
        """The masks of so many, and the threshold."""
        low = self._kernels.LOW
        first, rest = _reach(self._first, keep)
        second = self._histogram(1 << low, self._kernels.count_second, np.int32(first))
        last, rest = _reach(second, rest)
        cut = np.int32(first << low | last)  # the bits of the least value kept
        masks = []
        removed = -1
        for weight, (x, scale) in zip(self._weights, self._entries, strict=True):
            mask = torch.empty(weight.shape, dtype=torch.bool, device="cpu")
            equal, below = self._mark(x, scale, cut, mask.view(-1).numpy())
            if equal:
                flat = mask.view(-1).numpy()
                taken = min(equal, rest)
                value = np.array(cut).view(np.float32)
                flat[np.flatnonzero(np.abs(x) * scale == value)[:taken]] = True
                rest -= taken
                removed = max(removed, int(cut) if taken < equal else -1)
            removed = max(removed, below)
            masks.append(mask)
        least, most = (float(np.array(bits, np.int32).view(np.float32)) for bits in (cut, removed))
        return masks, most + keep / size * (least - most)

    def _mark(self, x: Any, scale: Any, cut: Any, out: Any) -> tuple[int, int]:
        def part(begin: int, end: int) -> tuple[int, int]:
            equal, below = self._kernels.mark(x[begin:end], scale, cut, out[begin:end])
            return int(equal), int(below)

        equal, below = zip(*in_parts(len(x), part), strict=True)
        return sum(equal), max(below)

    def _histogram(self, bins: int, count: Any, *digit: Any) -> Any:
        """Of all entries, each thread counting its part of every tensor on its own."""
        total = np.zeros(bins, np.int64)
        for x, scale in self._entries:

            def part(begin: int, end: int, x: Any = x, scale: Any = scale) -> Any:
                counts = np.zeros(bins, np.int32)
                count(x[begin:end], scale, *digit, counts)
                return counts

            for counts in in_parts(len(x), part):
                total += counts
        return total


def _reach(counts: Any, keep: int) -> tuple[int, int]:
    """The bin that holds the keep-th entry from the top, and how many are wanted of it."""
    from_top = np.cumsum(counts[::-1])
    place = int(np.searchsorted(from_top, keep))
    before = int(from_top[place - 1]) if place else 0
    return len(counts) - 1 - place, keep - before
