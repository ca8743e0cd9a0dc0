"""Gradual magnitude pruning: the sparsity follows a cubic ramp; the smallest weights are pruned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from probmask.checks import TrainingFraction, Updates
from probmask.core.allocation import Spread
from probmask.masking.method import Context, Method
from probmask.masking.sites import Site
from probmask.methods.families.gradual_pruning import MagnitudeMasker

_PAPER_INTERVAL = 2000  # updates between two prunings, in trainings of 128,000 updates


@dataclass(frozen=True, kw_only=True)
class GMP(Method):
    """Prune the smallest weights gradually while the others are trained.

        S_t = S (1 - (1 - (t - b) / (e - b))³)

    t is the fraction of the training that is done, b is ``ramp_begin`` and e is ``ramp_end``. Every
    ``update_every`` updates the smallest active weights are pruned until the sparsity is S_t.
    Pruned weights never return, and from e on the masks are final.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: ``"layer"`` prunes each layer to the sparsity S_t, as the paper does; ``"global"``
            compares the weights of all layers.
        ramp_begin: Fraction of the training at which pruning begins.
        ramp_end: Fraction of the training at which it ends.
        update_every: Updates between prunings. None: 2000, or a twentieth of a short training.
        dense_first: Leave the first layer dense; the other layers keep fewer weights.
        dense_last: Leave the last layer dense.
    """

    name: ClassVar[str] = "gmp"
    summary: ClassVar[str] = "gradual magnitude pruning along a cubic schedule"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2017
    reference: ClassVar[str] = (
        "M. Zhu and S. Gupta, To prune, or not to prune: exploring the efficacy of pruning for "
        "model compression, ICLR workshop 2018"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    scope: Literal["global", "layer"] = "layer"
    ramp_begin: TrainingFraction = 0.3125
    ramp_end: TrainingFraction = 0.59375
    update_every: Updates | None = None
    dense_first: bool = False
    dense_last: bool = False

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> MagnitudeMasker:
        """Start dense."""
        twentieth = max(1, context.total_steps // 20)
        return MagnitudeMasker(
            self,
            sites,
            Spread.over(self.scope, dense_first=self.dense_first, dense_last=self.dense_last),
            begin=self.ramp_begin,
            end=self.ramp_end,
            interval=self.update_every or min(_PAPER_INTERVAL, twentieth),
        )
