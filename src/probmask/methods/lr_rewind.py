"""Learning-rate rewinding: iterative magnitude pruning that repeats the schedule, not the weights.

Renda, Frankle and Carbin, "Comparing Rewinding and Fine-tuning in Neural Network Pruning",
ICLR 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from probmask.core.allocation import Spread
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method, Phase
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.rounds import RoundFraction, prune_round_, round_phases
from probmask.methods.families.stored import (
    StoredWeight,
    active_sparsity,
    largest_active,
    zero_inactive_,
)


@dataclass(frozen=True, kw_only=True)
class LRRewind(Method):
    """Train, prune the smallest weights, retrain the others with the whole schedule; repeat.

        m_r = 1[|w| > t_r] m_(r-1),  Σ m_r = K_r = n (K/n)^(r/R),  w_(r+1, 0) = m_r w_(r, T)

    After round r of R, K_r of n weights remain. Each training follows the whole learning-rate
    schedule.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        prune_per_round: The largest fraction of the remaining weights that a round prunes.
        scope: One threshold for all layers, or the same kept fraction in each.
        dense_first: Leave the first layer dense; its weights count as kept.
        dense_last: Leave the last layer dense. None: if it holds at most half of the budget.
        equal_epochs: Divide the configured epochs among all trainings. If there are fewer epochs
            than trainings, there are fewer rounds, which prune more each. False: each training has
            the configured epochs.
    """

    name: ClassVar[str] = "lr-rewind"
    summary: ClassVar[str] = "prunes in rounds, each retrained under the whole rate schedule"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "A. Renda, J. Frankle, M. Carbin, Comparing Rewinding and Fine-tuning in Neural Network "
        "Pruning, ICLR 2020"
    )

    prune_per_round: RoundFraction = 0.2
    scope: Literal["global", "layer"] = "global"
    dense_first: bool = False
    dense_last: bool | None = None
    equal_epochs: bool = True

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return one training more than rounds; at sparsity 0, one dense training."""
        if self.sparsity == 0:
            return super().phases(epochs)
        return round_phases(
            "LRRewind",
            self.sparsity,
            epochs,
            prune_per_round=self.prune_per_round,
            equal_epochs=self.equal_epochs,
        )

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "LRRewindMasker":
        """Start dense."""
        return LRRewindMasker(self, sites, context)


class LRRewindMasker(Masker):
    """Masker of learning-rate rewinding."""

    masked: tuple[StoredWeight, ...]

    def __init__(self, method: LRRewind, sites: Sequence[Site], context: Context) -> None:
        self.spread = Spread.fitting(
            method.scope,
            [site.size for site in sites],
            method.keep_of(sites),
            dense_first=method.dense_first,
            dense_last=method.dense_last,
        )
        keep = method.keep_of(sites, self.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.rounds = len(context.phase_ends) - 1

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep pruned weights at zero."""
        zero_inactive_(self.masked, self.weights)

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Prune the smallest weights; the last masks are final."""
        prune_round_(self, self.masked, self.spread, phase, self.rounds, optimizers)

    def choose(self) -> list[Tensor]:
        """Return the remaining weights, or the largest of them if they exceed the budget."""
        return largest_active(self, self.masked, self.spread)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)
