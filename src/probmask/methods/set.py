"""SET: drop the weights nearest to zero, grow the same number at random.

Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity
inspired by network science", Nature Communications 2018.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from probmask.checks import LayerFraction, TrainingFraction, Updates
from probmask.core.allocation import Spread
from probmask.core.shards import WHOLE, Shards
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.exchange import (
    Allocation,
    activate_at_random_,
    at_random,
    drop_smallest,
    interval,
    is_due,
    switch_,
)
from probmask.methods.families.stored import (
    StoredWeight,
    activate_,
    active_masks,
    active_sparsity,
    largest_active,
    magnitude,
    zero_inactive_,
)


@dataclass(frozen=True, kw_only=True)
class SET(Method):
    """Train a sparse network; replace its smallest weights by random ones.

    Layer l has a fixed number of active weights, initially those of an Erdős-Rényi graph. After
    every ``update_every`` updates, up to the fraction ``stop_at`` of the training:

        drop the fraction drop_fraction of the positive weights, the smallest, and of the negative
        weights, the largest; then grow the same number of inactive weights, drawn at random, from
        zero

    A dense layer does not change.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        allocation: The number of weights per layer: the same fraction, or Erdős-Rényi (-kernel).
        dense_first: Leave the first layer dense.
        dense_last: Leave the last layer dense.
        drop_fraction: The fraction of a layer's weights exchanged each time.
        update_every: Updates between exchanges. None: an epoch, or a twentieth of a short training.
        stop_at: Fraction of the training after which no weight is exchanged.
    """

    name: ClassVar[str] = "set"
    summary: ClassVar[str] = "drops the smallest weights, grows at random"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2018
    reference: ClassVar[str] = (
        "Mocanu, Mocanu, Stone, Nguyen, Gibescu, Liotta: Scalable training of artificial neural "
        "networks with adaptive sparse connectivity inspired by network science. "
        "Nature Communications 9, 2018"
    )

    allocation: Allocation = "er"
    dense_first: bool = False
    dense_last: bool = False
    drop_fraction: LayerFraction = 0.3
    update_every: Updates | None = None
    stop_at: TrainingFraction = 1.0

    @property
    def spread(self) -> Spread:
        """The number of weights of each layer."""
        return Spread(
            allocation=self.allocation, dense_first=self.dense_first, dense_last=self.dense_last
        )

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "SETMasker":
        """Draw the sparse network that training starts with."""
        return SETMasker(self, sites, context)


def without_nearest_zero(
    weight: Tensor, active: Tensor, fraction: float, shards: Shards = WHOLE
) -> Tensor:
    """Return ``active`` without this fraction of its positive and negative weights nearest to 0.

    The same fraction of weights that are exactly zero is dropped.
    """
    sizes = magnitude(weight)
    left = active.clone()
    signs = (active & (weight > 0), active & (weight < 0), active & (weight == 0))
    for of_sign, count in zip(signs, shards.counts(signs), strict=True):
        left &= ~of_sign | drop_smallest(sizes, of_sign, math.floor(fraction * count), shards)
    return left


class SETMasker(Masker):
    """Masker of SET."""

    saved = ("seed",)
    masked: tuple[StoredWeight, ...]

    def __init__(self, method: SET, sites: Sequence[Site], context: Context) -> None:
        keep = method.keep_of(sites, method.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.method = method
        self.seed = context.seed
        self.every = interval(method.update_every, context.steps_per_epoch, context.total_steps)
        activate_at_random_(self, self.masked, sites, method.spread, keep, context.seed)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero; drop and grow if an exchange is due."""
        zero_inactive_(self.masked, self.weights)
        done = now.step + 1
        stop = self.method.stop_at * now.total_steps
        if not self.frozen and is_due(done, self.every) and done < stop:
            self._exchange(done, optimizers)

    def choose(self) -> list[Tensor]:
        """Return the active weights."""
        return largest_active(self, self.masked)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def _exchange(self, done: int, optimizers: WeightOptimizers) -> None:
        shards, sizes = self.shards, [math.prod(shape) for shape in self.shapes]
        before = shards.counts(active_masks(self.masked))
        part = self.method.drop_fraction
        survivors = [
            active if count == size else without_nearest_zero(weight, active, part, shards)
            for weight, active, count, size in zip(
                self.weights, active_masks(self.masked), before, sizes, strict=True
            )
        ]
        # First drop, so that a weight that is dropped and drawn again starts from zero.
        activate_(self.masked, self.weights, survivors)
        missing = [
            count - kept for count, kept in zip(before, shards.counts(survivors), strict=True)
        ]
        after = [
            left | at_random(~left, count, self.seed, done, index, shape=shape, shards=shards)
            for index, (left, count, shape) in enumerate(
                zip(survivors, missing, self.shapes, strict=True)
            )
        ]
        switch_(self.masked, self.weights, after, optimizers)
