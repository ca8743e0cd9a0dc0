"""Sparse momentum (SNFS): weights move to the layers and places with the largest momentum.

Dettmers and Zettlemoyer, "Sparse Networks from Scratch: Faster Training without Losing
Performance", 2019.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from probmask.checks import LayerFraction, Updates
from probmask.core.allocation import Spread, largest_remainder
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.exchange import (
    Allocation,
    activate_at_random_,
    cosine_decay,
    drop_smallest,
    interval,
    is_due,
    largest,
    switch_,
)
from probmask.methods.families.stored import (
    StoredWeight,
    active_masks,
    active_sparsity,
    largest_active,
    magnitude,
    set_outside_gradient,
    zero_inactive_,
)

_MOMENTUM = 0.9  # of the running sum, for optimizers without momentum
_MOST = 0.99  # the largest fraction of its inactive weights that a layer grows
_NEARLY_DENSE = 0.2  # a growing layer with a smaller inactive fraction drops only that fraction


@dataclass(frozen=True, kw_only=True)
class SNFS(Method):
    """Train a sparse network that moves its weights to where the momentum is large.

    After every ``update_every`` updates, with v the momentum of the weights' gradient and t the
    fraction of the training that is done:

        drop the ⌈p_t n_l⌉ smallest |w| of each layer; p_t falls from drop_fraction to
        drop_fraction_end on a cosine
        divide the number dropped among the layers in proportion to mean |v| of their active weights
        grow this number in each layer, from zero: the inactive weights with the largest |v|

    A layer grows at most 99 % of its inactive weights. The momentum is that of the optimizer, which
    gets the dense gradient in every update. For an optimizer without momentum, the running sum
    v ← 0.9 v + g is stored here.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        allocation: The initial number of weights per layer: the same fraction, or Erdős-Rényi
            (-kernel).
        dense_first: Leave the first layer dense.
        dense_last: Leave the last layer dense.
        drop_fraction: The fraction of a layer's weights dropped at the start.
        drop_fraction_end: The fraction dropped at the end.
        update_every: Updates between exchanges. None: an epoch, or a twentieth of a short training.
    """

    name: ClassVar[str] = "snfs"
    summary: ClassVar[str] = "sparse momentum: grows where momentum is large"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2019
    reference: ClassVar[str] = (
        "Dettmers, Zettlemoyer: Sparse Networks from Scratch: Faster Training without Losing "
        "Performance. arXiv 1907.04840, 2019"
    )

    allocation: Allocation = "uniform"
    dense_first: bool = False
    dense_last: bool = False
    drop_fraction: LayerFraction = 0.5
    drop_fraction_end: LayerFraction = 0.005
    update_every: Updates | None = None

    @property
    def spread(self) -> Spread:
        """The number of weights of each layer at the start."""
        return Spread(
            allocation=self.allocation, dense_first=self.dense_first, dense_last=self.dense_last
        )

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "it divides its weights among layers by sums of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "SNFSMasker":
        """Draw the sparse network that training starts with."""
        return SNFSMasker(self, sites, context)


def growth(shares: Sequence[float], total: int, free: Sequence[int]) -> list[int]:
    """Divide ``total`` in proportion to ``shares``, at most 99 % of the free places of a layer.

    If these are fewer than ``total``, all free places can be used.
    """
    caps = [math.floor(_MOST * room) for room in free]
    return largest_remainder(shares, total, caps if sum(caps) >= total else free)


class SNFSMasker(Masker):
    """Masker of sparse momentum.

    ``own`` has the running sums for weights whose optimizer has no momentum, else None.
    """

    saved = ("own",)
    masked: tuple[StoredWeight, ...]

    def __init__(self, method: SNFS, sites: Sequence[Site], context: Context) -> None:
        keep = method.keep_of(sites, method.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.method = method
        self.dense = method.spread.dense(len(sites))
        self.every = interval(method.update_every, context.steps_per_epoch, context.total_steps)
        self.own: list[Tensor | None] = [None] * len(sites)
        activate_at_random_(self, self.masked, sites, method.spread, keep, context.seed)
        set_outside_gradient(self.masked, 1.0)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero; drop and grow if an exchange is due."""
        zero_inactive_(self.masked, self.weights)
        if self.frozen:
            return
        self._add_gradients(optimizers)
        done, method = now.step + 1, self.method
        if is_due(done, self.every) and done < now.total_steps:
            self._exchange(
                cosine_decay(now.next_fraction, method.drop_fraction, method.drop_fraction_end),
                optimizers,
            )

    def choose(self) -> list[Tensor]:
        """Return the active weights."""
        return largest_active(self, self.masked)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def _add_gradients(self, optimizers: WeightOptimizers) -> None:
        """Update the running sums of weights whose optimizer has no momentum."""
        for index, weight in enumerate(self.weights):
            if weight.grad is None or optimizers.momentum(weight) is not None:
                continue
            own, gradient = self.own[index], weight.grad.detach().float()
            self.own[index] = (
                gradient.clone() if own is None else own.mul_(_MOMENTUM).add_(gradient)
            )

    def _momentum(self, index: int, optimizers: WeightOptimizers) -> Tensor:
        weight = self.weights[index]
        found = optimizers.momentum(weight)
        found = self.own[index] if found is None else found
        return magnitude(weight).zero_() if found is None else magnitude(found)

    def _exchange(self, part: float, optimizers: WeightOptimizers) -> None:
        active = active_masks(self.masked)
        momenta = [self._momentum(index, optimizers) for index in range(len(self.weights))]
        shares = [
            0.0 if index in self.dense or not on.any() else float(momentum[on].mean())
            for index, (momentum, on) in enumerate(zip(momenta, active, strict=True))
        ]
        counts = self._drop_counts(part, shares)
        survivors = [
            drop_smallest(magnitude(weight), on, count)
            for weight, on, count in zip(self.weights, active, counts, strict=True)
        ]
        free = [0 if i in self.dense else int((~left).sum()) for i, left in enumerate(survivors)]
        grown = growth(shares, sum(counts), free)
        after = [
            left | largest(momentum, ~left, count)
            for left, momentum, count in zip(survivors, momenta, grown, strict=True)
        ]
        for own, before, new in zip(self.own, active, after, strict=True):
            if own is not None:
                own.masked_fill_(new & ~before, 0.0)
        switch_(self.masked, self.weights, after, optimizers)

    def _drop_counts(self, part: float, shares: Sequence[float]) -> list[int]:
        mean = sum(shares) / len(shares)
        counts = []
        for index, active in enumerate(active_masks(self.masked)):
            inactive = 1 - float(active.float().mean())
            grows = inactive < _NEARLY_DENSE and shares[index] > mean
            dropped = 0.0 if index in self.dense else min(part, inactive) if grows else part
            counts.append(math.ceil(dropped * int(active.sum())))
        return counts
