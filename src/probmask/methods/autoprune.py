"""AutoPrune: an auxiliary parameter per weight, whose sign decides whether the weight is kept.

Xiao, Wang and Rajasekaran, "AutoPrune: Automatic Network Pruning by Regularizing Auxiliary
Parameters", NeurIPS 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Positive, Range, TrainingFraction
from probmask.core.steering import travel_rate
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.families.gates import (
    adam_on_gates,
    gate_parameter,
    keep_highest,
    penalty_metrics,
    steer_or_freeze,
)

_START = 1.0  # the initial value of every a
_LEAK = 0.01  # the slope of the leaky rectifier below zero


@dataclass(frozen=True, kw_only=True)
class AutoPrune(Method):
    """Train a parameter a per weight; weights with a > 0 are kept.

        w_e = w 1[a > 0]        ∂L/∂a := ∂L/∂w_e · sign(w) · h'(a)        loss + μ Σ h(a) / n

    The derivative of the step is replaced by that of a surrogate h, and w by its sign, so that the
    gates of small weights change as fast as those of large ones. n is the number of weights. The
    paper trains a on held-out data; here it is trained on the batches that train w.

    In the paper, μ determines the sparsity only indirectly. Here μ is multiplied by a factor that
    is adapted during training, so that the number of kept weights falls cubically to the budget. At
    ``freeze_at`` exactly the budget is selected by a; then only the kept weights are trained.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        surrogate: h: ln(1 + e^a), or the leaky rectifier with slope 0.01 below zero.
        strength: The weight μ of the penalty.
        steer: Adapt the factor on the penalty. False keeps it at 1.
        ramp_begin: Fraction of the training at which the number of kept weights begins to fall.
        ramp_end: Fraction of the training at which it reaches the budget.
        freeze_at: Fraction of the training at which the masks become final. None: the end.
        exact: False keeps all weights with a > 0, as in the paper, whatever their number.
        gate_lr: Adam's rate for a. None: high enough to change signs in a training of any length.
    """

    name: ClassVar[str] = "autoprune"
    summary: ClassVar[str] = "an auxiliary parameter per weight whose sign decides"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2019
    reference: ClassVar[str] = (
        "Xiao, Wang, Rajasekaran: AutoPrune: Automatic Network Pruning by Regularizing Auxiliary "
        "Parameters, NeurIPS 2019"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    surrogate: Literal["softplus", "leaky"] = "softplus"
    strength: Annotated[float, Range(0, meaning="the weight of the penalty")] = 1.0
    steer: bool = True
    ramp_begin: TrainingFraction = 0.1
    ramp_end: TrainingFraction = 0.6
    freeze_at: TrainingFraction | None = 0.8
    exact: bool = True
    gate_lr: Positive | None = None

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "its gates and their penalty are those of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "AutoPruneMasker":
        """Start with every weight kept."""
        return AutoPruneMasker(self, sites, context)


def surrogate(a: Tensor, kind: str) -> Tensor:
    """h(a): ln(1 + e^a), or a where positive and 0.01 a elsewhere."""
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


class AuxiliaryWeight(MaskedWeight):
    """One site: w 1[a > 0], a the gate."""

    def __init__(self, site: Site, kind: str) -> None:
        super().__init__(site)
        self.gate = gate_parameter(site, torch.full(site.shape, _START))
        self.kind = kind

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the weights with a > 0."""
        masked: Tensor = _SignDecides.apply(weight, self.gate, self.kind)  # type: ignore[no-untyped-call]
        return masked


class AutoPruneMasker(Masker):
    """Masker of AutoPrune."""

    saved = ("knob", "pressure")
    masked: tuple[AuxiliaryWeight, ...]

    def __init__(self, method: AutoPrune, sites: Sequence[Site], context: Context) -> None:
        masked = [AuxiliaryWeight(site, method.surrogate) for site in sites]
        super().__init__(sites, masked, method.keep_of(sites))
        self.method = method
        self.gate_lr = method.gate_lr or travel_rate(8, context.total_steps, most=0.2)
        self.knob = self.pressure = 1.0

    @property
    def gates(self) -> list[Tensor]:
        """The parameters a of all sites."""
        return [masked.gate for masked in self.masked]

    def trainables(self) -> list[Trainables]:
        """Train a by Adam."""
        return adam_on_gates(self.gates, self.gate_lr)

    def penalty(self) -> Tensor | float:
        """μ Σ h(a) / n, times the pressure."""
        if self.frozen:
            return 0.0
        kind, strength = self.method.surrogate, self.method.strength
        values = torch.stack([surrogate(gate, kind).sum() for gate in self.gates]).sum()
        return self.pressure * (strength * values / self.size)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Steer the penalty; freeze at ``freeze_at``."""
        if self.frozen:
            return
        steer_or_freeze(self, self.method, now)

    def kept_now(self) -> int:
        """Return the number of positive a."""
        return int(torch.stack([(gate > 0).sum() for gate in self.gates]).sum())

    def choose(self) -> list[Tensor]:
        """Return the weights with the highest a."""
        gates = [gate.detach() for gate in self.gates]
        return keep_highest(self, gates, border=None if self.method.exact else 0.0)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity and the factor on the penalty."""
        return penalty_metrics(self, self.kept_now, self.pressure)
