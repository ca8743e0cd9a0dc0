"""Gradual pruning by magnitude: the sparsity follows a cubic ramp and weights never return."""

from collections.abc import Sequence

from torch import Tensor

from probmask.core import schedules
from probmask.core.allocation import Spread
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.stored import (
    StoredWeight,
    activate_,
    active_magnitudes,
    active_sparsity,
    largest_active,
    select_by,
    zero_inactive_,
)


class MagnitudeMasker(Masker):
    """Masker of pruning by magnitude, gradually or at once.

    Args:
        method: The method, which has the sparsity.
        sites: The sites of the model.
        spread: The rule that distributes the kept weights over layers.
        begin: Fraction of the training at which pruning begins.
        end: Fraction of the training at which the masks become final. If it equals ``begin``, all
            weights are pruned at once.
        interval: Number of updates between two prunings.
    """

    masked: tuple[StoredWeight, ...]

    def __init__(
        self,
        method: Method,
        sites: Sequence[Site],
        spread: Spread,
        *,
        begin: float,
        end: float,
        interval: int,
    ) -> None:
        keep = method.keep_of(sites, spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.spread = spread
        self.ramp = (begin, end)
        self.interval = interval

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep pruned weights at zero; prune more if an interval has passed."""
        zero_inactive_(self.masked, self.weights)
        if self.frozen:
            return
        done = now.next_fraction
        begin, end = self.ramp
        if done >= end:
            activate_(self.masked, self.weights, self.choose())
            self.freeze()
        elif done >= begin and (now.step + 1) % self.interval == 0:
            spare = schedules.kept_fraction(done, 0.0, begin=begin, end=end)
            values = active_magnitudes(self.masked, self.weights)
            activate_(
                self.masked,
                self.weights,
                select_by(self, values, self.spread, spare=spare),
            )

    def choose(self) -> list[Tensor]:
        """Return masks of the largest active weights, exactly the budget."""
        return largest_active(self, self.masked, self.spread)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)
