"""Discovering neural wirings: the largest weights compute, all of them learn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice
from probmask.core.allocation import Spread
from probmask.masking.budgets import checked_keep
from probmask.masking.protocol import Context, Method
from probmask.masking.sites import Site
from probmask.masking.thresholded import ThresholdedWeight, ThresholdMasker


@dataclass(frozen=True, kw_only=True)
class DNW(Method):
    """Compute with the largest weights of each layer, and train all of them.

    w_e = w if |w| is among the layer's largest, else 0; dL/dw = g for every w, g the gradient of
    w_e. A weight outside goes on being moved, by weight decay too, and takes the place of a smaller
    one when it has grown past it. The network has its final sparsity from the first update on.

    ``allocation`` splits the budget over the layers: the same fraction of each ("uniform", the
    paper's), Erdős-Rényi densities ("er", "erk"), or one order of all weights ("global").
    ``dense_first`` and ``dense_last`` leave those layers whole, at the cost of the others.
    """

    name: ClassVar[str] = "dnw"
    summary: ClassVar[str] = "computes with each layer's largest weights, trains all of them"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2019
    reference: ClassVar[str] = (
        "M. Wortsman, A. Farhadi and M. Rastegari, Discovering Neural Wirings, NeurIPS 2019"
    )

    allocation: Literal["uniform", "er", "erk", "global"] = "uniform"
    dense_first: bool = False
    dense_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("DNW", "allocation", self.allocation, ("uniform", "er", "erk", "global"))
        for name in ("dense_first", "dense_last"):
            check_choice("DNW", name, getattr(self, name), (True, False))

    def begin(self, sites: Sequence[Site], context: Context) -> "DNWMasker":
        """Take the largest weights of each layer."""
        return DNWMasker(self, sites)


class DNWWeight(ThresholdedWeight):
    """One site: w where active."""

    def effective(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        """The active weights as they are."""
        return torch.where(active, weight, 0.0)


class DNWMasker(ThresholdMasker):
    """DNW at work on one model."""

    def __init__(self, method: DNW, sites: Sequence[Site]) -> None:
        self.spread = Spread(
            allocation=method.allocation,
            dense_first=method.dense_first,
            dense_last=method.dense_last,
        )
        keep = checked_keep(method, sites, self.spread)
        super().__init__(sites, [DNWWeight(site) for site in sites], keep)

    def select(
        self, keep: int, *, into: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[float]]:
        """The largest weights of each layer; how large they are does not matter."""
        values = [weight.detach().abs() for weight in self.weights]
        return self.spread.select(values, keep, self.names), [0.0] * len(values)
