"""ST-3: soft thresholding with straight-through gradients and rescaled channels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from probmask.checks import Positive, TrainingFraction
from probmask.core.selection import ThresholdForecast
from probmask.core.shards import WHOLE, Shards
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sharding import shards_of
from probmask.masking.sites import Site
from probmask.methods.families.thresholds import (
    ThresholdedWeight,
    choose_largest,
    clip_gradient,
    number_at,
    train_largest,
)


@dataclass(frozen=True, kw_only=True)
class ST3(Method):
    """Shrink all weights by one threshold, and rescale each channel to compensate.

        w_e = c_o (w - sign(w) θ) where |w| > θ, else 0        dL/dw = g for every w
        c_o = 1.01 / (r_o + 0.01),  r_o = Σ |w| [|w| > θ] / Σ |w| over output channel o

    g is the gradient of w_e. θ is the quantile of |w| over all layers at the current sparsity,
    which rises cubically.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        ramp_begin: Fraction of the training at which the sparsity begins to rise.
        ramp_end: Fraction of the training at which it reaches ``sparsity``.
        freeze_at: Fraction of the training at which the masks become final: w_e replaces w, and
            only the kept weights are trained. None: the end.
        rescale: False sets c_o = 1.
        sigma: Compare |w| √(sum of the layer's dimensions) instead of |w|. This prunes more
            multiplications, at some cost in accuracy.
        clip_norm: Clip the joint gradient to this norm, by default the paper's.
    """

    name: ClassVar[str] = "st3"
    summary: ClassVar[str] = "soft threshold, straight-through gradients, rescaled channels"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2023
    reference: ClassVar[str] = (
        "A. Vanderschueren and C. De Vleeschouwer, Are Straight-Through gradients and "
        "Soft-Thresholding all you need for Sparse Training?, WACV 2023"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    ramp_begin: TrainingFraction = 0.03
    ramp_end: TrainingFraction = 0.47
    freeze_at: TrainingFraction | None = 0.94
    rescale: bool = True
    sigma: bool = False
    clip_norm: Positive | None = 3.0

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "ST3Masker":
        """Start dense."""
        return ST3Masker(self, sites)


def soft_shrink(weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
    """w - sign(w) θ where active, else 0."""
    shrunk = weight.sign() * (weight.abs() - threshold).clamp_min(0.0)
    return torch.where(active, shrunk, 0.0)


def rescaled_shrink(
    weight: Tensor, active: Tensor, threshold: Tensor, *, axis: int, shards: Shards = WHOLE
) -> Tensor:
    """c_o (w - sign(w) θ) where active, else 0; the channels o are along ``axis``.

    In a grouped transposed convolution, channels at the same position in their groups count as one.
    """
    size = weight.abs()
    whole, left = size, torch.where(active, size, 0.0)
    others = [dim for dim in range(size.dim()) if dim != axis]
    if 0 in others and shards.count > 1:  # the channels are not along the rows
        whole, left = _means_over_rows(whole, left, others, shards)
    elif others:
        whole, left = (part.mean(others, keepdim=True) for part in (whole, left))
    scale = 1.01 / ((left + 1e-6) / (whole + 1e-6) + 0.01)
    return soft_shrink(weight, active, threshold) * scale


def _means_over_rows(
    whole: Tensor, left: Tensor, others: list[int], shards: Shards
) -> tuple[Tensor, Tensor]:
    """Return the means over these dimensions, with the rows of all shards among them."""
    sums = [part.sum(others, keepdim=True, dtype=torch.float64) for part in (whole, left)]
    number = torch.full_like(sums[0], whole.numel() // sums[0].numel())
    found = shards.total(torch.stack([*sums, number]))
    return (found[0] / found[2]).to(whole.dtype), (found[1] / found[2]).to(left.dtype)


class ST3Masker(Masker):
    """Masker of ST-3."""

    masked: tuple[ThresholdedWeight, ...]

    def __init__(self, method: ST3, sites: Sequence[Site]) -> None:
        shards = shards_of([site.weight for site in sites])
        rules = [
            partial(rescaled_shrink, axis=site.output_axis, shards=shards)
            if method.rescale
            else soft_shrink
            for site in sites
        ]
        masked = [ThresholdedWeight(site, rule) for site, rule in zip(sites, rules, strict=True)]
        super().__init__(sites, masked, method.keep_of(sites))
        self.method = method
        self.scales = [math.sqrt(sum(site.shape)) for site in sites] if method.sigma else None
        self._kept = self.size
        self._forecast = ThresholdForecast()

    def before_forward(self, now: Progress, draw: int) -> None:
        """Set the current threshold; freeze from ``freeze_at`` on.

        No mask is frozen before the first update: ranks may not have the same weights yet, and a
        checkpoint may still be loaded.
        """
        if self.frozen:
            return
        freeze_at = self.method.freeze_at
        if freeze_at is not None and now.step > 0 and now.fraction >= freeze_at:
            self.freeze()
        else:
            ramp = (self.method.ramp_begin, self.method.ramp_end)
            self._kept = number_at(self, now.fraction, ramp)
            train_largest(self, self.masked, self._kept, self._forecast, self.scales)

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Clip the joint gradient."""
        clip_gradient(self, optimizers, self.method.clip_norm)

    def choose(self) -> list[Tensor]:
        """Return the largest weights of the final budget."""
        return choose_largest(self, self.masked, self.scales)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity."""
        return {"expected_sparsity": 1 - (self.keep if self.frozen else self._kept) / self.size}
