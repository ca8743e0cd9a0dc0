"""DSR: one adaptive threshold prunes all layers; weights regrow at random where many survived.

Mostafa and Wang, "Parameter Efficient Training of Deep Convolutional Neural Networks by Dynamic
Sparse Reparameterization", ICML 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from probmask.checks import Range, TrainingFraction, Updates
from probmask.core.allocation import Spread, largest_remainder
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.exchange import (
    Allocation,
    activate_at_random_,
    at_random,
    interval,
    is_due,
    largest,
    switch_,
)
from probmask.methods.families.stored import (
    StoredWeight,
    activate_,
    active_sparsity,
    largest_active,
    magnitude,
    zero_inactive_,
)

_PAPER_INTERVAL = 100
# Fraction of the training from which on the interval between exchanges has this factor.
_STAGES = ((0.7, 8), (0.4, 4), (0.125, 2), (0.0, 1))


@dataclass(frozen=True, kw_only=True)
class DSR(Method):
    """Train a sparse network whose layers compete for weights under one threshold H.

    After every ``update_every`` updates (2, 4 and 8 times as many from 12.5, 40 and 70 % of the
    training on), up to ``stop_at``:

        drop the active weights with |w| < H, K in all layers together (at least one stays in each)
        H ← 2 H if K < (1 - tolerance) N,  H ← H / 2 if K > (1 + tolerance) N
        grow K weights at random, in proportion to the weights that survived in a layer, from zero

    N is the fraction ``exchange_fraction`` of the kept weights.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        allocation: The initial number of weights per layer: the same fraction, or Erdős-Rényi
            (-kernel).
        dense_first: Leave the first layer dense.
        dense_last: Leave the last layer dense.
        exchange_fraction: The fraction of the kept weights to exchange each time.
        threshold: The initial threshold H.
        tolerance: Relative deviation of K from N at which H is adapted.
        update_every: Updates between exchanges. None: 100, or an eightieth of a short training.
        stop_at: Fraction of the training after which no weight is exchanged.
    """

    name: ClassVar[str] = "dsr"
    summary: ClassVar[str] = "one adaptive threshold drops, layers regrow at random"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2019
    reference: ClassVar[str] = (
        "Mostafa, Wang: Parameter Efficient Training of Deep Convolutional Neural Networks by "
        "Dynamic Sparse Reparameterization. ICML 2019"
    )

    allocation: Allocation = "uniform"
    dense_first: bool = False
    dense_last: bool = False
    exchange_fraction: Annotated[float, Range(0, 1, "a fraction of the kept weights")] = 0.1
    threshold: Annotated[float, Range(1e-30, meaning="a magnitude")] = 1e-3
    tolerance: Annotated[float, Range(0, 1, "a relative deviation")] = 0.1
    update_every: Updates | None = None
    stop_at: TrainingFraction = 0.95

    @property
    def spread(self) -> Spread:
        """The number of weights of each layer at the start."""
        return Spread(
            allocation=self.allocation, dense_first=self.dense_first, dense_last=self.dense_last
        )

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "its rule needs the statistics of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "DSRMasker":
        """Draw the sparse network that training starts with."""
        return DSRMasker(self, sites, context)


def adapted(threshold: float, dropped: int, wanted: float, tolerance: float) -> float:
    """Return the threshold doubled if too few weights were dropped, halved if too many."""
    if dropped < (1 - tolerance) * wanted:
        return 2 * threshold
    return threshold / 2 if dropped > (1 + tolerance) * wanted else threshold


class DSRMasker(Masker):
    """Masker of DSR."""

    saved = ("seed", "threshold")
    masked: tuple[StoredWeight, ...]

    def __init__(self, method: DSR, sites: Sequence[Site], context: Context) -> None:
        keep = method.keep_of(sites, method.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.method = method
        self.seed = context.seed
        self.dense = method.spread.dense(len(sites))
        # Short enough for several exchanges in a short training, even eight times as long.
        self.every = interval(method.update_every, _PAPER_INTERVAL, context.total_steps, parts=80)
        self.threshold = method.threshold
        activate_at_random_(self, self.masked, sites, method.spread, keep, context.seed)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero; drop and grow if an exchange is due."""
        zero_inactive_(self.masked, self.weights)
        done, fraction = now.step + 1, now.next_fraction
        factor = next(factor for begin, factor in _STAGES if fraction >= begin)
        due = is_due(done, factor * self.every) and fraction < self.method.stop_at
        if due and not self.frozen:
            self._exchange(done, optimizers)

    def choose(self) -> list[Tensor]:
        """Return the active weights."""
        return largest_active(self, self.masked)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity and the threshold of the next exchange."""
        return {**active_sparsity(self, self.masked), "threshold": self.threshold}

    def _exchange(self, done: int, optimizers: WeightOptimizers) -> None:
        survivors = [self._survivors(index) for index in range(len(self.weights))]
        left = [int(mask.sum()) for mask in survivors]
        dropped = self.keep - sum(left)
        wanted = self.method.exchange_fraction * self.keep
        self.threshold = adapted(self.threshold, dropped, wanted, self.method.tolerance)
        shares = [0 if index in self.dense else count for index, count in enumerate(left)]
        free = [
            0 if index in self.dense else mask.numel() - count
            for index, (mask, count) in enumerate(zip(survivors, left, strict=True))
        ]
        counts = largest_remainder(shares, dropped, free)
        # First drop, so that a weight that is dropped and drawn again starts from zero.
        activate_(self.masked, self.weights, survivors)
        after = [
            mask | at_random(~mask, count, self.seed, done, index)
            for index, (mask, count) in enumerate(zip(survivors, counts, strict=True))
        ]
        switch_(self.masked, self.weights, after, optimizers)

    def _survivors(self, index: int) -> Tensor:
        active = self.masked[index].active
        if index in self.dense:
            return active.clone()
        sizes = magnitude(self.weights[index])
        left = active & (sizes >= self.threshold)
        return left if left.any() else largest(sizes, active, min(1, int(active.sum())))
