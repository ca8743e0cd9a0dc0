"""ProbMask's budget: the number of weights or multiplications that all layers together may keep."""

import math
import warnings
from collections.abc import Sequence

from torch import Tensor

from probmask.core.allocation import largest_remainder
from probmask.core.schedules import kept_fraction
from probmask.core.selection import select_in_each, select_top, select_within
from probmask.errors import EarlyEndWarning, InputError
from probmask.masking.method import Context, Method, is_abrupt
from probmask.masking.sharding import shards_of
from probmask.masking.sites import Site


class Budget:
    """The total amount to keep, and the minimum per layer.

    Amounts are in the budget's unit: weights, or multiplications if ``flops``. With ``per_layer``
    every layer keeps the same fraction of its weights.
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
        self.shards = shards_of([site.weight for site in sites])
        self.sizes = tuple(site.size for site in sites)
        self.per_layer = per_layer
        self.costs = tuple(float(c) for c in context.macs_per_weight()) if flops else None
        self.keep = method.keep_of(sites)
        self.least = [min(least_per_layer, size) for size in self.sizes]
        self.total = float(sum(self.sizes)) if self.costs is None else self._cost_of(self.sizes)
        self.final = float(self.keep) if self.costs is None else (1 - method.sparsity) * self.total
        self._check_least(type(method).__name__, least_per_layer)

    def select(
        self, values: Sequence[Tensor], amount: float, *, ties: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return the masks of the largest values within this amount; ``ties`` rank equal values."""
        if self.per_layer:
            return select_in_each(
                values, self.shares(amount), ties=ties, names=self.names, shards=self.shards
            )
        if self.costs is not None:
            return select_within(
                values, self.costs, amount, ties=ties, minimum=self.least, names=self.names
            )
        return select_top(
            values,
            round(amount),
            ties=ties,
            minimum=self.least,
            names=self.names,
            shards=self.shards,
        )

    def shares(self, amount: float) -> list[int]:
        """Return the number of weights kept per layer: the same fraction, at least ``least``."""
        keep = round(amount / self.total * sum(self.sizes))
        share = keep / sum(self.sizes)
        pairs = list(zip(self.sizes, self.least, strict=True))
        above = [max(0.0, share * size - low) for size, low in pairs]
        caps = [size - low for size, low in pairs]
        extra = largest_remainder(above, keep - sum(self.least), caps)
        return [low + more for low, more in zip(self.least, extra, strict=True)]

    def _cost_of(self, kept: Sequence[int]) -> float:
        assert self.costs is not None
        return math.fsum(c * k for c, k in zip(self.costs, kept, strict=True))

    def _check_least(self, caller: str, least_per_layer: int) -> None:
        if self.costs is not None and self._cost_of(self.least) > self.final:
            raise InputError(
                f"{caller}(min_keep_per_layer={least_per_layer}): these weights take "
                f"{self._cost_of(self.least):g} multiplications, but the budget is "
                f"{self.final:g}; lower min_keep_per_layer."
            )
        if self.costs is None and sum(self.least) > self.keep:
            raise InputError(
                f"{caller}(min_keep_per_layer={least_per_layer}): {len(self.sizes)} layers would "
                f"keep {sum(self.least)} weights, but the budget is {self.keep}; lower "
                "min_keep_per_layer."
            )


def warn_of_early_choice(
    caller: str, setting: str, at: float, ramp: tuple[float, float], final: float
) -> None:
    """Warn if the masks become final, at the fraction ``at``, while the budget is still falling.

    ``setting`` is the setting that determines ``at``, such as "freeze_at=0.3".
    """
    begin, end = ramp
    kept = kept_fraction(at, final, begin=begin, end=end)
    if is_abrupt(kept, final):
        warnings.warn(
            f"{caller}({setting}, ramp_end={end:g}): the masks become final at {at:g} of the "
            f"training, when {100 * kept:.3g} % of the weights are kept; all but "
            f"{100 * final:.3g} % are then pruned at once. End the ramp earlier.",
            EarlyEndWarning,
            stacklevel=7,  # where attach was called
        )
