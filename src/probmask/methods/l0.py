"""L0 regularization: gates that are exactly zero with positive probability.

Louizos, Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization", ICLR 2018.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Positive, Range, TrainingFraction
from probmask.core.allocation import Spread
from probmask.core.noise import Stream, logistic_, normal_
from probmask.core.steering import travel_rate
from probmask.masking.distributed import rank
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.dense import DenseWeight
from probmask.methods.families.gates import (
    adam_on_gates,
    gate_parameter,
    keep_highest,
    output_shape,
    penalty_metrics,
    steer_or_freeze,
)

# The stretched interval (gamma, zeta) and the temperature beta of the paper.
LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2 / 3
# The gate without noise is 0 for a log alpha up to this value.
SHUT = math.log(-LOW / HIGH)
_QUANTILES = 16
_LIMIT = math.log(100)  # the logarithm of alpha stays within plus or minus this
_BORDER = 0.3  # width of the border between closed and open gates
_DEVIATION = 0.01  # standard deviation of the initial logarithms


@dataclass(frozen=True, kw_only=True)
class L0(Method):
    """Multiply weights by hard-concrete gates and penalize the number of open ones.

        z = clip(1.2 σ((ln u - ln(1 - u) + ln α) / β) - 0.1, 0, 1),  β = 2/3
        loss + λ Σ P(z ≠ 0) / n,  P(z ≠ 0) = σ(ln α - β ln(0.1 / 1.1))

    n is the number of gated weights, and the sum counts each of them.

    In the paper, λ determines the sparsity only indirectly. Here λ is multiplied by a factor that
    is adapted during training, so that the number of kept weights falls cubically to the budget. At
    ``freeze_at`` exactly the budget is selected by ln α; then only the kept weights are trained.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        gates: Whether gates belong to single weights or to the outputs of layers.
        strength: The weight λ of the penalty.
        drop_init: The fraction of the gates that is closed at the start.
        dense_first: Leave the first layer without gates. None: if the dense layers hold at most
            half of the kept weights.
        dense_last: Leave the last layer without gates. None: as ``dense_first``.
        steer: Adapt the factor on the penalty. False keeps it at 1.
        ramp_begin: Fraction of the training at which the number of kept weights begins to fall.
        ramp_end: Fraction of the training at which it reaches the budget.
        freeze_at: Fraction of the training at which the masks become final. None: the end.
        exact: False keeps all weights whose gate is open without noise, as in the paper, whatever
            their number.
        gate_lr: Adam's rate for ln α. None: high enough in a training of any length.
    """

    name: ClassVar[str] = "l0"
    summary: ClassVar[str] = "hard-concrete gates under an L0 penalty"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2018
    reference: ClassVar[str] = (
        "Louizos, Welling, Kingma: Learning Sparse Neural Networks through L0 Regularization, "
        "ICLR 2018"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    gates: Literal["weight", "output"] = "weight"
    strength: Annotated[float, Range(0, meaning="the weight of the penalty")] = 1.0
    drop_init: Annotated[float, Range(0.01, 0.99, "a fraction of the gates")] = 0.3
    dense_first: bool | None = None
    dense_last: bool | None = None
    steer: bool = True
    ramp_begin: TrainingFraction = 0.1
    ramp_end: TrainingFraction = 0.6
    freeze_at: TrainingFraction | None = 0.8
    exact: bool = True
    gate_lr: Positive | None = None

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "its gates and their penalty are those of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "L0Masker":
        """Start with most gates open."""
        return L0Masker(self, sites, context)


def hard_concrete(log_alpha: Tensor, logistic: Tensor) -> Tensor:
    """z = clip((ζ - γ) σ((L + ln α) / β) + γ, 0, 1)  (Louizos et al., eq. 10 and 11).

    Args:
        log_alpha: ln α, the location of each gate.
        logistic: L, Logistic(0, 1) noise of the same shape.

    Returns:
        z, the gates of one draw.
    """
    return _stretch(torch.sigmoid((logistic + log_alpha) / TEMPERATURE))


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(z ≠ 0) = σ(ln α - β ln(-γ / ζ))  (Louizos et al., eq. 12)."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


def settled_gate(log_alpha: Tensor) -> Tensor:
    """z = clip((ζ - γ) σ(ln α) + γ, 0, 1): the gate without noise  (Louizos et al., eq. 13)."""
    return _stretch(torch.sigmoid(log_alpha))


def mean_gate(log_alpha: Tensor) -> Tensor:
    """E z, averaged over 16 equally likely values of the noise; positive for ln α > -5."""
    total = torch.zeros_like(log_alpha)
    for index in range(_QUANTILES):
        u = (index + 0.5) / _QUANTILES
        total += hard_concrete(log_alpha, torch.tensor(math.log(u) - math.log1p(-u)))
    return total / _QUANTILES


def _stretch(s: Tensor) -> Tensor:
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)


class HardConcreteWeight(MaskedWeight):
    """One site: w z, with ln α as the gate and logistic noise as ``drawn``."""

    def __init__(self, site: Site, gate: Tensor) -> None:
        super().__init__(site)
        self.gate = gate_parameter(site, gate)
        self.drawn = torch.zeros_like(self.gate, requires_grad=False)

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return w z."""
        return weight * hard_concrete(self.gate, self.drawn).to(weight.dtype)

    def final_weight(self, weight: Tensor) -> Tensor:
        """Return w z for the gate without noise, or for the mean gate where that is closed."""
        gate = self.gate.detach()
        settled = settled_gate(gate)
        settled = torch.where(settled > 0, settled, mean_gate(gate))
        return weight * settled.to(weight.dtype)

    def number_open(self, weight: Tensor) -> Tensor:
        """Return the number of weights whose gate is open without noise, softly at the border.

        This is not Σ P(z ≠ 0), which also counts gates that are closed in evaluation. It is not a
        hard count either: all gates start alike and would cross the border in the same update.
        """
        opened = torch.sigmoid((self.gate - SHUT) / _BORDER)
        return opened.sum() * self.weights_per_gate(weight)

    def weights_per_gate(self, weight: Tensor) -> float:
        """Return the number of weights that share a gate."""
        return weight.numel() / self.gate.numel()


class L0Masker(Masker):
    """Masker of L0 regularization. Layers without gates stay dense."""

    saved = ("seed", "knob", "pressure")

    def __init__(self, method: L0, sites: Sequence[Site], context: Context) -> None:
        spread = Spread.fitting(
            "global",
            [site.size for site in sites],
            method.keep_of(sites),
            dense_first=method.dense_first,
            dense_last=method.dense_last,
        )
        whole = spread.dense(len(sites))
        masked = [
            DenseWeight(site) if index in whole else HardConcreteWeight(site, _gate(method, site))
            for index, site in enumerate(sites)
        ]
        super().__init__(sites, masked, method.keep_of(sites, spread))
        self.method = method
        self.seed = context.seed
        self.gate_lr = method.gate_lr or travel_rate(4 * _LIMIT, context.total_steps, most=0.5)
        self.knob = self.pressure = 1.0
        for index, (each, _) in enumerate(self.gated):
            noise = normal_(torch.empty_like(each.gate), self.seed, Stream.L0_GATES, index)
            each.gate.data.add_(noise, alpha=_DEVIATION)

    @property
    def gated(self) -> list[tuple[HardConcreteWeight, Tensor]]:
        """The sites with gates: masked weight and weight."""
        pairs = zip(self.masked, self.weights, strict=True)
        return [(each, weight) for each, weight in pairs if isinstance(each, HardConcreteWeight)]

    def trainables(self) -> list[Trainables]:
        """Train ln α by Adam."""
        return adam_on_gates([masked.gate for masked, _ in self.gated], self.gate_lr)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Draw the noise of the gates, independently on each rank."""
        if not self.frozen:
            for index, (masked, _) in enumerate(self.gated):
                logistic_(masked.drawn, self.seed, rank(), now.step, draw, index)

    def penalty(self) -> Tensor | float:
        """λ Σ P(z ≠ 0) / n, times the pressure."""
        if self.frozen:
            return 0.0
        size = sum(weight.numel() for _, weight in self.gated)
        expected = [
            open_probability(masked.gate).sum() * masked.weights_per_gate(weight)
            for masked, weight in self.gated
        ]
        return self.pressure * (self.method.strength * torch.stack(expected).sum() / size)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep ln α within ±ln 100 and steer the penalty; freeze at ``freeze_at``."""
        if self.frozen:
            return
        for masked, _ in self.gated:
            masked.gate.clamp_(-_LIMIT, _LIMIT)
        steer_or_freeze(self, self.method, now)

    @torch.no_grad()
    def kept_now(self) -> float:
        """Return the number of weights with open gates, plus the number without gates."""
        whole = self.size - sum(weight.numel() for _, weight in self.gated)
        opened = [masked.number_open(weight).double() for masked, weight in self.gated]
        return whole + (float(torch.stack(opened).sum()) if opened else 0.0)

    def choose(self) -> list[Tensor]:
        """Return the weights with the highest ln α, and all those without gates."""
        pairs = zip(self.masked, self.weights, strict=True)
        values = [
            masked.gate.detach().expand_as(weight)
            if isinstance(masked, HardConcreteWeight)
            else torch.full_like(weight, math.inf, dtype=torch.float32)
            for masked, weight in pairs
        ]
        return keep_highest(self, values, border=None if self.method.exact else SHUT)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity and the factor on the penalty."""
        return penalty_metrics(self, self.kept_now, self.pressure)


def _gate(method: L0, site: Site) -> Tensor:
    """Return the initial ln α, without its noise."""
    shape = site.shape if method.gates == "weight" else output_shape(site)
    return torch.full(shape, math.log(1 - method.drop_init) - math.log(method.drop_init))
