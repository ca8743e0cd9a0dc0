"""Allocation of one budget of kept weights to layers: global, uniform, Erdős-Rényi or ERK.

Shapes of weights are PyTorch's: (out, in/groups, *kernel) for a convolution, (out, in) for a linear
layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

from torch import Tensor

from probmask.core.selection import select_in_each, select_top
from probmask.core.shards import WHOLE, Shards
from probmask.errors import InputError


def largest_remainder(shares: Sequence[float], total: int, caps: Sequence[int]) -> list[int]:
    """Integers k with Σ k = total and k ≤ caps, as close to total·shares/Σ shares as possible.

    An entry whose quota exceeds its cap gets the cap, and the rest is split among the others. Each
    entry then gets its quota rounded down; the remaining units go to the largest remainders, and
    among equal remainders to the earlier entry. Entries with share 0 get units only after all
    others are full, in proportion to their caps.

    Args:
        shares: nonnegative weights of the entries.
        total: the sum of the result.
        caps: the largest value of each entry.

    Returns:
        One integer per entry.

    Raises:
        InputError: if a share or cap is negative or infinite, or ``total`` exceeds the caps.

    Example:
        >>> largest_remainder([8, 1, 1], 10, caps=[2, 9, 9])
        [2, 4, 4]
    """
    _check_shares(shares, total, caps)
    total = int(total)
    quotas = _capped_quotas([Fraction(s) for s in shares], total, caps)
    counts = [math.floor(q) for q in quotas]
    # sorted() is stable: among equal remainders the earlier entry comes first.
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def uniform(sizes: Sequence[int], keep: int) -> list[int]:
    """k[i] = keep · sizes[i] / Σ sizes: the same fraction of each layer, with Σ k = keep.

    Args:
        sizes: the number of weights of each layer.
        keep: the number of weights to keep.

    Returns:
        The number of weights to keep in each layer.

    Raises:
        InputError: if ``keep`` is not an integer from 0 to Σ sizes.

    Example:
        >>> uniform([100, 300], 40)
        [10, 30]
    """
    _check_keep("uniform", keep, sizes)
    return largest_remainder(sizes, keep, sizes)


def erdos_renyi(shapes: Sequence[tuple[int, ...]], keep: int, *, kernel: bool) -> list[int]:
    """k[i] = density · size with density ∝ (n_in + n_out) / (n_in · n_out) and Σ k = keep.

    With ``kernel`` (ERK), density ∝ (n_in + n_out + Σ kernel) / (n_in · n_out · Π kernel), for
    kernels of any rank. Layers whose density would exceed 1 are dense, and the others share the
    rest. ER is Mocanu et al. (2018), ERK is Evci et al., "Rigging the Lottery", section 3.

    Args:
        shapes: the shape of each layer's weight.
        keep: the number of weights to keep.
        kernel: whether the size of the kernel counts (ERK).

    Returns:
        The number of weights to keep in each layer.

    Raises:
        InputError: if ``keep`` is not an integer from 0 to the number of weights, or a shape has
            fewer than two dimensions.

    Example:
        >>> erdos_renyi([(40, 60), (10, 40)], 300, kernel=True)
        [200, 100]
    """
    for i, shape in enumerate(shapes):
        if len(shape) < 2:
            raise InputError(
                f"erdos_renyi(keep={keep}): shapes[{i}] is {tuple(shape)}; the weight of a layer "
                "has the shape (out, in/groups, *kernel). Leave out biases and norms."
            )
    sizes = [math.prod(shape) for shape in shapes]
    _check_keep("erdos_renyi", keep, sizes)
    # In density · size the product of the dimensions cancels, so the shares are integers.
    shares = [sum(s) if kernel else (s[0] + s[1]) * math.prod(s[2:]) for s in shapes]
    return largest_remainder(shares, keep, sizes)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Rule that distributes the kept weights over layers.

    With ``allocation="global"`` the layers compete for one budget. Otherwise each layer gets its
    own number of kept weights: "uniform", "er" or "erk". The first and the last layer can stay
    dense; the other layers then keep fewer weights, and the total stays the same.

    Example:
        >>> rule = Spread(allocation="uniform", dense_last=True)
        >>> rule.counts([(4, 10), (4, 10), (2, 10)], keep=40)
        [10, 10, 20]
    """

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
        """Return the rule for a scope: one global budget, or the same fraction of each layer."""
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
        """Return the rule of `over`; None leaves a layer dense if the budget has room for it.

        The budget has room if all layers to leave dense hold at most half of the ``keep`` weights.
        """
        preferred = cls.over(
            scope, dense_first=dense_first is not False, dense_last=dense_last is not False
        )
        if sum(sizes[i] for i in preferred.dense(len(sizes))) <= keep / 2:
            return preferred
        return cls.over(scope, dense_first=bool(dense_first), dense_last=bool(dense_last))

    def dense(self, layers: int) -> frozenset[int]:
        """Return the indices of the dense layers among this number of layers."""
        first = {0} if self.dense_first else set()
        last = {layers - 1} if self.dense_last else set()
        return frozenset(first | last)

    def check(self, caller: str, sizes: Sequence[int], keep: int) -> None:
        """Raise InputError if the dense layers leave no weights of the budget for the others."""
        dense = self.dense(len(sizes))
        held = sum(sizes[i] for i in dense)
        if dense and (held > keep or (held == keep and len(dense) < len(sizes))):
            raise InputError(
                f"{caller}: the dense layers alone hold {held} weights, the budget is {keep} of "
                f"{sum(sizes)}. Nothing is left for the other layers; lower sparsity, or make the "
                "dense layers sparse too."
            )

    def counts(self, shapes: Sequence[tuple[int, ...]], keep: int) -> list[int]:
        """Return the number of weights to keep in each layer; not defined for "global"."""
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
        shapes: Sequence[tuple[int, ...]] | None = None,
        shards: Shards = WHOLE,
    ) -> list[Tensor]:
        """Return masks of the ``keep`` largest values, distributed over the layers by the rule.

        Args:
            values: one tensor per layer.
            keep: the number of weights to keep in the end.
            names: the names of the layers, for error messages.
            spare: fraction of the weights to be pruned that is still kept, for a gradual ramp.
                The mask for a lower fraction is a subset of the mask for a higher one, in every
                layer.
            ties: decide between equal values; the larger comes first.
            shapes: the shapes of the whole tensors, if ``values`` are shards.
            shards: the division of the tensors, if ``values`` are the shards of this rank.

        Returns:
            One boolean mask per layer.
        """
        shapes = [tuple(v.shape) for v in values] if shapes is None else shapes
        sizes = [math.prod(shape) for shape in shapes]
        if self.allocation == "global":
            dense = self.dense(len(values))
            minimum = [size if i in dense else 0 for i, size in enumerate(sizes)]
            extra = round(spare * (sum(sizes) - keep))
            return select_top(
                values, keep + extra, ties=ties, minimum=minimum, names=names, shards=shards
            )
        counts = self.counts(shapes, keep)
        enlarged = [k + round(spare * (n - k)) for k, n in zip(counts, sizes, strict=True)]
        return select_in_each(values, enlarged, ties=ties, names=names, shards=shards)


def _capped_quotas(shares: list[Fraction], total: int, caps: Sequence[int]) -> list[Fraction]:
    """quota = min(cap, λ·share) with Σ quota = total, solved for λ in exact fractions.

    Capping an entry leaves more for the others, so λ only grows and a capped entry stays capped.
    """
    quotas = [Fraction(cap) for cap in caps]
    uncapped = [i for i, cap in enumerate(caps) if cap > 0]
    left = total
    while uncapped:
        if not any(shares[i] for i in uncapped):
            shares = [Fraction(cap) for cap in caps]
        scale = left / sum((shares[i] for i in uncapped), Fraction(0))
        over = {i for i in uncapped if scale * shares[i] >= caps[i]}
        if not over:
            break
        left -= sum(caps[i] for i in over)
        uncapped = [i for i in uncapped if i not in over]
    for i in uncapped:
        quotas[i] = scale * shares[i]
    return quotas


def _check_shares(shares: Sequence[float], total: int, caps: Sequence[int]) -> None:
    call = f"largest_remainder(total={total})"
    if len(shares) != len(caps):
        lengths = f"{len(shares)} shares for {len(caps)} caps"
        raise InputError(f"{call}: {lengths}; pass one cap for each share.")
    for label, numbers in (("shares", shares), ("caps", caps)):
        for i, x in enumerate(numbers):
            if not 0 <= x < math.inf:
                raise InputError(
                    f"{call}: {label}[{i}] is {x}; it must be finite and not negative."
                )
    if not (0 <= total <= sum(caps) and total == int(total)):
        raise InputError(
            f"{call}: total must be an integer from 0 to {sum(caps)}, the sum of the caps."
        )


def _check_keep(call: str, keep: int, sizes: Sequence[int]) -> None:
    n = sum(sizes)
    if not (0 <= keep <= n and keep == int(keep)):
        raise InputError(
            f"{call}(keep={keep}): keep is the number of weights to keep, an integer from 0 to "
            f"{n}; for a sparsity pass n - round(sparsity * n)."
        )
