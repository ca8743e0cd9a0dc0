"""Exact top-k of sharded tensors, in several groups at once.

Every rank has the same rows of all tensors. The order is that of `top_k`: the larger value first,
then the larger tie, then the earlier tensor and the lower row-major index of the whole tensor. The
ranks send one histogram per group for each digit of the values, and once the number of entries that
are equal up to the last tie. Values and masks stay where they are.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from probmask.core.selection.ordered_bits import float_from, ordered_bits
from probmask.core.shards import Shards
from probmask.errors import InputError, NonFiniteError

_CHUNK = 1 << 18  # entries per pass on a CPU: intermediate results stay in the cache
_ONE_GROUP, _MANY_GROUPS = 11, 8  # bits per digit: a histogram of 16 KiB, or many of 2 KiB


def select_in_groups(
    call: str,
    values: Sequence[Tensor],
    groups: Sequence[int],
    keep: Sequence[int],
    shards: Shards,
    *,
    ties: Sequence[Tensor] | None = None,
    taken: Sequence[Tensor] | None = None,
    names: Sequence[str] | None = None,
) -> list[Tensor]:
    """Masks of the ``keep[g]`` largest entries of each group g of tensors, over all shards.

    Args:
        call: the call, for error messages.
        values: the shards of the tensors on this rank, floating point.
        groups: the group of each tensor.
        keep: the number of entries to keep in each group.
        shards: the division of the tensors.
        ties: tensors of the same shapes that order equal values.
        taken: masks of entries that are kept in addition to ``keep``.
        names: the names of the tensors, for error messages.

    Returns:
        One boolean mask per tensor, for its rows on this rank.

    Raises:
        InputError: if a group has fewer entries than it has to keep. On all ranks.
        NonFiniteError: if a tensor contains NaN on any rank. On all ranks.
    """
    names = names or [f"values[{i}]" for i in range(len(values))]
    sizes = [v.numel() for v in values]
    masks = [torch.zeros(v.numel(), dtype=torch.bool, device=v.device) for v in values]
    if taken is not None:
        masks = [mask.reshape(-1).clone() for mask in taken]
    tied = [~mask for mask in masks]
    left = list(keep)
    whole = taken is None  # whether all entries are tied, so that none need to be selected
    for level in (values,) if ties is None else (values, ties):
        joined = _joined(level)
        parts = torch.split(joined, sizes)
        if len(keep) == 1:  # one tensor in place of many: fewer operations
            entries, groups_of = [joined if whole else joined[torch.cat(tied)]], [0]
        else:
            entries = [x if whole else x[t] for x, t in zip(parts, tied, strict=True)]
            groups_of = list(groups)
        named = list(zip(names, parts, strict=True))
        cuts, above = _cuts(call, entries, groups_of, left, shards, named)
        for mask, open_, x, group in zip(masks, tied, parts, groups, strict=True):
            mask |= open_ & (x > cuts[group])
            open_ &= x == cuts[group]
        left = [k - more for k, more in zip(left, above, strict=True)]
        whole = False
    _take_by_position(masks, tied, groups, left, shards)
    return [mask.view(v.shape) for mask, v in zip(masks, values, strict=True)]


def nth_largest(values: Sequence[Tensor], n: int, shards: Shards, names: Sequence[str]) -> float:
    """Return the n-th largest entry, counted from 1, of all tensors over all shards."""
    named = list(zip(names, values, strict=True))
    (cut,), _ = _cuts(f"nth_largest(n={n})", [_joined(values)], [0], [n], shards, named)
    return cut


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector in fp32, or in fp64 if a tensor is. Adding 0 turns -0.0 into 0.0."""
    wide = any(x.dtype == torch.float64 for x in tensors)
    dtype = torch.float64 if wide else torch.float32
    return torch.cat([x.detach().reshape(-1).to(dtype) for x in tensors]).add_(0.0)


def _cuts(
    call: str,
    entries: Sequence[Tensor],
    groups: Sequence[int],
    keep: Sequence[int],
    shards: Shards,
    named: Sequence[tuple[str, Tensor]],
) -> tuple[list[float], list[int]]:
    """Return the keep-th largest entry of each group, and the number of entries above it.

    The cut of a group that keeps nothing is infinite. Each pass finds one more digit of the cuts.
    ``named`` are the tensors of which an error names those with NaN.
    """
    dtype = entries[0].dtype
    bits = torch.finfo(dtype).bits
    digit = _ONE_GROUP if len(keep) == 1 else _MANY_GROUPS
    low = [-1 << (bits - 1)] * len(keep)  # the smallest integers with the digits found so far
    above = [0] * len(keep)
    for shift in (*range(bits - digit, 0, -digit), 0):
        found = _histograms(entries, groups, len(keep), 1 << digit, shift, low)
        found = shards.total(found).cpu()
        if int(found[:, -1].sum()):
            broken = [name for name, x in named if bool(x.isnan().any())]
            raise NonFiniteError(
                f"{call}: {', '.join(broken) or 'a tensor on another rank'} contains NaN, which "
                "cannot be ordered. Look for a loss or a gradient that diverged."
            )
        from_top = found[:, :-1].flip(1).cumsum(1)
        for group, k in enumerate(keep):
            if k == 0:
                continue
            sums = from_top[group]
            if int(sums[-1]) < k - above[group]:
                raise InputError(
                    f"{call}: {k} entries to keep, but there are only {int(sums[-1])}; keep fewer."
                )
            place = int(torch.searchsorted(sums, k - above[group]))
            above[group] += int(sums[place - 1]) if place else 0
            low[group] += ((1 << digit) - 1 - place) << shift
        entries = [_with_digits(x, shift, low[g]) for x, g in zip(entries, groups, strict=True)]
    pairs = zip(low, keep, strict=True)
    return [float_from(cut, dtype) if k else math.inf for cut, k in pairs], above


def _histograms(
    entries: Sequence[Tensor],
    groups: Sequence[int],
    number: int,
    bins: int,
    shift: int,
    low: Sequence[int],
) -> Tensor:
    """Return one row of counts per group; the last column is the number of NaNs."""
    found = torch.zeros(number, bins + 1, dtype=torch.int64, device=entries[0].device)
    for x, group in zip(entries, groups, strict=True):
        for chunk in _chunks(x):
            places = (ordered_bits(chunk) >> shift) - (low[group] >> shift)
            found[group, :-1] += torch.bincount(places, minlength=bins).to(found.device)
            found[group, -1] += chunk.isnan().count_nonzero().to(found.device)
    return found


def _with_digits(x: Tensor, shift: int, low: int) -> Tensor:
    return torch.cat([c[ordered_bits(c) >> shift == low >> shift] for c in _chunks(x)])


def _chunks(x: Tensor) -> Sequence[Tensor]:
    """Return x in chunks on a CPU, whole elsewhere: starting kernels takes longer on a GPU."""
    return torch.split(x, _CHUNK) if x.device.type == "cpu" else (x,)


def _take_by_position(
    masks: Sequence[Tensor],
    tied: Sequence[Tensor],
    groups: Sequence[int],
    left: list[int],
    shards: Shards,
) -> None:
    """Keep the first ``left[g]`` tied entries of each group: earlier tensors, then lower rows."""
    counts = torch.stack([open_.count_nonzero() for open_ in tied])
    everywhere = shards.gathered(counts).cpu()  # (ranks, tensors)
    before = everywhere[: shards.index].sum(0).tolist()
    for i, (mask, open_, group) in enumerate(zip(masks, tied, groups, strict=True)):
        taken = min(left[group], int(everywhere[:, i].sum()))
        left[group] -= taken
        here = min(max(0, taken - before[i]), int(everywhere[shards.index, i]))
        if here:
            mask[open_.nonzero().flatten()[:here]] = True
