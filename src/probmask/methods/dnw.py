"""Discovering neural wirings: compute with the largest weights, train all weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from probmask.core.allocation import Spread
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.sites import Site
from probmask.methods.families.stored import (
    StoredWeight,
    active_sparsity,
    select_by,
    set_active,
    set_outside_gradient,
)


@dataclass(frozen=True, kw_only=True)
class DNW(Method):
    """Compute with the largest weights of each layer, and train all weights.

        w_e = w if |w| is among the largest of its layer, else 0        dL/dw = g for every w

    g is the gradient of w_e. Pruned weights are trained too, by weight decay as well, and replace
    a smaller weight when they have grown beyond it. The network has its final sparsity from the
    first update on.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        allocation: The number of weights per layer: the same fraction of each ("uniform", the
            paper's), Erdős-Rényi (-kernel), or ``"global"``: the largest weights of all layers.
        dense_first: Leave the first layer dense; the others are then sparser.
        dense_last: Leave the last layer dense.
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

    @property
    def spread(self) -> Spread:
        """The number of weights of each layer."""
        return Spread(
            allocation=self.allocation, dense_first=self.dense_first, dense_last=self.dense_last
        )

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "DNWMasker":
        """Start with the largest weights of each layer."""
        return DNWMasker(self, sites)


class DNWMasker(Masker):
    """Masker of DNW."""

    masked: tuple[StoredWeight, ...]

    def __init__(self, method: DNW, sites: Sequence[Site]) -> None:
        keep = method.keep_of(sites, method.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.method = method
        set_outside_gradient(self.masked, 1.0)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Make the largest weights active."""
        if not self.frozen:
            set_active(self.masked, self.choose())

    def choose(self) -> list[Tensor]:
        """Return the largest weights of each layer."""
        values = [weight.detach().abs() for weight in self.weights]
        return select_by(self, values, self.method.spread)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity, which is constant."""
        return active_sparsity(self, self.masked)
