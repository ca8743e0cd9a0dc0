"""Feather: a threshold between soft and hard, with straight-through gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from probmask.checks import check_ramp, check_within
from probmask.core.shrinkage import power_shrink
from probmask.masking.budgets import checked_keep
from probmask.masking.protocol import Context, Method
from probmask.masking.sites import Site
from probmask.masking.thresholded import ThresholdedWeight, ThresholdMasker, usual_outside


@dataclass(frozen=True, kw_only=True)
class Feather(Method):
    """Threshold all weights at once, continuously and almost without shrinking the large ones.

    w_e = sign(w) (|w|³ - θ³)^⅓ where |w| > θ, else 0; dL/dw = g where |w| > θ, else ϑ g, g the
    gradient of w_e. θ, one for all layers, is the quantile of |w| at the sparsity of the moment,
    which rises cubically from ``ramp_begin`` to ``ramp_end`` of the training. ``outside`` is ϑ;
    None takes the paper's: 0.5 for a sparsity above 0.95, else 1. ``clip_norm`` is the paper's
    bound of the joint gradient; without it, channels that have lost all of their weights explode in
    short trainings.
    """

    name: ClassVar[str] = "feather"
    summary: ClassVar[str] = "a threshold between soft and hard, straight-through gradients"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2023
    reference: ClassVar[str] = (
        "A. Glentis Georgoulakis, G. Retsinas and P. Maragos, Feather: An Elegant Solution to "
        "Effective DNN Sparsification, BMVC 2023"
    )

    ramp_begin: float = 0.0
    ramp_end: float = 0.5
    outside: float | None = None
    clip_norm: float | None = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ramp(
            "Feather", ramp_begin=self.ramp_begin, ramp_end=self.ramp_end, meaning="sparsity rises"
        )
        if self.outside is not None:
            check_within("Feather", "outside", self.outside, 0, 1, meaning="a part of the gradient")
        if self.clip_norm is not None:
            check_within("Feather", "clip_norm", self.clip_norm, 1e-9, math.inf, meaning="a norm")

    def begin(self, sites: Sequence[Site], context: Context) -> ThresholdMasker:
        """Start dense."""
        outside = self.outside
        if outside is None:
            outside = usual_outside(self.sparsity)
        masks = [FeatherWeight(site, outside=outside) for site in sites]
        ramp = (self.ramp_begin, self.ramp_end)
        return ThresholdMasker(
            sites, masks, checked_keep(self, sites), ramp=ramp, clip_norm=self.clip_norm
        )


class FeatherWeight(ThresholdedWeight):
    """One site: sign(w) (|w|³ - θ³)^⅓ where active."""

    def __init__(self, site: Site, *, outside: float) -> None:
        super().__init__(site, outside=outside)
        self.power = torch.full((), 3.0, device=site.weight.device)

    def effective(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        """Shrink by the cubes."""
        return power_shrink(weight, active, threshold, self.power)
