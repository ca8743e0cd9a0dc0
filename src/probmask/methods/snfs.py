"""Sparse momentum (SNFS): layers and weights with much momentum get what others give up.

Dettmers and Zettlemoyer, "Sparse Networks from Scratch: Faster Training without Losing
Performance", 2019.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from probmask.checks import check_count, check_within
from probmask.core.allocation import largest_remainder
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Progress
from probmask.masking.sites import Site
from probmask.methods.exchange import (
    Allocation,
    ExchangeMasker,
    SparseStart,
    drop_smallest,
    falling,
    interval,
    is_due,
    largest,
    magnitude,
)

_MOMENTUM = 0.9  # of our own running mean, for optimizers that have none
_MOST = 0.99  # a layer is not filled up beyond this part of its inactive weights
_NEARLY_DENSE = 0.2  # of a growing layer with fewer inactive weights only as many are dropped


@dataclass(frozen=True, kw_only=True)
class SNFS(SparseStart):
    """Train a sparse network that moves its weights to where momentum is.

    After every ``update_every`` updates (an epoch), with v the momentum of the weights' gradient
    and t the part of the training done:

        drop the ⌈p_t n_l⌉ smallest |w| of each layer, p_t from drop_fraction to drop_fraction_end
        along a cosine; give layer l of all that was dropped the share mean |v| of its active
        weights / the sum of these means; grow there the largest |v| of the inactive, at zero

    A layer's share is capped at 99 % of its inactive weights. The momentum is that of the
    optimizer, which sees the dense gradient in every update; for an optimizer without one
    the running sum v ← 0.9 v + g is kept here.
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
    drop_fraction: float = 0.5
    drop_fraction_end: float = 0.005
    update_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("drop_fraction", "drop_fraction_end"):
            check_within("SNFS", name, getattr(self, name), 0, 1, meaning="a part of a layer")
        if self.update_every is not None:
            check_count("SNFS", "update_every", self.update_every, least=1, meaning="updates")

    def begin(self, sites: Sequence[Site], context: Context) -> "SNFSMasker":
        """Draw the sparse network that training begins with."""
        return SNFSMasker(self, sites, context)


def growth(shares: Sequence[float], total: int, free: Sequence[int]) -> list[int]:
    """Split ``total`` by ``shares``, to at most 99 % of what is free in a layer.

    If that leaves no room for all, layers are filled up.
    """
    caps = [math.floor(_MOST * room) for room in free]
    return largest_remainder(shares, total, caps if sum(caps) >= total else free)


class SNFSMasker(ExchangeMasker):
    """Sparse momentum at work."""

    def __init__(self, method: SNFS, sites: Sequence[Site], context: Context) -> None:
        super().__init__(method, sites, context, method.spread)
        self.method = method
        self.every = interval(method.update_every, context.steps_per_epoch, context.total_steps)
        self.own: list[Tensor | None] = [None] * len(sites)
        self.want_dense_gradient(True)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero; drop and grow when it is time."""
        super().after_update(now, optimizers)
        if self.frozen:
            return
        self._follow_gradients(optimizers)
        done = now.step + 1
        if is_due(done, self.every) and done < now.total_steps:
            method = self.method
            self._exchange(
                falling(done / now.total_steps, method.drop_fraction, method.drop_fraction_end),
                optimizers,
            )

    def _follow_gradients(self, optimizers: WeightOptimizers) -> None:
        """Keep a momentum for weights whose optimizer keeps none."""
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
        momenta = [self._momentum(index, optimizers) for index in range(len(self.weights))]
        shares = [
            0.0 if index in self.dense or not active.any() else float(momentum[active].mean())
            for index, (momentum, active) in enumerate(zip(momenta, self.active, strict=True))
        ]
        counts = self._drop_counts(part, shares)
        survivors = [
            drop_smallest(magnitude(weight), active, count)
            for weight, active, count in zip(self.weights, self.active, counts, strict=True)
        ]
        free = [0 if i in self.dense else int((~left).sum()) for i, left in enumerate(survivors)]
        grown = growth(shares, sum(counts), free)
        after = [
            left | largest(momentum, ~left, count)
            for left, momentum, count in zip(survivors, momenta, grown, strict=True)
        ]
        for own, before, new in zip(self.own, self.active, after, strict=True):
            if own is not None:
                own.masked_fill_(new & ~before, 0.0)
        self.switch_(after, optimizers)

    def _drop_counts(self, part: float, shares: Sequence[float]) -> list[int]:
        mean = sum(shares) / len(shares)
        counts = []
        for index, active in enumerate(self.active):
            inactive = 1 - float(active.float().mean())
            grows = inactive < _NEARLY_DENSE and shares[index] > mean
            dropped = 0.0 if index in self.dense else min(part, inactive) if grows else part
            counts.append(math.ceil(dropped * int(active.sum())))
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Our own momenta, if there are any, beside the active weights and the seed."""
        return {**super().state_dict(), "own": [m if m is None else m.clone() for m in self.own]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.own = [
            saved if saved is None else saved.to(weight.device, copy=True)
            for saved, weight in zip(state["own"], self.weights, strict=True)
        ]
