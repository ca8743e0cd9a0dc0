"""The largest weights of all tensors, and the threshold between them and the rest.

The value at which the budget ends is found from two histograms, of the upper and of the lower bits
of the magnitudes; a third pass writes the masks. Exact, and the same as `select_top` gives.
"""

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
    masks = select_top(values, keep, names=names)
    return masks, cut_between(values, masks)


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
