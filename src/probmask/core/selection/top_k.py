"""Exact global top-k: select the entries of several tensors to keep under one joint budget.

All entries have one total order: the larger value first; among equal values (-0.0 equals 0.0) the
larger tie; among equal ties the earlier tensor, then the lower row-major index. The tensors are
neither joined nor sorted. A radix search finds the value at which the budget ends: it reads the
bits of a float as an integer of the same order and counts one digit per pass in a histogram.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from probmask.core.selection.ordered_bits import float_from, ordered_bits
from probmask.core.selection.sharded_top_k import select_in_groups
from probmask.core.shards import WHOLE, Shards
from probmask.errors import InputError, NonFiniteError

_DIGIT = 11  # bits per histogram (16 KiB per tensor); float32 has three digits, float64 six
_BINS = 1 << _DIGIT
_CHUNK = 1 << 18  # entries per pass: intermediate results stay in the cache


def select_top(
    values: Sequence[Tensor],
    keep: int,
    *,
    ties: Sequence[Tensor] | None = None,
    minimum: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    shards: Shards = WHOLE,
) -> list[Tensor]:
    """argmax over masks m of Σ m·v subject to Σ m = keep: the ``keep`` largest entries jointly.

    The result is unique: among equal values the entry with the larger tie is kept, among equal
    ties the entry of the earlier tensor, then the entry with the lower row-major index.

    Args:
        values: the tensors v, floating point, of any shapes.
        keep: the number of entries to keep in all tensors together.
        ties: tensors of the same shapes that order equal values.
        minimum: the number of entries to keep at least in each tensor. Each tensor's largest
            entries are taken first; they count towards ``keep``.
        names: the names of the tensors, for error messages.
        shards: the division of the tensors, if ``values`` are the shards of this rank. ``keep``
            and ``minimum`` are those of the whole tensors.

    Returns:
        One boolean mask per tensor, True where an entry is kept.

    Raises:
        InputError: if ``keep`` or a minimum is out of range, or shapes do not match.
        NonFiniteError: if a tensor contains NaN.

    Example:
        >>> masks = select_top([torch.tensor([5.0, 1.0]), torch.tensor([3.0, 4.0])], 2)
        >>> [mask.tolist() for mask in masks]
        [[True, False], [False, True]]
    """
    if shards.count > 1:
        return _select_sharded(values, keep, ties, minimum, names, shards)
    n = sum(v.numel() for v in values)
    if not (0 <= keep <= n and keep == int(keep)):
        raise InputError(
            f"select_top(keep={keep}): keep is the number of entries to keep, an integer from 0 to "
            f"{n}; for a sparsity pass n - round(sparsity * n)."
        )
    # With unit costs, the greedy selection stops after exactly `keep` entries.
    budget = _Budget([1.0] * len(values), keep)
    return _select(f"select_top(keep={keep})", budget, values, ties, minimum, names)


def select_in_each(
    values: Sequence[Tensor],
    counts: Sequence[int],
    *,
    ties: Sequence[Tensor] | None = None,
    names: Sequence[str],
    shards: Shards = WHOLE,
) -> list[Tensor]:
    """Masks of the `counts[i]` largest entries of each tensor i, as of `select_top` on it alone."""
    if shards.count > 1:
        groups = range(len(values))
        return select_in_groups(
            "select_in_each", values, groups, counts, shards, ties=ties, names=names
        )
    return [
        select_top([value], count, ties=None if ties is None else [ties[i]], names=[names[i]])[0]
        for i, (value, count) in enumerate(zip(values, counts, strict=True))
    ]


def select_within(
    values: Sequence[Tensor],
    costs: Sequence[float],
    budget: float,
    *,
    ties: Sequence[Tensor] | None = None,
    minimum: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> list[Tensor]:
    """Greedy knapsack: in the order of `select_top`, keep each entry that fits into the budget.

    An entry of tensor i costs ``costs[i]``. An entry that does not fit is skipped, and cheaper
    entries further down are still kept. Numbers of kept entries fit if
    math.fsum(c * k for c, k in zip(costs, kept)) <= budget in float64. The caller can repeat this
    test; it is exact for integer costs.

    Args:
        values: the tensors, floating point, of any shapes.
        costs: the positive cost of an entry of each tensor.
        budget: the largest total cost.
        ties: tensors of the same shapes that order equal values.
        minimum: the number of entries to keep at least in each tensor; taken first and counted
            against the budget.
        names: the names of the tensors, for error messages.

    Returns:
        One boolean mask per tensor, True where an entry is kept.

    Raises:
        InputError: if the budget, a cost or a minimum is out of range, or shapes do not match.
        NonFiniteError: if a tensor contains NaN.

    Example:
        >>> values = [torch.tensor([9.0, 7.0]), torch.tensor([8.0, 6.0])]
        >>> [mask.tolist() for mask in select_within(values, costs=[3, 1], budget=5)]
        [[True, False], [True, True]]
    """
    call = f"select_within(budget={budget})"
    if not budget >= 0:
        raise InputError(f"{call}: budget is the largest total cost of the kept entries, ≥ 0.")
    _check_length(call, "costs", costs, values)
    for i, cost in enumerate(costs):
        if not 0 < cost < math.inf:
            raise InputError(f"{call}: costs[{i}] is {cost}; it must be positive and finite.")
    return _select(call, _Budget(costs, budget), values, ties, minimum, names)


def kept_counts(masks: Sequence[Tensor]) -> list[int]:
    """k[i] = Σ m[i]: the number of kept entries of each mask.

    Args:
        masks: boolean masks.

    Returns:
        One integer per mask.

    Example:
        >>> kept_counts([torch.tensor([True, False]), torch.tensor([True, True])])
        [1, 2]
    """
    return [int(torch.count_nonzero(m)) for m in masks]


def _select_sharded(
    values: Sequence[Tensor],
    keep: int,
    ties: Sequence[Tensor] | None,
    minimum: Sequence[int] | None,
    names: Sequence[str] | None,
    shards: Shards,
) -> list[Tensor]:
    """Do what `select_top` does: first the minimum of each tensor, then all tensors together."""
    call, taken = f"select_top(keep={keep})", None
    if minimum is not None and any(minimum):
        each = range(len(values))
        taken = select_in_groups(call, values, each, minimum, shards, ties=ties, names=names)
        keep -= sum(minimum)
    joint = [0] * len(values)
    return select_in_groups(
        call, values, joint, [keep], shards, ties=ties, taken=taken, names=names
    )


class _Budget:
    """Σ costs[i]·kept[i] ≤ total. The sum is correctly rounded, so it is monotonic in kept."""

    def __init__(self, costs: Sequence[float], total: float) -> None:
        self.costs, self.total = [float(c) for c in costs], float(total)
        self.kept = [0] * len(costs)

    def fits(self, extra: Mapping[int, int]) -> bool:
        """Return whether this number of further entries fits, by tensor."""
        kept = [k + extra.get(i, 0) for i, k in enumerate(self.kept)]
        return math.fsum(c * k for c, k in zip(self.costs, kept, strict=True)) <= self.total

    def fitting(self, i: int, limit: int) -> int:
        """Return the number of further entries of tensor i that fit, at most ``limit``."""
        return bisect_left(range(1, limit + 1), True, key=lambda q: not self.fits({i: q}))


def _select(
    call: str,
    budget: _Budget,
    values: Sequence[Tensor],
    ties: Sequence[Tensor] | None,
    minimum: Sequence[int] | None,
    names: Sequence[str] | None,
) -> list[Tensor]:
    levels = [_flat(call, "values", values, names)]
    if ties is not None:
        _check_length(call, "ties", ties, values)
        levels.append(_flat(call, "ties", ties, names))
        for i, (v, t) in enumerate(zip(values, ties, strict=True)):
            if v.shape != t.shape:
                shapes = f"{tuple(t.shape)}, values[{i}] {tuple(v.shape)}"
                raise InputError(f"{call}: ties[{i}] has shape {shapes}; they must be the same.")
    masks = [torch.zeros_like(v, dtype=torch.bool) for v in levels[0]]
    if minimum is not None:
        _check_minimum(call, budget, masks, minimum)
        for i, count in enumerate(minimum):
            _fill(_Budget([1.0], count), [[level[i]] for level in levels], masks[i : i + 1])
            budget.kept[i] = count
    _fill(budget, levels, masks)
    return [m.view(v.shape) for m, v in zip(masks, values, strict=True)]


def _flat(
    call: str, label: str, tensors: Sequence[Tensor], names: Sequence[str] | None
) -> list[Tensor]:
    """Return the tensors as row-major vectors, all float32, or float64 if one of them is."""
    wide = any(x.dtype == torch.float64 for x in tensors)
    flat = []
    for i, x in enumerate(tensors):
        name = f"{label}[{i}]" + (f" ({names[i]})" if names else "")
        if not x.is_floating_point():
            raise InputError(f"{call}: {name} is {x.dtype}; pass floating-point tensors.")
        if x.numel() and x.detach().amax().isnan():  # the maximum is NaN if any entry is
            raise NonFiniteError(
                f"{call}: {name} contains NaN, which cannot be ordered. Look for a loss or a "
                "gradient that diverged."
            )
        flat.append(x.detach().reshape(-1).to(torch.float64 if wide else torch.float32))
    return flat


def _check_length(
    call: str, label: str, given: Sequence[object], tensors: Sequence[Tensor]
) -> None:
    if len(given) != len(tensors):
        counts = f"{len(given)} {label} for {len(tensors)} tensors"
        raise InputError(f"{call}: {counts}; pass one for each tensor.")


def _check_minimum(
    call: str, budget: _Budget, masks: Sequence[Tensor], minimum: Sequence[int]
) -> None:
    _check_length(call, "minima", minimum, masks)
    for i, (count, m) in enumerate(zip(minimum, masks, strict=True)):
        if not 0 <= count <= len(m):
            rule = f"it must be from 0 to {len(m)}, the size of tensor {i}."
            raise InputError(f"{call}: minimum[{i}] is {count}; {rule}")
    if not budget.fits(dict(enumerate(minimum))):
        raise InputError(
            f"{call}: the minima require {sum(minimum)} entries, which exceeds the budget."
        )


def _fill(budget: _Budget, levels: list[list[Tensor]], masks: list[Tensor]) -> None:
    """Keep entries greedily, in rounds; a round keeps the longest prefix of the order that fits.

    The cost only grows, so a tensor is finished as soon as one more of its entries does not fit.
    The other tensors keep all their entries up to this point of the order, so the entries that
    remain are those outside the mask.
    """
    unfinished = list(range(len(masks)))
    while unfinished := [
        i for i in unfinished if budget.kept[i] < len(masks[i]) and budget.fits({i: 1})
    ]:
        _take_prefix(budget, levels, masks, unfinished)


def _take_prefix(
    budget: _Budget, levels: list[list[Tensor]], masks: list[Tensor], unfinished: list[int]
) -> None:
    tied = {i: ~masks[i] for i in unfinished}
    for level in levels:
        threshold = _threshold(budget, {i: _entries(tied[i], level[i]) for i in unfinished})
        for i in unfinished:
            above = tied[i] & (level[i] > threshold)
            masks[i] |= above
            budget.kept[i] += int(above.sum())
            tied[i] &= level[i] == threshold
    for i in unfinished:  # entries equal on every level: by position
        places = tied[i].nonzero().flatten()
        count = budget.fitting(i, len(places))
        masks[i][places[:count]] = True
        budget.kept[i] += count


def _entries(mask: Tensor, x: Tensor) -> Tensor:
    return x if bool(mask.all()) else x[mask]  # no copy in the first round


def _threshold(budget: _Budget, entries: dict[int, Tensor]) -> float:
    """t = max {t : the entries x ≥ t do not all fit}, which is an entry; -inf if all entries fit.

    Each pass finds one more digit of t and continues with the entries that share its digits.
    """
    dtype = next(iter(entries.values())).dtype
    bits = torch.finfo(dtype).bits
    above = dict.fromkeys(entries, 0)
    low = -1 << (bits - 1)  # the smallest integer with the digits of t found so far
    for shift in (*range(bits - _DIGIT, 0, -_DIGIT), 0):
        counts = {i: _counts_from(x, shift, low) for i, x in entries.items() if len(x)}
        fitting, above = _lowest_fitting_bin(budget, above, counts)
        if fitting == 0:  # only in the first pass: later passes split a bin that does not fit
            return -math.inf
        low += (fitting - 1) << shift
        entries = {i: _with_digits(entries[i], shift, low) for i in counts}
    return float_from(low, dtype)


def _lowest_fitting_bin(
    budget: _Budget, above: dict[int, int], counts: dict[int, Tensor]
) -> tuple[int, dict[int, int]]:
    """Return the lowest bin that fits with all higher bins, and the entries down to it."""

    def down_to(d: int) -> dict[int, int]:
        return above | {i: above[i] + int(count[d]) for i, count in counts.items()}

    d = bisect_left(range(_BINS), True, key=lambda d: budget.fits(down_to(d)))
    return d, down_to(d)


def _counts_from(x: Tensor, shift: int, low: int) -> Tensor:
    """Return for d = 0, …, _BINS the number of entries in bin d or higher, bin 0 being at low."""
    histogram = torch.zeros(_BINS + 1, dtype=torch.int64, device=x.device)
    for chunk in torch.split(x, _CHUNK):
        bins = (ordered_bits(chunk) >> shift) - (low >> shift)
        histogram += torch.bincount(bins, minlength=_BINS + 1)
    return histogram.flip(0).cumsum(0).flip(0).cpu()


def _with_digits(x: Tensor, shift: int, low: int) -> Tensor:
    chunks = torch.split(x, _CHUNK)
    return torch.cat([c[ordered_bits(c) >> shift == low >> shift] for c in chunks])
