"""SET: drop the weights nearest to zero, grow as many at random.

Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity
inspired by network science", Nature Communications 2018.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from probmask.checks import check_count, check_within
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Progress
from probmask.masking.sites import Site
from probmask.methods.exchange import (
    Allocation,
    ExchangeMasker,
    SparseStart,
    at_random,
    drop_smallest,
    interval,
    is_due,
    magnitude,
)


@dataclass(frozen=True, kw_only=True)
class SET(SparseStart):
    """Train a sparse network that renews its weakest weights at random.

    Layer l has a fixed number of active weights, at the start those of an Erdős-Rényi graph. After
    every ``update_every`` updates (an epoch), up to the part ``stop_at`` of the training:

        drop the part drop_fraction of the positive weights, the smallest, and of the negative
        ones, the largest; grow as many at random among the inactive, at zero

    A layer that has all of its weights stays as it is.
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
    drop_fraction: float = 0.3
    update_every: int | None = None
    stop_at: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("SET", "drop_fraction", self.drop_fraction, 0, 1, meaning="a part of a layer")
        check_within("SET", "stop_at", self.stop_at, 0, 1, meaning="a part of the training")
        if self.update_every is not None:
            check_count("SET", "update_every", self.update_every, least=1, meaning="updates")

    def begin(self, sites: Sequence[Site], context: Context) -> "SETMasker":
        """Draw the sparse network that training begins with."""
        return SETMasker(self, sites, context)


def without_nearest_zero(weight: Tensor, active: Tensor, part: float) -> Tensor:
    """``active`` without the ``part`` of its positive and of its negative weights nearest to 0.

    Of weights that are exactly zero the same part is dropped.
    """
    sizes = magnitude(weight)
    left = active.clone()
    for of_sign in (active & (weight > 0), active & (weight < 0), active & (weight == 0)):
        count = math.floor(part * int(of_sign.sum()))
        left &= ~of_sign | drop_smallest(sizes, of_sign, count)
    return left


class SETMasker(ExchangeMasker):
    """SET at work."""

    def __init__(self, method: SET, sites: Sequence[Site], context: Context) -> None:
        super().__init__(method, sites, context, method.spread)
        self.method = method
        self.every = interval(method.update_every, context.steps_per_epoch, context.total_steps)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero; drop and grow when it is time."""
        super().after_update(now, optimizers)
        done = now.step + 1
        stop = self.method.stop_at * now.total_steps
        if not self.frozen and is_due(done, self.every) and done < stop:
            self._exchange(done, optimizers)

    def _exchange(self, done: int, optimizers: WeightOptimizers) -> None:
        before = [int(active.sum()) for active in self.active]
        survivors = [
            active if active.all() else without_nearest_zero(w, active, self.method.drop_fraction)
            for w, active in zip(self.weights, self.active, strict=True)
        ]
        self.activate(survivors)  # what is dropped and drawn again begins anew
        grown = [
            at_random(~left, count - int(left.sum()), self.seed, done, index)
            for index, (left, count) in enumerate(zip(survivors, before, strict=True))
        ]
        self.switch_([left | new for left, new in zip(survivors, grown, strict=True)], optimizers)
