"""AutoPrune: an auxiliary parameter per weight, whose sign decides.

Xiao, Wang and Rajasekaran, "AutoPrune: Automatic Network Pruning by Regularizing Auxiliary
Parameters", NeurIPS 2019.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core.steering import travel_rate
from probmask.masking.gated import GatedWeight
from probmask.masking.protocol import Context
from probmask.masking.sites import Site
from probmask.masking.steered import SteeredMasker, SteeredMethod

_START = 1.0  # every a at first
_LEAK = 0.01  # the slope of the leaky rectifier below zero


@dataclass(frozen=True, kw_only=True)
class AutoPrune(SteeredMethod):
    """Train a parameter a per weight; weights with a > 0 are in the network.

        w_e = w 1[a > 0]        ∂L/∂a := ∂L/∂w_e · sign(w) · h'(a)        loss + μ Σ h(a) / n

    The step's slope is replaced by that of ``surrogate`` h, and w by its sign, so that small
    weights decide about themselves as fast as large ones. ``strength`` is μ; n is the number of
    weights. The paper trains a on held-out data; here it sees the batches that w sees.
    """

    name: ClassVar[str] = "autoprune"
    summary: ClassVar[str] = "an auxiliary parameter per weight whose sign decides"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2019
    reference: ClassVar[str] = (
        "Xiao, Wang, Rajasekaran: AutoPrune: Automatic Network Pruning by Regularizing Auxiliary "
        "Parameters, NeurIPS 2019"
    )

    surrogate: Literal["softplus", "leaky"] = "softplus"
    strength: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("AutoPrune", "surrogate", self.surrogate, ("softplus", "leaky"))
        check_within(
            "AutoPrune", "strength", self.strength, 0, math.inf, meaning="weight of the penalty"
        )

    def begin(self, sites: Sequence[Site], context: Context) -> "AutoPruneMasker":
        """Have every weight in the network."""
        return AutoPruneMasker(self, sites, context)


def surrogate(a: Tensor, kind: str) -> Tensor:
    """h(a): ln(1 + e^a), or a where positive and a hundredth of it elsewhere."""
    if kind == "softplus":
        return torch.nn.functional.softplus(a)
    return torch.nn.functional.leaky_relu(a, _LEAK)


def slope(a: Tensor, kind: str) -> Tensor:
    """h'(a)."""
    return torch.sigmoid(a) if kind == "softplus" else torch.where(a > 0, 1.0, _LEAK)


class _SignDecides(torch.autograd.Function):
    """w 1[a > 0], with the gradients that `AutoPrune` states."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, a: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(weight, a)
        ctx.kind = kind
        return torch.where(a > 0, weight, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, a = ctx.saved_tensors
        return torch.where(a > 0, grad, 0.0), grad * weight.sign() * slope(a, ctx.kind), None


class AuxiliaryWeight(GatedWeight):
    """One site: a as its gate."""

    def __init__(self, site: Site, kind: str) -> None:
        super().__init__(site, torch.full(site.shape, _START))
        self.kind = kind

    def training_weight(self, weight: Tensor) -> Tensor:
        """The weights with a > 0."""
        masked: Tensor = _SignDecides.apply(weight, self.gate, self.kind)  # type: ignore[no-untyped-call]
        return masked


class AutoPruneMasker(SteeredMasker):
    """AutoPrune at work on one model."""

    def __init__(self, method: AutoPrune, sites: Sequence[Site], context: Context) -> None:
        masks = [AuxiliaryWeight(site, method.surrogate) for site in sites]
        rate = travel_rate(8, context.total_steps, most=0.2)
        super().__init__(method, sites, masks, context, gate_lr=rate)
        self.method = method

    def term(self) -> Tensor:
        """μ Σ h(a) / n."""
        parts = [surrogate(mask.gate, self.method.surrogate).sum() for mask, _ in self.gated]
        return self.method.strength * torch.stack(parts).sum() / self.size

    def kept_of(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """How many a are positive."""
        return (mask.gate > 0).sum()

    @property
    def border(self) -> float:
        """Its sign decides."""
        return 0.0

    def criterion(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """A itself."""
        return mask.gate.detach()
