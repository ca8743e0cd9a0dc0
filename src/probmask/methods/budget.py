"""ProbMask's budget: what may be kept of all layers together, in weights or in multiplications."""

import math
from collections.abc import Sequence

from torch import Tensor

from probmask.core.allocation import largest_remainder
from probmask.core.selection import select_top, select_within
from probmask.errors import InputError
from probmask.masking.budgets import checked_keep
from probmask.masking.protocol import Context, Method
from probmask.masking.sites import Site


class Budget:
    """How much is kept of which layers, and the least that each of them keeps.

    Amounts are in the budget's currency: weights, or multiplications where there are ``costs``.
    With ``per_layer`` every layer keeps the same fraction of its weights.
    """

    def __init__(
        self,
        method: Method,
        sites: Sequence[Site],
        context: Context,
        *,
        per_layer: bool,
        flops: bool,
        least_per_layer: int,
    ) -> None:
        self.names = tuple(site.name for site in sites)
        self.sizes = tuple(site.size for site in sites)
        self.per_layer = per_layer
        self.costs = tuple(float(c) for c in context.macs_per_weight()) if flops else None
        self.keep = checked_keep(method, sites)
        self.least = [min(least_per_layer, size) for size in self.sizes]
        self.total = float(sum(self.sizes)) if self.costs is None else self._spent(self.sizes)
        self.final = float(self.keep) if self.costs is None else (1 - method.sparsity) * self.total
        self._check_least(type(method).__name__, least_per_layer)

    def select(
        self, values: Sequence[Tensor], amount: float, *, ties: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """The masks of the largest values that this amount of the budget allows."""
        if self.per_layer:
            return [
                select_top([value], share, ties=None if ties is None else [ties[i]], names=[name])[
                    0
                ]
                for i, (value, share, name) in enumerate(
                    zip(values, self.shares(amount), self.names, strict=True)
                )
            ]
        if self.costs is not None:
            return select_within(
                values, self.costs, amount, ties=ties, minimum=self.least, names=self.names
            )
        return select_top(values, round(amount), ties=ties, minimum=self.least, names=self.names)

    def shares(self, amount: float) -> list[int]:
        """The same kept fraction in each layer, but the least that each must keep."""
        keep = round(amount / self.total * sum(self.sizes))
        share = keep / sum(self.sizes)
        pairs = list(zip(self.sizes, self.least, strict=True))
        above = [max(0.0, share * size - low) for size, low in pairs]
        caps = [size - low for size, low in pairs]
        extra = largest_remainder(above, keep - sum(self.least), caps)
        return [low + more for low, more in zip(self.least, extra, strict=True)]

    def _spent(self, kept: Sequence[int]) -> float:
        assert self.costs is not None
        return math.fsum(c * k for c, k in zip(self.costs, kept, strict=True))

    def _check_least(self, caller: str, least_per_layer: int) -> None:
        if self.costs is not None and self._spent(self.least) > self.final:
            raise InputError(
                f"{caller}(min_keep_per_layer={least_per_layer}): that many weights of each layer "
                f"take {self._spent(self.least):g} multiplications, the budget is "
                f"{self.final:g}; lower it."
            )
        if self.costs is None and sum(self.least) > self.keep:
            raise InputError(
                f"{caller}(min_keep_per_layer={least_per_layer}): {len(self.sizes)} layers "
                f"would keep {sum(self.least)} weights, the budget is {self.keep}; lower it."
            )
