"""Exact global selection: which entries of several tensors are kept under one joint budget.

All entries stand in one order: the larger value first; among equal values (-0.0 equals 0.0) the
larger tie; among equal ties the earlier tensor, then the lower row-major index. The order is never
written out, nor are the tensors joined or sorted: the value at which the budget ends is found
digit by digit, from histograms of the floats seen as integers of the same order.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from probmask.errors import InputError, NonFiniteError

_DIGIT = 11  # bits per histogram: 16 KiB for each tensor; float32 has three digits, float64 six
_BINS = 1 << _DIGIT
_CHUNK = 1 << 18  # entries per pass: what is computed from them stays in the cache


def select_top(
    values: Sequence[Tensor],
    keep: int,
    *,
    ties: Sequence[Tensor] | None = None,
    minimum: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> list[Tensor]:
    """Masks m of the `keep` largest entries of all tensors jointly: argmax Σ m·v with Σ m = keep.

    Equal values are decided by the larger `ties`; equal ties by the earlier tensor, then the lower
    row-major index, so the result is unique. At least `minimum[i]` entries of tensor i are kept:
    its own best are taken first, then the rest globally. `names` are for the error messages.
    """
    n = sum(v.numel() for v in values)
    if not (0 <= keep <= n and keep == int(keep)):
        raise InputError(
            f"select_top(keep={keep}): keep is the number of entries to keep, from 0 to the {n} "
            "there are; for a sparsity pass n - round(sparsity * n)."
        )
    # If every entry costs 1, the greedy walk ends exactly when `keep` are taken.
    budget = _Budget([1.0] * len(values), keep)
    return _select(f"select_top(keep={keep})", budget, values, ties, minimum, names)


def select_in_each(
    values: Sequence[Tensor],
    counts: Sequence[int],
    *,
    ties: Sequence[Tensor] | None = None,
    names: Sequence[str],
) -> list[Tensor]:
    """Masks of the `counts[i]` largest entries of each tensor i, by `select_top` on it alone."""
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
    """Masks of the greedy walk down the order of `select_top`: take each entry that still fits.

    An entry of tensor i costs `costs[i]`. One that no longer fits is passed over, and cheaper ones
    further down are still taken. Numbers kept fit if math.fsum(c * k for c, k in zip(costs, kept))
    <= budget, in float64: a test the caller can repeat, and exact for integer costs. The minimum
    is taken first and counts against the budget.
    """
    call = f"select_within(budget={budget})"
    if not budget >= 0:
        raise InputError(f"{call}: budget is what the kept entries may cost together, 0 or more.")
    _check_length(call, "costs", costs, values)
    for i, cost in enumerate(costs):
        if not 0 < cost < math.inf:
            raise InputError(f"{call}: costs[{i}] is {cost}; a cost is positive and finite.")
    return _select(call, _Budget(costs, budget), values, ties, minimum, names)


def kept_counts(masks: Sequence[Tensor]) -> list[int]:
    """Number of True entries of each mask: k[i] = Σ m[i]."""
    return [int(torch.count_nonzero(m)) for m in masks]


class _Budget:
    """Σ costs[i]·kept[i] ≤ total; the sum is correctly rounded, so it never falls as kept grows."""

    def __init__(self, costs: Sequence[float], total: float) -> None:
        self.costs, self.total = [float(c) for c in costs], float(total)
        self.kept = [0] * len(costs)

    def fits(self, extra: Mapping[int, int]) -> bool:
        kept = [k + extra.get(i, 0) for i, k in enumerate(self.kept)]
        return math.fsum(c * k for c, k in zip(self.costs, kept, strict=True)) <= self.total

    def room(self, i: int, most: int) -> int:
        """How many more entries of tensor i fit, up to `most`."""
        return bisect_left(range(1, most + 1), True, key=lambda q: not self.fits({i: q}))


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
        for i, least in enumerate(minimum):
            _walk(_Budget([1.0], least), [[level[i]] for level in levels], masks[i : i + 1])
            budget.kept[i] = least
    _walk(budget, levels, masks)
    return [m.view(v.shape) for m, v in zip(masks, values, strict=True)]


def _flat(
    call: str, what: str, tensors: Sequence[Tensor], names: Sequence[str] | None
) -> list[Tensor]:
    """The tensors as vectors in row-major order, all float32, or float64 if one of them is."""
    wide = any(x.dtype == torch.float64 for x in tensors)
    flat = []
    for i, x in enumerate(tensors):
        name = f"{what}[{i}]" + (f" ({names[i]})" if names else "")
        if not x.is_floating_point():
            raise InputError(f"{call}: {name} is {x.dtype}; only floats are ordered here.")
        if x.numel() and x.detach().amax().isnan():  # the maximum is NaN if any entry is
            raise NonFiniteError(
                f"{call}: {name} holds a NaN, which has no place in an order; look for a loss or "
                "gradient that diverged."
            )
        flat.append(x.detach().reshape(-1).to(torch.float64 if wide else torch.float32))
    return flat


def _check_length(call: str, what: str, given: Sequence[object], tensors: Sequence[Tensor]) -> None:
    if len(given) != len(tensors):
        counts = f"{len(given)} {what} for {len(tensors)} tensors"
        raise InputError(f"{call}: {counts}; pass one for each tensor.")


def _check_minimum(
    call: str, budget: _Budget, masks: Sequence[Tensor], minimum: Sequence[int]
) -> None:
    _check_length(call, "minima", minimum, masks)
    for i, (least, m) in enumerate(zip(minimum, masks, strict=True)):
        if not 0 <= least <= len(m):
            rule = f"tensor {i} has {len(m)} entries, so it is 0 to {len(m)}."
            raise InputError(f"{call}: minimum[{i}] is {least}; {rule}")
    if not budget.fits(dict(enumerate(minimum))):
        raise InputError(f"{call}: the minima ask for {sum(minimum)} entries, which do not fit.")


def _walk(budget: _Budget, levels: list[list[Tensor]], masks: list[Tensor]) -> None:
    """The greedy walk in rounds: take the longest prefix that fits, drop what never fits again.

    As the cost only grows, a tensor of which one more entry does not fit is done. Of the others
    everything up to this point of the order is taken: what lies ahead is what the mask leaves out.
    """
    ahead = list(range(len(masks)))
    while ahead := [i for i in ahead if budget.kept[i] < len(masks[i]) and budget.fits({i: 1})]:
        _take_prefix(budget, levels, masks, ahead)


def _take_prefix(
    budget: _Budget, levels: list[list[Tensor]], masks: list[Tensor], ahead: list[int]
) -> None:
    tied = {i: ~masks[i] for i in ahead}
    for level in levels:
        threshold = _threshold(budget, {i: _where(tied[i], level[i]) for i in ahead})
        for i in ahead:
            above = tied[i] & (level[i] > threshold)
            masks[i] |= above
            budget.kept[i] += int(above.sum())
            tied[i] &= level[i] == threshold
    for i in ahead:  # equal on every level: by position
        places = tied[i].nonzero().flatten()
        room = budget.room(i, len(places))
        masks[i][places[:room]] = True
        budget.kept[i] += room


def _where(mask: Tensor, x: Tensor) -> Tensor:
    return x if bool(mask.all()) else x[mask]  # no copy in the first round


def _threshold(budget: _Budget, entries: dict[int, Tensor]) -> float:
    """t = max {t : not all entries x ≥ t fit}, an entry itself; -inf if they all fit.

    Each pass settles one more digit of t and goes on with the entries that have t's digits so far.
    """
    dtype = next(iter(entries.values())).dtype
    bits = torch.finfo(dtype).bits
    above = dict.fromkeys(entries, 0)
    low = -1 << (bits - 1)  # the least integer with t's digits so far
    for shift in (*range(bits - _DIGIT, 0, -_DIGIT), 0):
        counts = {i: _at_least(x, shift, low) for i, x in entries.items() if len(x)}
        fitting, above = _lowest_that_fits(budget, above, counts)
        if fitting == 0:  # in the first pass only: later ones look into a bin that does not fit
            return -math.inf
        low += (fitting - 1) << shift
        entries = {i: _with_digits(entries[i], shift, low) for i in counts}
    return _float(low, dtype)


def _lowest_that_fits(
    budget: _Budget, above: dict[int, int], counts: dict[int, Tensor]
) -> tuple[int, dict[int, int]]:
    """The lowest bin that fits together with all higher ones, and the entries down to there."""

    def down_to(d: int) -> dict[int, int]:
        return above | {i: above[i] + int(count[d]) for i, count in counts.items()}

    d = bisect_left(range(_BINS), True, key=lambda d: budget.fits(down_to(d)))
    return d, down_to(d)


def _at_least(x: Tensor, shift: int, low: int) -> Tensor:
    """How many entries lie in bin d, counted from `low`, or higher, for d = 0, …, _BINS (none)."""
    histogram = torch.zeros(_BINS + 1, dtype=torch.int64, device=x.device)
    for chunk in torch.split(x, _CHUNK):
        bins = (_ordered(chunk) >> shift) - (low >> shift)
        histogram += torch.bincount(bins, minlength=_BINS + 1)
    return histogram.flip(0).cumsum(0).flip(0).cpu()


def _with_digits(x: Tensor, shift: int, low: int) -> Tensor:
    return torch.cat([c[_ordered(c) >> shift == low >> shift] for c in torch.split(x, _CHUNK)])


def _ordered(x: Tensor) -> Tensor:
    """Integers in the order of the floats: the bits, those of negative numbers reversed.

    Here -0.0 comes just below 0.0. A threshold that falls between the two does no harm: what is
    above and what is tied is asked of the floats, for which they are equal.
    """
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    return bits ^ ((bits >> (torch.iinfo(bits.dtype).bits - 1)) & torch.iinfo(bits.dtype).max)


def _float(key: int, dtype: torch.dtype) -> float:
    """The float whose ordered integer is `key`."""
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    bits = key ^ torch.iinfo(integer).max if key < 0 else key
    return float(torch.tensor(bits, dtype=integer).view(dtype))
