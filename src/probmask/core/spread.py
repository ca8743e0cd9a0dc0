"""How the weights that are kept are spread over layers: by one order, or so many of each.

A layer's own number is given by a rule of `probmask.core.allocation`; the first and the last layer
may be left dense, at the cost of the others: the total is what was asked for in any case.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor

from probmask.core.allocation import erdos_renyi, uniform
from probmask.core.selection import select_top
from probmask.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A rule: one order over all layers, or a number for each by ``allocation``."""

    allocation: Literal["global", "uniform", "er", "erk"]
    dense_first: bool = False
    dense_last: bool = False

    @classmethod
    def over(
        cls,
        scope: Literal["global", "layer"],
        *,
        dense_first: bool = False,
        dense_last: bool = False,
    ) -> Self:
        """One order over all layers, or the same fraction of each."""
        allocation: Literal["global", "uniform"] = "global" if scope == "global" else "uniform"
        return cls(allocation=allocation, dense_first=dense_first, dense_last=dense_last)

    def dense(self, layers: int) -> frozenset[int]:
        """Which of so many layers are left dense."""
        first = {0} if self.dense_first else set()
        last = {layers - 1} if self.dense_last else set()
        return frozenset(first | last)

    def check(self, caller: str, sizes: Sequence[int], keep: int) -> None:
        """Refuse a budget that the dense layers exceed, or use up while there are others."""
        dense = self.dense(len(sizes))
        held = sum(sizes[i] for i in dense)
        if dense and (held > keep or (held == keep and len(dense) < len(sizes))):
            raise InputError(
                f"{caller}: the dense layers alone hold {held} weights, the budget is {keep} of "
                f"{sum(sizes)} and must leave some for the others; lower sparsity, or make them "
                "sparse too."
            )

    def counts(self, shapes: Sequence[tuple[int, ...]], keep: int) -> list[int]:
        """k with Σ k = keep: dense layers whole, the others by the rule (not for "global")."""
        counts = [math.prod(shape) for shape in shapes]
        dense = self.dense(len(shapes))
        others = [i for i in range(len(shapes)) if i not in dense]
        left = keep - sum(counts[i] for i in dense)
        if self.allocation == "uniform":
            split = uniform([counts[i] for i in others], left)
        else:
            kernel = self.allocation == "erk"
            split = erdos_renyi([shapes[i] for i in others], left, kernel=kernel)
        for i, count in zip(others, split, strict=True):
            counts[i] = count
        return counts

    def select(
        self, values: Sequence[Tensor], keep: int, names: Sequence[str], *, spare: float = 0.0
    ) -> list[Tensor]:
        """Masks of the ``keep`` largest values, so many of each layer as the rule says.

        On the way there, the part ``spare`` of all that is to go still stays; the masks of a lower
        part lie within those of a higher one, layer by layer.
        """
        if self.allocation == "global":
            dense = self.dense(len(values))
            least = [v.numel() if i in dense else 0 for i, v in enumerate(values)]
            more = round(spare * (sum(v.numel() for v in values) - keep))
            return select_top(values, keep + more, minimum=least, names=names)
        counts = self.counts([tuple(v.shape) for v in values], keep)
        return [
            select_top([v], count + round(spare * (v.numel() - count)), names=[name])[0]
            for v, count, name in zip(values, counts, names, strict=True)
        ]
