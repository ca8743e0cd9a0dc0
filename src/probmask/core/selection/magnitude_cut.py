"""Masks of the largest weights of all tensors, and the threshold that separates them.

The masks are exact, ties included, and equal to those of `select_top`. On the CPU the compiled
`MagnitudeSearch` finds them, on a GPU one k-th value of the joined tensors, elsewhere `select_top`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from probmask.core.kernel_runner import kernels_for, storage_vectors
from probmask.core.selection.magnitude_search import Growths, Magnitudes, MagnitudeSearch
from probmask.core.selection.top_k import select_top
from probmask.core.shards import WHOLE, Shards
from probmask.core.shrinkage import Growth


def cut_by_magnitude(
    weights: Sequence[Tensor],
    scales: Sequence[float],
    keep: int,
    names: Sequence[str],
    *,
    into: Sequence[Tensor] | None = None,
    near: float = 0.0,
    growths: Sequence[Growth | None] | None = None,
    shards: Shards = WHOLE,
) -> tuple[list[Tensor], float]:
    """Masks of the ``keep`` largest |w|·scale of all tensors jointly, and their threshold θ.

    Among equal values the entry of the earlier tensor is kept, then the entry with the lower
    row-major index.

    Args:
        weights: the tensors w.
        scales: one positive factor per tensor.
        keep: the number of weights to keep.
        names: the names of the tensors, for error messages.
        into: boolean tensors that the compiled search overwrites with the masks, where their
            memory order allows it. Use the returned masks in any case.
        near: a prediction of θ, which makes the search faster if it is within 0.2 %. It does not
            change the result.
        growths: rules by which the growth of a tensor takes the place of w, or None for w itself.
        shards: the division of the tensors, if ``weights`` are the shards of this rank.

    Returns:
        One boolean mask per tensor, and θ as defined by `cut_between`.

    Raises:
        InputError: if ``keep`` is out of range.
        NonFiniteError: if a tensor contains NaN.

    Example:
        >>> weights = [torch.tensor([3.0, -1.0]), torch.tensor([-4.0, 2.0])]
        >>> masks, threshold = cut_by_magnitude(weights, [1.0, 1.0], 2, ["a", "b"])
        >>> [mask.tolist() for mask in masks], threshold
        ([[True, False], [True, False]], 2.5)
    """
    weights = [weight.detach() for weight in weights]
    growths = growths or [None] * len(weights)
    if shards.count > 1:
        values = _magnitudes(weights, scales, growths)
        masks = select_top(values, keep, names=names, shards=shards)
        return masks, cut_between(values, masks, shards)
    kernels = kernels_for("selection.magnitude_kernels", *weights)
    size = sum(weight.numel() for weight in weights)
    dense_fp32 = all(w.dtype == torch.float32 and storage_vectors(w) for w in weights)
    cubic = all(each is None or each.is_cubic(w) for each, w in zip(growths, weights, strict=True))
    if kernels is not None and dense_fp32 and cubic and 0 < keep < size:
        entries = [
            Magnitudes(kernels, weight, scale)
            if growth is None
            else Growths(kernels, weight, growth, scale)
            for weight, scale, growth in zip(weights, scales, growths, strict=True)
        ]
        found = MagnitudeSearch(kernels, entries).masks(keep, into, near)
        if found is not None:
            return found
    values = _magnitudes(weights, scales, growths)
    devices, dtypes = {value.device for value in values}, {value.dtype for value in values}
    if len(devices) == len(dtypes) == 1 and "cpu" not in {device.type for device in devices}:
        masks, threshold = cut_joined(values, keep)
        if not math.isnan(threshold):
            return masks, threshold
    masks = select_top(values, keep, names=names)  # raises for NaN
    return masks, cut_between(values, masks)


class ThresholdForecast:
    """Prediction of the next threshold, as if it kept changing by the same factor.

    Example:
        >>> forecast = ThresholdForecast()
        >>> for threshold in (0.5, 0.25):
        ...     forecast.record(threshold)
        >>> forecast.next
        0.125
    """

    def __init__(self) -> None:
        self._earlier, self._last = 0.0, 0.0

    def record(self, threshold: float) -> None:
        """Record the threshold of this update."""
        self._earlier, self._last = self._last, threshold

    @property
    def next(self) -> float:
        """The prediction, for ``near`` of `cut_by_magnitude`; 0 if there is none yet."""
        return self._last * self._last / self._earlier if self._earlier > 0 else self._last


def _magnitudes(
    weights: Sequence[Tensor], scales: Sequence[float], growths: Sequence[Growth | None]
) -> list[Tensor]:
    """|w|·scale of each tensor, or of its growth."""
    grown = [w if each is None else each(w) for w, each in zip(weights, growths, strict=True)]
    return [
        weight.abs() if scale == 1 else weight.abs().float() * scale
        for weight, scale in zip(grown, scales, strict=True)
    ]


def cut_between(values: Sequence[Tensor], masks: Sequence[Tensor], shards: Shards = WHOLE) -> float:
    """θ = (1 - k)·max pruned + k·min kept, with k the fraction kept: the (1 - k)-quantile.

    This is the linearly interpolated quantile at position (1 - k)(n - 1). Exactly the kept entries
    are above it, except for ties.

    Args:
        values: the tensors, not negative.
        masks: the masks of the largest entries, one per tensor.
        shards: the division of the tensors, if ``values`` are the shards of this rank.

    Returns:
        θ, which is 0 if all entries are kept.

    Example:
        >>> cut_between([torch.tensor([1.0, 2.0, 4.0])], [torch.tensor([False, False, True])])
        2.6666666666666665
    """
    # One transfer for all tensors: every transfer waits for the GPU.
    facts = [
        _extremes(value, mask).to(values[0].device)
        for value, mask in zip(values, masks, strict=True)
    ]
    if not facts:
        return 0.0
    found = shards.gathered(torch.stack(facts)).flatten(0, 1)
    counts, sizes, maxima, minima = found.cpu().unbind(1)
    kept, size = int(counts.sum()), int(sizes.sum())
    pruned, least = float(maxima.amax()), float(minima.amin())
    if kept == size:
        return 0.0
    return pruned if kept == 0 else pruned + kept / size * (least - pruned)


def cut_joined(values: Sequence[Tensor], keep: int) -> tuple[list[Tensor], float]:
    """Return masks and threshold of the joined tensors, with one wait for the GPU.

    If a value is NaN, the threshold is NaN and the masks are undefined.
    """
    flat = torch.cat([value.reshape(-1) for value in values])
    size = len(flat)
    if 0 < keep < size:
        least = _kth_largest(flat, keep)
        above, equal = flat > least, flat == least
        mask = above | (equal & (equal.cumsum(0) <= keep - above.count_nonzero()))
        pruned = flat.masked_fill(mask, 0.0).amax().double()
        threshold = pruned + keep / size * (least.double() - pruned)
        threshold = torch.where(flat.amax().isnan(), torch.nan, threshold)
    else:
        mask = torch.full_like(flat, keep == size, dtype=torch.bool)
        threshold = flat.amax() if keep == 0 else flat.amax() * 0
    parts = torch.split(mask, [value.numel() for value in values])
    masks = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
    return masks, float(threshold)


def _kth_largest(flat: Tensor, k: int) -> Tensor:
    """Return the k-th largest entry; NaN counts as the largest."""
    place = len(flat) - k
    if torch.are_deterministic_algorithms_enabled():
        return flat.sort().values[place]  # kthvalue raises: on a GPU its index is not deterministic
    return flat.kthvalue(place + 1).values


def _extremes(value: Tensor, mask: Tensor) -> Tensor:
    """Return, in fp64, the number kept, the size, the largest pruned and the smallest kept value.

    The largest pruned value is 0 if there is none, and the smallest kept value is infinity.
    """
    if value.numel() == 0:
        return torch.tensor([0.0, 0.0, 0.0, torch.inf], dtype=torch.float64, device=value.device)
    found = (
        mask.count_nonzero(),
        torch.tensor(value.numel(), device=value.device),
        value.masked_fill(mask, 0.0).amax(),
        value.masked_fill(~mask, torch.inf).amin(),
    )
    return torch.stack([each.double() for each in found])
