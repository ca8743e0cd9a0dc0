"""L0 regularization: gates that are exactly zero with positive probability.

Louizos, Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization", ICLR 2018.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core.hard_concrete import (
    SHUT,
    hard_concrete,
    mean_gate,
    open_probability,
    settled_gate,
)
from probmask.core.noise import logistic_, normal_
from probmask.core.steering import travel_rate
from probmask.masking.budgets import whole_layers
from probmask.masking.gated import GatedWeight, output_shape
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Context, Progress
from probmask.masking.ranks import rank
from probmask.masking.sites import Site
from probmask.masking.steered import SteeredMasker, SteeredMethod
from probmask.methods.dense import DenseWeight

_LIMIT = math.log(100)  # the logarithm of alpha stays within plus or minus this
_BORDER = 0.3  # width of the border between shut and open
_SPREAD = 0.01  # of the logarithms at the start
_START = -4  # a counter that keeps this stream of random numbers apart


@dataclass(frozen=True, kw_only=True)
class L0(SteeredMethod):
    """Multiply weights by hard-concrete gates and penalise how many are open.

        z = clip(1.2 σ((ln u - ln(1 - u) + ln α) / β) - 0.1, 0, 1),  β = 2/3
        loss + λ Σ P(z ≠ 0) / n,  P(z ≠ 0) = σ(ln α - β ln(0.1 / 1.1))

    ``gates`` belong to single weights, or to the outputs of layers. ``strength`` is λ; n is the
    number of gated weights, each counted. ``drop_init`` is the part of the gates closed at the
    start. ``dense_first`` and ``dense_last`` leave the first and last layer ungated; None, the
    default, does so where they take at most half of the budget.
    """

    name: ClassVar[str] = "l0"
    summary: ClassVar[str] = "hard-concrete gates under an L0 penalty"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2018
    reference: ClassVar[str] = (
        "Louizos, Welling, Kingma: Learning Sparse Neural Networks through L0 Regularization, "
        "ICLR 2018"
    )

    gates: Literal["weight", "output"] = "weight"
    strength: float = 1.0
    drop_init: float = 0.3
    dense_first: bool | None = None
    dense_last: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("L0", "gates", self.gates, ("weight", "output"))
        check_within("L0", "strength", self.strength, 0, math.inf, meaning="weight of the penalty")
        check_within("L0", "drop_init", self.drop_init, 0.01, 0.99, meaning="part closed at first")
        for name in ("dense_first", "dense_last"):
            check_choice("L0", name, getattr(self, name), (None, True, False))

    def begin(self, sites: Sequence[Site], context: Context) -> "L0Masker":
        """Open most gates."""
        whole = whole_layers(self, sites, first=self.dense_first, last=self.dense_last)
        masks = [
            DenseWeight(site) if index in whole else HardConcreteWeight(site, self._gate(site))
            for index, site in enumerate(sites)
        ]
        return L0Masker(self, sites, masks, context)

    def _gate(self, site: Site) -> Tensor:
        shape = site.shape if self.gates == "weight" else output_shape(site)
        return torch.full(shape, math.log(1 - self.drop_init) - math.log(self.drop_init))


class HardConcreteWeight(GatedWeight):
    """One site: ln α as its gate, logistic noise as ``drawn``."""

    def training_weight(self, weight: Tensor) -> Tensor:
        """W z."""
        return weight * hard_concrete(self.gate, self.drawn).to(weight.dtype)

    def settled_weight(self, weight: Tensor) -> Tensor:
        """W z for the gate without noise; for the mean gate where that one is closed."""
        gate = self.gate.detach()
        settled = settled_gate(gate)
        settled = torch.where(settled > 0, settled, mean_gate(gate))
        return weight * settled.to(weight.dtype)


class L0Masker(SteeredMasker):
    """L0 regularization at work on one model."""

    def __init__(
        self, method: L0, sites: Sequence[Site], masks: Sequence[MaskedWeight], context: Context
    ) -> None:
        rate = travel_rate(4 * _LIMIT, context.total_steps, most=0.5)
        super().__init__(method, sites, masks, context, gate_lr=rate)
        self.method = method
        for index, (mask, _) in enumerate(self.gated):
            noise = normal_(torch.empty_like(mask.gate), self.seed, _START, index)
            mask.gate.data.add_(noise, alpha=_SPREAD)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Draw the noise of the gates, this rank's own."""
        if not self.frozen:
            for index, (mask, _) in enumerate(self.gated):
                logistic_(mask.drawn, self.seed, rank(), now.step, draw, index)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep ln α within ±ln 100, and steer."""
        if not self.frozen:
            for mask, _ in self.gated:
                mask.gate.clamp_(-_LIMIT, _LIMIT)
        super().after_update(now, optimizers)

    def term(self) -> Tensor:
        """λ Σ P(z ≠ 0) / n."""
        size = sum(weight.numel() for _, weight in self.gated)
        expected = [
            open_probability(mask.gate).sum() * _weights_per_gate(mask, weight)
            for mask, weight in self.gated
        ]
        return self.method.strength * torch.stack(expected).sum() / size

    def kept_of(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """The weights whose gate is open without noise, counted softly about the border.

        Not Σ P(z ≠ 0), by which gates that are shut in the network that is used can still count;
        and not all or nothing, as gates start alike and would cross the border all at once.
        """
        opened = torch.sigmoid((mask.gate - SHUT) / _BORDER)
        return opened.sum() * _weights_per_gate(mask, weight)

    @property
    def border(self) -> float:
        """Above it the gate without noise is open."""
        return SHUT

    def criterion(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """Ln α."""
        return mask.gate.detach().expand_as(weight)


def _weights_per_gate(mask: GatedWeight, weight: Tensor) -> float:
    return weight.numel() / mask.gate.numel()
