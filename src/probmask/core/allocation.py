"""How a global number of kept weights is split over layers: uniform, Erdős-Rényi, ERK.

A weight's shape is PyTorch's: (out, in/groups, *kernel) of a convolution, (out, in) of a linear.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

from torch import Tensor

from probmask.core.selection import select_in_each, select_top
from probmask.errors import InputError


def largest_remainder(shares: Sequence[float], total: int, caps: Sequence[int]) -> list[int]:
    """Integers k with Σ k = total and k ≤ caps, as near to total·shares/Σ shares as that allows.

    An entry whose part would exceed its cap gets the cap, and the rest is split anew among the
    others. Each then gets its part rounded down; the units left over go to the largest remainders,
    among equal ones to the earlier. Entries with share 0 get something only once all others are
    full, in proportion to their caps.
    """
    _check(shares, total, caps)
    total = int(total)
    parts = _capped_parts([Fraction(s) for s in shares], total, caps)
    counts = [math.floor(p) for p in parts]
    # sorted() is stable, so of equal remainders the earlier comes first.
    by_remainder = sorted(range(len(parts)), key=lambda i: counts[i] - parts[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def uniform(sizes: Sequence[int], keep: int) -> list[int]:
    """k[i] = keep · sizes[i] / Σ sizes: the same fraction kept in each layer, Σ k = keep."""
    _check_keep("uniform", keep, sizes)
    return largest_remainder(sizes, keep, sizes)


def erdos_renyi(shapes: Sequence[tuple[int, ...]], keep: int, *, kernel: bool) -> list[int]:
    """k[i] = density · size with density ∝ (n_in + n_out) / (n_in · n_out), Σ k = keep exactly.

    With `kernel` (ERK) density ∝ (n_in + n_out + Σ kernel) / (n_in · n_out · Π kernel), for kernels
    of any rank. Layers whose density would exceed 1 are dense, and the rest is solved again.
    Evci et al., "Rigging the Lottery", section 3; Mocanu et al. for the form without kernel.
    """
    for i, shape in enumerate(shapes):
        if len(shape) < 2:
            raise InputError(
                f"erdos_renyi(keep={keep}): shapes[{i}] is {tuple(shape)}; a layer's weight has "
                "the shape (out, in/groups, *kernel); leave biases and norms out."
            )
    sizes = [math.prod(shape) for shape in shapes]
    _check_keep("erdos_renyi", keep, sizes)
    # Density times size: the product of the dimensions cancels, and the numbers stay integers.
    shares = [sum(s) if kernel else (s[0] + s[1]) * math.prod(s[2:]) for s in shapes]
    return largest_remainder(shares, keep, sizes)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A rule: one order over all layers, or a number for each by ``allocation``."""

    allocation: Literal["global", "uniform", "er", "erk"]
    dense_first: bool = False
    dense_last: bool = False

    @classmethod
    def over(
        cls,
        scope: Literal["global", "layer"],
        *,
        dense_first: bool = False,
        dense_last: bool = False,
    ) -> Self:
        """One order over all layers, or the same fraction of each."""
        allocation: Literal["global", "uniform"] = "global" if scope == "global" else "uniform"
        return cls(allocation=allocation, dense_first=dense_first, dense_last=dense_last)

    @classmethod
    def fitting(
        cls,
        scope: Literal["global", "layer"],
        sizes: Sequence[int],
        keep: int,
        *,
        dense_first: bool | None,
        dense_last: bool | None,
    ) -> Self:
        """Return `over`, where None leaves a layer dense if the budget has room for it.

        It has if all layers that are to be dense hold at most half of the ``keep`` weights.
        """
        wished = cls.over(
            scope, dense_first=dense_first is not False, dense_last=dense_last is not False
        )
        if sum(sizes[i] for i in wished.dense(len(sizes))) <= keep / 2:
            return wished
        return cls.over(scope, dense_first=bool(dense_first), dense_last=bool(dense_last))

    def dense(self, layers: int) -> frozenset[int]:
        """Which of so many layers are left dense."""
        first = {0} if self.dense_first else set()
        last = {layers - 1} if self.dense_last else set()
        return frozenset(first | last)

    def check(self, caller: str, sizes: Sequence[int], keep: int) -> None:
        """Refuse a budget that the dense layers exceed, or use up while there are others."""
        dense = self.dense(len(sizes))
        held = sum(sizes[i] for i in dense)
        if dense and (held > keep or (held == keep and len(dense) < len(sizes))):
            raise InputError(
                f"{caller}: the dense layers alone hold {held} weights, the budget is {keep} of "
                f"{sum(sizes)} and must leave some for the others; lower sparsity, or make them "
                "sparse too."
            )

    def counts(self, shapes: Sequence[tuple[int, ...]], keep: int) -> list[int]:
        """k with Σ k = keep: dense layers whole, the others by the rule (not for "global")."""
        counts = [math.prod(shape) for shape in shapes]
        dense = self.dense(len(shapes))
        others = [i for i in range(len(shapes)) if i not in dense]
        left = keep - sum(counts[i] for i in dense)
        if self.allocation == "uniform":
            split = uniform([counts[i] for i in others], left)
        else:
            kernel = self.allocation == "erk"
            split = erdos_renyi([shapes[i] for i in others], left, kernel=kernel)
        for i, count in zip(others, split, strict=True):
            counts[i] = count
        return counts

    def select(
        self,
        values: Sequence[Tensor],
        keep: int,
        names: Sequence[str],
        *,
        spare: float = 0.0,
        ties: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return masks of the ``keep`` largest values, with the rule's number in each layer.

        While pruning is in progress, the fraction ``spare`` of the weights to prune is kept as
        well. Masks for a smaller ``spare`` are subsets of those for a larger one, layer by layer.
        Equal values are decided by the larger ``ties``.
        """
        if self.allocation == "global":
            dense = self.dense(len(values))
            least = [v.numel() if i in dense else 0 for i, v in enumerate(values)]
            more = round(spare * (sum(v.numel() for v in values) - keep))
            return select_top(values, keep + more, ties=ties, minimum=least, names=names)
        sizes = [v.numel() for v in values]
        counts = self.counts([tuple(v.shape) for v in values], keep)
        enlarged = [k + round(spare * (n - k)) for k, n in zip(counts, sizes, strict=True)]
        return select_in_each(values, enlarged, ties=ties, names=names)


def _capped_parts(shares: list[Fraction], total: int, caps: Sequence[int]) -> list[Fraction]:
    """The fixed point of part = min(cap, λ·share) with Σ part = total, in exact fractions.

    Capping an entry leaves more for the others, so λ only grows and a capped entry stays capped.
    """
    parts = [Fraction(cap) for cap in caps]
    open_ = [i for i, cap in enumerate(caps) if cap > 0]
    left = total
    while open_:
        if not any(shares[i] for i in open_):
            shares = [Fraction(cap) for cap in caps]
        scale = left / sum((shares[i] for i in open_), Fraction(0))
        over = {i for i in open_ if scale * shares[i] >= caps[i]}
        if not over:
            break
        left -= sum(caps[i] for i in over)
        open_ = [i for i in open_ if i not in over]
    for i in open_:
        parts[i] = scale * shares[i]
    return parts


def _check(shares: Sequence[float], total: int, caps: Sequence[int]) -> None:
    call = f"largest_remainder(total={total})"
    if len(shares) != len(caps):
        lengths = f"{len(shares)} shares for {len(caps)} caps"
        raise InputError(f"{call}: {lengths}; pass one cap for each share.")
    for what, numbers in (("shares", shares), ("caps", caps)):
        for i, x in enumerate(numbers):
            if not 0 <= x < math.inf:
                raise InputError(f"{call}: {what}[{i}] is {x}; it must be finite and not negative.")
    if not (0 <= total <= sum(caps) and total == int(total)):
        raise InputError(f"{call}: total is an integer from 0 to {sum(caps)}, the sum of the caps.")


def _check_keep(call: str, keep: int, sizes: Sequence[int]) -> None:
    n = sum(sizes)
    if not (0 <= keep <= n and keep == int(keep)):
        raise InputError(
            f"{call}(keep={keep}): keep is the number of weights to keep, from 0 to the {n} there "
            "are; for a sparsity pass n - round(sparsity * n)."
        )
