"""Sparse training by gate variables (Srinivas et al.).

Srinivas, Subramanya and Babu, "Training Sparse Neural Networks", CVPR workshops 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from probmask.checks import Positive, Range, TrainingFraction
from probmask.core.noise import uniform_
from probmask.core.steering import travel_rate
from probmask.masking.distributed import rank
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.method import Context, Method, Phase
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.gates import (
    BernoulliWeight,
    adam_on_gates,
    keep_highest,
    penalty_metrics,
    steer_or_freeze,
)

PenaltyWeight = Annotated[float, Range(0, meaning="the weight of a penalty")]


@dataclass(frozen=True, kw_only=True)
class Srinivas(Method):
    """Learn the probability of each weight's gate; penalize undecided and open gates.

        w_e = w m,  m ~ Bernoulli(g),  ∂L/∂g = ∂L/∂w_e · w  (straight through the draw)
        loss + Σ (λ₁ g (1 - g) + λ₂ g) / n,  g in [0, 1]

    n is the number of weights. The method adds gates to a trained network, so the first epochs
    train without them.

    In the paper, λ₂ determines the sparsity only indirectly. Here λ₂ is multiplied by a factor that
    is adapted during training, so that Σ g falls cubically to the budget. At ``freeze_at`` exactly
    the budget is selected by g; then only the kept weights are trained. ``ramp_begin``,
    ``ramp_end`` and ``freeze_at`` are fractions of the training with gates.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        bimodality: The weight λ₁ of the penalty on undecided gates.
        strength: The weight λ₂ of the penalty on open gates.
        pretrain: Fraction of the epochs that train without gates: at least one epoch, unless there
            is only one, which then trains with gates.
        equal_epochs: The configured epochs are those of both phases together. False: they are
            those without gates, and the epochs with gates come in addition.
        steer: Adapt the factor on λ₂. False keeps it at 1.
        ramp_begin: Fraction of the training at which the number of kept weights begins to fall.
        ramp_end: Fraction of the training at which it reaches the budget.
        freeze_at: Fraction of the training at which the masks become final. None: the end.
        exact: False keeps all weights with g > ½, as in the paper, whatever their number.
        gate_lr: Adam's rate for g. None: high enough to close gates in a training of any length.
    """

    name: ClassVar[str] = "srinivas"
    summary: ClassVar[str] = "Bernoulli gates with a bimodal penalty, on a trained network"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2017
    reference: ClassVar[str] = (
        "Srinivas, Subramanya, Babu: Training Sparse Neural Networks, CVPR workshops 2017"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    bimodality: PenaltyWeight = 1.0
    strength: PenaltyWeight = 1.0
    pretrain: Annotated[float, Range(0, 0.95, "a fraction of the epochs")] = 0.5
    equal_epochs: bool = True
    steer: bool = True
    ramp_begin: TrainingFraction = 0.1
    ramp_end: TrainingFraction = 0.6
    freeze_at: TrainingFraction | None = 0.8
    exact: bool = True
    gate_lr: Positive | None = None

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return a training without gates and one with gates; at sparsity 0, one dense training."""
        if self.sparsity == 0:
            return super().phases(epochs)
        if self.pretrain == 0:
            return (Phase("gates", epochs),)
        if not self.equal_epochs:
            more = max(1, round(epochs * (1 - self.pretrain) / self.pretrain))
            return Phase("train", epochs), Phase("gates", more)
        first = max(1, min(epochs - 1, round(self.pretrain * epochs)))
        if epochs < 2:
            return (Phase("gates", epochs),)
        return Phase("train", first), Phase("gates", epochs - first)

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "its gates and their penalty are those of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "SrinivasMasker":
        """Start with all gates open."""
        return SrinivasMasker(self, sites, context)


class SrinivasMasker(Masker):
    """Masker of Srinivas et al."""

    saved = ("seed", "knob", "pressure")
    masked: tuple[BernoulliWeight, ...]

    def __init__(self, method: Srinivas, sites: Sequence[Site], context: Context) -> None:
        masked = [BernoulliWeight(site, torch.ones(site.shape)) for site in sites]
        super().__init__(sites, masked, method.keep_of(sites))
        self.method = method
        self.seed = context.seed
        self.first_update = context.phase_ends[0] if len(context.phase_ends) > 1 else 0
        updates = context.total_steps - self.first_update
        self.gate_lr = method.gate_lr or travel_rate(4, updates, most=0.2)
        self.knob = self.pressure = 1.0

    @property
    def gates(self) -> list[Tensor]:
        """The probabilities g of all sites."""
        return [masked.gate for masked in self.masked]

    def trainables(self) -> list[Trainables]:
        """Train g by Adam, once the training with gates has begun."""
        return adam_on_gates(self.gates, self.gate_lr, begin=self.first_update)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Draw the gates, independently on each rank. All are open while g = 1."""
        if not self.frozen:
            for index, masked in enumerate(self.masked):
                noise = uniform_(masked.drawn, self.seed, rank(), now.step, draw, index)
                masked.drawn.copy_(noise < masked.gate)

    def penalty(self) -> Tensor | float:
        """Σ (λ₁ g (1 - g) + λ₂ g) / n, λ₂ times the pressure.

        A pressure below 1 acts on λ₁ too. Otherwise λ₁ would close all gates below ½ permanently.
        """
        if self.frozen:
            return 0.0
        undecided = torch.stack([(gate * (1 - gate)).sum() for gate in self.gates]).sum()
        bimodality = self.method.bimodality * min(1.0, self.pressure)
        opened = torch.stack([gate.sum() for gate in self.gates]).sum()
        penalty = self.method.strength * opened / self.size
        return bimodality * undecided / self.size + self.pressure * penalty

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep g in [0, 1] and steer the penalty; freeze at ``freeze_at``."""
        if self.frozen:
            return
        for masked in self.masked:
            masked.gate.clamp_(0, 1)
        steer_or_freeze(self, self.method, now, first_update=self.first_update)

    @torch.no_grad()
    def kept_now(self) -> float:
        """Σ g."""
        return float(torch.stack([gate.sum().double() for gate in self.gates]).sum())

    def choose(self) -> list[Tensor]:
        """Return the weights with the highest g."""
        gates = [gate.detach() for gate in self.gates]
        return keep_highest(self, gates, border=None if self.method.exact else 0.5)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity and the factor on the penalty."""
        return penalty_metrics(self, self.kept_now, self.pressure)
