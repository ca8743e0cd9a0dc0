"""One-shot magnitude pruning: train, prune the smallest weights at once, continue training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from probmask.checks import TrainingFraction
from probmask.core.allocation import Spread
from probmask.masking.method import Context, Method
from probmask.masking.sites import Site
from probmask.methods.families.gradual_pruning import MagnitudeMasker
from probmask.methods.families.stored import (
    activate_,
    agreed,
    magnitude,
    select_by,
)


@dataclass(frozen=True, kw_only=True)
class Magnitude(Method):
    """Prune the smallest weights once.

        m = 1[|w| > θ],  Σ m = K

    Training is dense before the pruning and masked after it.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: One threshold θ for all layers, or one per layer that keeps the same fraction of it.
        prune_at: Fraction of the training at which weights are pruned: 1 at the end, 0 before the
            first update.
        dense_first: Leave the first layer dense; the other layers keep fewer weights.
        dense_last: Leave the last layer dense.
    """

    name: ClassVar[str] = "magnitude"
    summary: ClassVar[str] = "prunes the smallest weights once"
    group: ClassVar[str] = "baselines"
    year: ClassVar[int | None] = 1989
    reference: ClassVar[str] = (
        "S. A. Janowsky, Pruning versus clipping in neural networks, Physical Review A 39, 1989"
    )

    scope: Literal["global", "layer"] = "global"
    prune_at: TrainingFraction = 1.0
    dense_first: bool = False
    dense_last: bool = False

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> MagnitudeMasker:
        """Start dense, or prune the initial weights."""
        spread = Spread.over(self.scope, dense_first=self.dense_first, dense_last=self.dense_last)
        at = self.prune_at
        masker = MagnitudeMasker(self, sites, spread, begin=at, end=at, interval=1)
        if at == 0 and masker.keep < masker.size:
            values = agreed(masker, [magnitude(weight) for weight in masker.weights])
            activate_(masker.masked, masker.weights, select_by(masker, values, spread))
            masker.freeze()
        return masker
