"""Thresholds: weights above a threshold are kept; weights above and below it are trained.

Pruned weights still receive the gradient of the effective weight, or a fraction of it, and return
when they have grown beyond the threshold. `ThresholdedWeight` saves nothing for a resume: its masks
are a function of the weights and of the progress.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from probmask.core.schedules import kept_fraction
from probmask.core.selection import ThresholdForecast, cut_by_magnitude
from probmask.masking.masker import Masker
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.families.clipping import clip_joint_norm_

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
GradientRule = Callable[[Tensor, Tensor], Tensor]

_EXTREME = 0.95


def usual_outside(sparsity: float) -> float:
    """Return the fraction of the gradient that pruned weights get: 0.5 above 95 % sparsity, else 1.

    This is Feather's rule (BMVC 2023): at very high sparsity and with full gradients, weights would
    switch between pruned and kept too often.
    """
    return 0.5 if sparsity > _EXTREME else 1.0


def scaled_outside(grad: Tensor, active: Tensor, outside: float) -> Tensor:
    """Return g where active, else outside·g."""
    return grad if outside == 1 else torch.where(active, grad, outside * grad)


def straight_through(
    weight: Tensor, active: Tensor, threshold: Tensor, rule: Rule, gradient_rule: GradientRule
) -> Tensor:
    """Return rule(w, active, θ); its backward pass is ``gradient_rule(g, active)``.

    The rule is computed in at least fp32 and its result has the dtype of the weight.
    """
    result: Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
        weight, active, threshold, rule, gradient_rule
    )
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        active: Tensor,
        threshold: Tensor,
        rule: Rule,
        gradient_rule: GradientRule,
    ) -> Tensor:
        ctx.save_for_backward(active)
        ctx.gradient_rule = gradient_rule
        wide = weight if weight.dtype == torch.float64 else weight.float()
        return rule(wide, active, threshold).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (active,) = ctx.saved_tensors
        return ctx.gradient_rule(grad, active), None, None, None, None


class ThresholdedWeight(MaskedWeight):
    """One site: ``rule(w, active, θ)``, and the gradient that pruned weights get.

    There are two thresholds: that of the current budget, for training, and that of the final
    budget, for evaluation. While nothing is pruned (``dense``), the weight itself is used.
    """

    def __init__(self, site: Site, rule: Rule, *, outside: float = 1.0) -> None:
        super().__init__(site)
        self.rule = rule
        self.outside = outside
        self.active = torch.ones_like(site.rows, dtype=torch.bool, requires_grad=False)
        self.threshold = torch.zeros((), device=site.rows.device)
        self.final_threshold = torch.zeros((), device=site.rows.device)
        self.dense = True

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the effective weight at the current threshold."""
        if self.dense:
            return weight
        return straight_through(
            weight, self.active, self.threshold, self.rule, self._passed_gradient
        )

    def final_weight(self, weight: Tensor) -> Tensor:
        """Return the effective weight at the threshold of the final budget."""
        return straight_through(
            weight, self.mask, self.final_threshold, self.rule, self._passed_gradient
        )

    def set_active(self, active: Tensor, threshold: float, *, dense: bool) -> None:
        """Compute with these weights in training until the next call."""
        if active is not self.active:
            self.active.copy_(active)
        self.threshold.fill_(threshold)
        self.dense = dense

    def _passed_gradient(self, grad: Tensor, active: Tensor) -> Tensor:
        return scaled_outside(grad, active, self.outside)


def number_at(masker: Masker, progress: float, ramp: tuple[float, float]) -> int:
    """Return the number of weights kept at this progress, which falls cubically along the ramp."""
    begin, end = ramp
    kept = kept_fraction(progress, masker.keep / masker.size, begin=begin, end=end)
    return round(kept * masker.size)


def train_largest(
    masker: Masker,
    masked: Sequence[ThresholdedWeight],
    keep: int,
    forecast: ThresholdForecast,
    scales: Sequence[float] | None = None,
) -> None:
    """Compute with the ``keep`` largest weights in training until the next call.

    ``forecast`` predicts the threshold from those of earlier calls, which saves time. ``scales``
    multiply the magnitudes of each site before they are compared.
    """
    into = [each.active for each in masked]
    masks, threshold = _largest(masker, keep, scales, into=into, near=forecast.next)
    forecast.record(threshold)
    thresholds = _divided(threshold, scales, len(masked))
    for each, active, threshold in zip(masked, masks, thresholds, strict=True):
        each.set_active(active, threshold, dense=keep == masker.size)


def choose_largest(
    masker: Masker,
    masked: Sequence[ThresholdedWeight],
    scales: Sequence[float] | None = None,
) -> list[Tensor]:
    """Return the largest weights of the final budget; set the thresholds of the evaluation."""
    masks, threshold = _largest(masker, masker.keep, scales)
    thresholds = _divided(threshold, scales, len(masked))
    for each, threshold in zip(masked, thresholds, strict=True):
        each.final_threshold.fill_(threshold)
    return masks


def _largest(
    masker: Masker,
    keep: int,
    scales: Sequence[float] | None,
    *,
    into: Sequence[Tensor] | None = None,
    near: float = 0.0,
) -> tuple[list[Tensor], float]:
    """Return the masks of the largest weights, and the threshold of the scaled magnitudes.

    The masks may be those of ``into``, overwritten. ``near`` predicts the threshold.
    """
    return cut_by_magnitude(
        masker.weights,
        scales or (1.0,) * len(masker.weights),
        keep,
        masker.names,
        into=into,
        near=near,
        shards=masker.shards,
    )


def _divided(threshold: float, scales: Sequence[float] | None, count: int) -> list[float]:
    """Return the threshold of each site's own magnitudes."""
    return [threshold / scale for scale in scales or (1.0,) * count]


def clip_gradient(masker: Masker, optimizers: WeightOptimizers, norm: float | None) -> None:
    """Clip the joint gradient of all trained parameters, unless the sparsity is 0."""
    if norm is not None and masker.keep < masker.size:
        clip_joint_norm_(optimizers.parameters, norm, masker.shards)
