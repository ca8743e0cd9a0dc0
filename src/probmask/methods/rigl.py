"""RigL: drop the smallest weights, grow those with the largest gradient.

Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from probmask.checks import LayerFraction, TrainingFraction, Updates
from probmask.core.allocation import Spread
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.exchange import (
    Allocation,
    activate_at_random_,
    cosine_decay,
    interval,
    is_due,
    regrow_by_gradient_,
)
from probmask.methods.families.stored import (
    StoredWeight,
    active_masks,
    active_sparsity,
    largest_active,
    set_outside_gradient,
    zero_inactive_,
)

_PAPER_INTERVAL = 100


@dataclass(frozen=True, kw_only=True)
class RigL(Method):
    """Train a sparse network; exchange its smallest weights for those with the largest gradients.

    Layer l has a fixed number n_l of active weights, drawn at random at the start. Every
    ``update_every`` updates, up to the fraction ``stop_at`` of the training, with t the fraction
    done:

        q = ⌊α_t n_l⌋,  α_t = drop_fraction (1 + cos(π t / stop_at)) / 2
        drop the q smallest |w| of the layer, then grow the inactive weights with the q largest
        |∂L/∂w|

    Grown weights start at zero without momentum. A weight that is dropped and grown in the same
    update keeps its value. The gradient of inactive weights is computed for these updates only.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        allocation: The number of weights per layer: the same fraction, or Erdős-Rényi (-kernel).
        dense_first: Leave the first layer dense. None: if ``allocation="uniform"``, as the paper.
        dense_last: Leave the last layer dense.
        drop_fraction: The fraction of a layer's weights exchanged at the start.
        update_every: Updates between exchanges. None: 100, or a twentieth of a short training.
        stop_at: Fraction of the training after which no weight is exchanged.
        replace_update: Skip the gradient step of updates that exchange weights.
    """

    name: ClassVar[str] = "rigl"
    summary: ClassVar[str] = "drops the smallest weights, grows by gradient"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "Evci, Gale, Menick, Castro, Elsen: Rigging the Lottery: Making All Tickets Winners. "
        "ICML 2020"
    )

    allocation: Allocation = "erk"
    dense_first: bool | None = None
    dense_last: bool = False
    drop_fraction: LayerFraction = 0.3
    update_every: Updates | None = None
    stop_at: TrainingFraction = 0.75
    replace_update: bool = False

    @property
    def spread(self) -> Spread:
        """The number of weights of each layer."""
        first = self.allocation == "uniform" if self.dense_first is None else self.dense_first
        return Spread(allocation=self.allocation, dense_first=first, dense_last=self.dense_last)

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "RigLMasker":
        """Draw the sparse network that training starts with."""
        return RigLMasker(self, sites, context)


class RigLMasker(Masker):
    """Masker of RigL."""

    masked: tuple[StoredWeight, ...]

    def __init__(self, method: RigL, sites: Sequence[Site], context: Context) -> None:
        keep = method.keep_of(sites, method.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.method = method
        self.every = interval(method.update_every, _PAPER_INTERVAL, context.total_steps)
        activate_at_random_(self, self.masked, sites, method.spread, keep, context.seed)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Request the dense gradient if this update exchanges weights."""
        set_outside_gradient(self.masked, float(self._exchanges(now)))

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Drop and grow."""
        if self.frozen or not self._exchanges(now):
            return
        dropped = cosine_decay(now.fraction / self.method.stop_at, self.method.drop_fraction)
        active = self.shards.counts(active_masks(self.masked))
        counts = [math.floor(dropped * count) for count in active]
        regrow_by_gradient_(self.masked, self.weights, counts, optimizers, self.shards)
        if self.method.replace_update:
            for parameter in optimizers.parameters:
                parameter.grad = None

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero."""
        zero_inactive_(self.masked, self.weights)

    def choose(self) -> list[Tensor]:
        """Return the active weights."""
        return largest_active(self, self.masked)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def _exchanges(self, now: Progress) -> bool:
        return is_due(now.step, self.every) and now.fraction < self.method.stop_at
