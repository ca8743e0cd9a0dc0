"""Training sparse neural networks by gate variables (Srinivas et al.).

Srinivas, Subramanya and Babu, "Training Sparse Neural Networks", CVPR workshops 2017.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core.noise import uniform_
from probmask.core.steering import travel_rate
from probmask.masking.gated import GatedWeight, straight_through
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Phase, Progress
from probmask.masking.ranks import rank
from probmask.masking.sites import Site
from probmask.masking.steered import SteeredMasker, SteeredMethod


@dataclass(frozen=True, kw_only=True)
class Srinivas(SteeredMethod):
    """Learn the probability of each weight's gate, pushed towards 0 or 1 and towards few.

        w_e = w m,  m ~ Bernoulli(g),  ∂L/∂g = ∂L/∂w_e · w  (straight through the draw)
        loss + Σ (λ₁ g (1 - g) + λ₂ g) / n,  g in [0, 1]

    ``bimodality`` is λ₁, ``strength`` λ₂, which the steering moves; n is the number of weights. The
    gates are for a trained network: the first ``pretrain`` of the epochs trains without them
    (``equal_epochs=False``: on top of the epochs given), at least one epoch, unless there is only
    one, which then is the gates'. The part of the training in ``ramp_begin``, ``ramp_end`` and
    ``freeze_at`` is that of the gates.
    """

    name: ClassVar[str] = "srinivas"
    summary: ClassVar[str] = "Bernoulli gates with a bimodal penalty, on a trained network"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2017
    reference: ClassVar[str] = (
        "Srinivas, Subramanya, Babu: Training Sparse Neural Networks, CVPR workshops 2017"
    )

    bimodality: float = 1.0
    strength: float = 1.0
    pretrain: float = 0.5
    equal_epochs: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bimodality", "strength"):
            value = getattr(self, name)
            check_within("Srinivas", name, value, 0, math.inf, meaning="weight of a penalty")
        check_within("Srinivas", "pretrain", self.pretrain, 0, 0.95, meaning="part of the epochs")
        check_choice("Srinivas", "equal_epochs", self.equal_epochs, (True, False))

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Training without gates, then with them; one dense training at sparsity 0."""
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

    def begin(self, sites: Sequence[Site], context: Context) -> "SrinivasMasker":
        """Open all gates."""
        return SrinivasMasker(self, sites, context)


class BernoulliWeight(GatedWeight):
    """One site: the probabilities of its gates, and as ``drawn`` the gates."""

    def training_weight(self, weight: Tensor) -> Tensor:
        """W m."""
        return weight * straight_through(self.drawn, self.gate).to(weight.dtype)


class SrinivasMasker(SteeredMasker):
    """Gate variables at work on one model."""

    def __init__(self, method: Srinivas, sites: Sequence[Site], context: Context) -> None:
        begin = context.phase_ends[0] if len(context.phase_ends) > 1 else 0
        masks = [BernoulliWeight(site, torch.ones(site.shape)) for site in sites]
        rate = travel_rate(4, context.total_steps - begin, most=0.2)
        super().__init__(method, sites, masks, context, gate_lr=rate, begin=begin)
        self.method = method

    def before_forward(self, now: Progress, draw: int) -> None:
        """Draw the gates, this rank's own; all are open while g = 1."""
        if not self.frozen:
            for index, (mask, _) in enumerate(self.gated):
                noise = uniform_(mask.drawn, self.seed, rank(), now.step, draw, index)
                mask.drawn.copy_(noise < mask.gate)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep g within [0, 1], and steer."""
        if not self.frozen:
            for mask, _ in self.gated:
                mask.gate.clamp_(0, 1)
        super().after_update(now, optimizers)

    def penalty(self) -> Tensor | float:
        """Σ (λ₁ g (1 - g) + λ₂ g) / n; λ₂ is what the steering moves.

        Where that lets go, λ₁ does too: alone it would close every gate below a half for good.
        """
        if self.frozen:
            return 0.0
        undecided = torch.stack([(m.gate * (1 - m.gate)).sum() for m, _ in self.gated]).sum()
        bimodality = self.method.bimodality * min(1.0, self.pressure)
        return bimodality * undecided / self.size + self.pressure * self.term()

    def term(self) -> Tensor:
        """λ₂ Σ g / n."""
        total = torch.stack([mask.gate.sum() for mask, _ in self.gated]).sum()
        return self.method.strength * total / self.size

    def kept_of(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """Σ g."""
        return mask.gate.sum()

    @property
    def border(self) -> float:
        """A gate that is open more often than not."""
        return 0.5

    def criterion(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """The probability g."""
        return mask.gate.detach()
