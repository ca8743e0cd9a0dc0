"""DSR: one adaptive threshold prunes all layers, which regrow at random what they deserve.

Mostafa and Wang, "Parameter Efficient Training of Deep Convolutional Neural Networks by Dynamic
Sparse Reparameterization", ICML 2019.
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
    at_random,
    interval,
    is_due,
    largest,
    magnitude,
)

_EVERY = 100
# The parts of the training from which on exchanges are so many times as far apart.
_STAGES = ((0.7, 8), (0.4, 4), (0.125, 2), (0.0, 1))


@dataclass(frozen=True, kw_only=True)
class DSR(SparseStart):
    """Train a sparse network whose layers compete for weights under one threshold H.

    Layers begin with the same fraction of their weights. After every ``update_every`` updates (2, 4
    and 8 times as many from 12.5, 40 and 70 % of the training on), up to ``stop_at``:

        drop the active weights with |w| < H, K of all layers together (at least one stays each)
        H ← 2 H if K < (1 - tolerance) N,  H ← H / 2 if K > (1 + tolerance) N
        grow K at random, in layer l in proportion to the weights that survived there, at zero

    N is the part ``exchange_fraction`` of the weights kept.
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
    exchange_fraction: float = 0.1
    threshold: float = 1e-3
    tolerance: float = 0.1
    update_every: int | None = None
    stop_at: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        part = self.exchange_fraction
        check_within("DSR", "exchange_fraction", part, 0, 1, meaning="a part of the weights kept")
        check_within("DSR", "threshold", self.threshold, 1e-30, math.inf, meaning="a magnitude")
        check_within("DSR", "tolerance", self.tolerance, 0, 1, meaning="a part of the number")
        check_within("DSR", "stop_at", self.stop_at, 0, 1, meaning="a part of the training")
        if self.update_every is not None:
            check_count("DSR", "update_every", self.update_every, least=1, meaning="updates")

    def begin(self, sites: Sequence[Site], context: Context) -> "DSRMasker":
        """Draw the sparse network that training begins with."""
        return DSRMasker(self, sites, context)


def adapted(threshold: float, dropped: int, wanted: float, tolerance: float) -> float:
    """The threshold doubled if too few were dropped, halved if too many."""
    if dropped < (1 - tolerance) * wanted:
        return 2 * threshold
    return threshold / 2 if dropped > (1 + tolerance) * wanted else threshold


class DSRMasker(ExchangeMasker):
    """DSR at work."""

    def __init__(self, method: DSR, sites: Sequence[Site], context: Context) -> None:
        super().__init__(method, sites, context, method.spread)
        self.method = method
        # Even eight times as far apart there are several exchanges in a short training.
        self.every = interval(method.update_every, _EVERY, context.total_steps, parts=80)
        self.threshold = method.threshold

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero; drop and grow when it is time."""
        super().after_update(now, optimizers)
        done = now.step + 1
        fraction = done / now.total_steps
        factor = next(factor for begin, factor in _STAGES if fraction >= begin)
        due = is_due(done, factor * self.every) and fraction < self.method.stop_at
        if due and not self.frozen:
            self._exchange(done, optimizers)

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
        self.activate(survivors)  # what is dropped and drawn again begins anew
        after = [
            mask | at_random(~mask, count, self.seed, done, index)
            for index, (mask, count) in enumerate(zip(survivors, counts, strict=True))
        ]
        self.switch_(after, optimizers)

    def _survivors(self, index: int) -> Tensor:
        active = self.masks[index].active
        if index in self.dense:
            return active.clone()
        sizes = magnitude(self.weights[index])
        left = active & (sizes >= self.threshold)
        return left if left.any() else largest(sizes, active, min(1, int(active.sum())))

    def metrics(self) -> dict[str, float]:
        """How sparse the network is, and the threshold of the next exchange."""
        return {**super().metrics(), "threshold": self.threshold}

    def state_dict(self) -> dict[str, Any]:
        """The threshold, beside the active weights and the seed."""
        return {**super().state_dict(), "threshold": self.threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.threshold = state["threshold"]
