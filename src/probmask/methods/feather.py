"""Feather: a threshold between soft and hard, with straight-through gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from probmask.checks import GradientFraction, Positive, TrainingFraction
from probmask.core.selection import ThresholdForecast
from probmask.core.shrinkage import power_shrink
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.thresholds import (
    ThresholdedWeight,
    choose_largest,
    clip_gradient,
    number_at,
    train_largest,
    usual_outside,
)


@dataclass(frozen=True, kw_only=True)
class Feather(Method):
    """Shrink all weights by one threshold, continuously and almost without changing large ones.

        w_e = sign(w) (|w|³ - θ³)^⅓ where |w| > θ, else 0
        dL/dw = g where |w| > θ, else ϑ g,  g the gradient of w_e

    θ, one for all layers, is the quantile of |w| at the current sparsity, which rises cubically.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        ramp_begin: Fraction of the training at which the sparsity begins to rise.
        ramp_end: Fraction of the training at which it reaches ``sparsity``.
        outside: The fraction ϑ of the gradient that pruned weights get. None: the paper's, 0.5
            above 95 % sparsity, else 1.
        clip_norm: Clip the joint gradient to this norm, by default the paper's. Without it,
            channels that have lost all of their weights diverge in short trainings.
    """

    name: ClassVar[str] = "feather"
    summary: ClassVar[str] = "a threshold between soft and hard, straight-through gradients"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2023
    reference: ClassVar[str] = (
        "A. Glentis Georgoulakis, G. Retsinas and P. Maragos, Feather: An Elegant Solution to "
        "Effective DNN Sparsification, BMVC 2023"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    ramp_begin: TrainingFraction = 0.0
    ramp_end: TrainingFraction = 0.5
    outside: GradientFraction | None = None
    clip_norm: Positive | None = 3.0

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "FeatherMasker":
        """Start dense."""
        return FeatherMasker(self, sites)


def cubic_shrink(weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
    """sign(w) (|w|³ - θ³)^⅓ where active, else 0."""
    return power_shrink(weight, active, threshold, torch.full_like(threshold, 3.0))


class FeatherMasker(Masker):
    """Masker of Feather."""

    masked: tuple[ThresholdedWeight, ...]

    def __init__(self, method: Feather, sites: Sequence[Site]) -> None:
        outside = usual_outside(method.sparsity) if method.outside is None else method.outside
        masked = [ThresholdedWeight(site, cubic_shrink, outside=outside) for site in sites]
        super().__init__(sites, masked, method.keep_of(sites))
        self.method = method
        self._kept = self.size
        self._forecast = ThresholdForecast()

    def before_forward(self, now: Progress, draw: int) -> None:
        """Set the current threshold."""
        if not self.frozen:
            ramp = (self.method.ramp_begin, self.method.ramp_end)
            self._kept = number_at(self, now.fraction, ramp)
            train_largest(self, self.masked, self._kept, self._forecast)

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Clip the joint gradient."""
        clip_gradient(self, optimizers, self.method.clip_norm)

    def choose(self) -> list[Tensor]:
        """Return the largest weights of the final budget."""
        return choose_largest(self, self.masked)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity."""
        return {"expected_sparsity": 1 - (self.keep if self.frozen else self._kept) / self.size}
