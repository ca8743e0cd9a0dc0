"""Exchanging active weights for inactive ones: which to begin with, to drop, to grow; how often.

The methods that train a sparse network from the start (RigL, SET, SNFS, GraNet, DSR, Deep R) draw
one at random, drop some weights and grow as many. They differ in the numbers, in the score by which
weights are grown, and in where; the rest is here.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice
from probmask.core.allocation import Spread
from probmask.core.noise import uniform_
from probmask.core.schedules import cosine
from probmask.core.selection import select_top
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Method, keep_of
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMask, StoredMasker

Allocation = Literal["uniform", "er", "erk"]

_START = -1  # no update has this number: the noise of the start is nobody else's


@dataclass(frozen=True, kw_only=True)
class SparseStart(Method, ABC):
    """A method whose network is sparse from the start, with a number of weights for each layer.

    ``dense_first`` and ``dense_last`` leave a layer whole; None leaves the first one to the method.
    """

    allocation: Allocation
    dense_first: bool | None = False
    dense_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        caller = type(self).__name__
        check_choice(caller, "allocation", self.allocation, ("uniform", "er", "erk"))
        check_choice(caller, "dense_first", self.dense_first, (None, True, False))
        check_choice(caller, "dense_last", self.dense_last, (True, False))

    @property
    def spread(self) -> Spread:
        """How many weights each layer has."""
        return Spread(
            allocation=self.allocation,
            dense_first=bool(self.dense_first),
            dense_last=self.dense_last,
        )


def interval(asked: int | None, paper: int, total_steps: int, *, parts: int = 20) -> int:
    """Updates between exchanges: as asked; else the paper's, or a part of a short training."""
    return asked if asked is not None else max(1, min(paper, total_steps // parts))


def is_due(step: int, every: int) -> bool:
    """Whether ``step`` is a positive multiple of ``every``."""
    return step > 0 and step % every == 0


def falling(progress: float, start: float, end: float = 0.0) -> float:
    """end + (start - end) (1 + cos(π progress)) / 2: from start to end along a cosine."""
    return end + (start - end) * cosine(min(1.0, progress))


def magnitude(weight: Tensor) -> Tensor:
    """|w| in fp32."""
    return weight.detach().abs().float()


def gradient_magnitude(weight: Tensor) -> Tensor:
    """|g| in fp32; zero for a weight that got no gradient."""
    return torch.zeros_like(magnitude(weight)) if weight.grad is None else magnitude(weight.grad)


def largest(scores: Tensor, among: Tensor, count: int) -> Tensor:
    """The mask of the ``count`` largest scores (all ≥ 0) among some; of equal ones the earlier."""
    if count == 0:
        return torch.zeros_like(among)
    (chosen,) = select_top([torch.where(among, scores.float(), -1.0)], count)
    return chosen


def at_random(among: Tensor, count: int, seed: int, *counters: int) -> Tensor:
    """The mask of ``count`` entries among some, drawn without preference."""
    return largest(
        uniform_(torch.empty(among.shape, device=among.device), seed, *counters), among, count
    )


def random_masks(sites: Sequence[Site], counts: Sequence[int], seed: int) -> list[Tensor]:
    """So many weights of each layer, drawn at random: what a training begins with."""
    return [
        at_random(torch.ones_like(site.weight, dtype=torch.bool), count, seed, _START, index)
        for index, (site, count) in enumerate(zip(sites, counts, strict=True))
    ]


def drop_smallest(sizes: Tensor, active: Tensor, count: int) -> Tensor:
    """The mask that is left of ``active`` without its ``count`` smallest."""
    return largest(sizes, active, int(active.sum()) - count)


def exchange(sizes: Tensor, active: Tensor, scores: Tensor, count: int) -> Tensor:
    """``active`` without its ``count`` smallest, and with the ``count`` best-scored of the others.

    The others are all that are inactive then: what has just been dropped can return.
    """
    survivors = drop_smallest(sizes, active, count)
    return survivors | largest(scores, ~survivors, count)


class ExchangeMasker(StoredMasker):
    """A method that begins with a sparse network and exchanges weights while it trains.

    The network is drawn at random, as many weights of each layer as ``spread`` says: those of the
    budget, or as many as ``start_sparsity`` leaves. ``dense`` layers stay as they are.
    """

    def __init__(
        self,
        method: Method,
        sites: Sequence[Site],
        context: Context,
        spread: Spread,
        *,
        start_sparsity: float | None = None,
        masks: Sequence[StoredMask] = (),
    ) -> None:
        super().__init__(method, sites, spread=spread, masks=masks)
        self.seed = context.seed
        self.dense = spread.dense(len(sites))
        start = self.keep if start_sparsity is None else keep_of(start_sparsity, self.size)
        counts = spread.counts([site.shape for site in sites], start)
        self.activate(random_masks(sites, counts, self.seed))
        if self.keep == self.size:
            self.freeze()

    def switch_(self, active: Sequence[Tensor], optimizers: WeightOptimizers) -> None:
        """Make these the active weights; those that were not begin at zero, with no momentum."""
        for weight, before, after in zip(self.weights, self.active, active, strict=True):
            optimizers.restart_(weight, after & ~before)
        self.activate(active)

    def regrow_by_gradient_(self, counts: Sequence[int], optimizers: WeightOptimizers) -> None:
        """Exchange the smallest weights of each layer for those with the largest gradients.

        The update that follows moves only weights that were active before and still are.
        """
        before = [active.clone() for active in self.active]
        after = [
            exchange(magnitude(weight), active, gradient_magnitude(weight), count)
            for weight, active, count in zip(self.weights, before, counts, strict=True)
        ]
        self.switch_(after, optimizers)
        for weight, old, new in zip(self.weights, before, after, strict=True):
            if weight.grad is not None:
                weight.grad.masked_fill_(~(old & new), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The seed of the noise, beside the active weights."""
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.seed = state["seed"]
