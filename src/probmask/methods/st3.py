"""ST-3: soft thresholding with straight-through gradients, and layers rescaled for what is lost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from probmask.checks import check_choice, check_ramp, check_within
from probmask.masking.budgets import checked_keep
from probmask.masking.protocol import Context, Method
from probmask.masking.sites import Site
from probmask.masking.thresholded import ThresholdedWeight, ThresholdMasker


@dataclass(frozen=True, kw_only=True)
class ST3(Method):
    """Shrink all weights by one threshold, and scale each channel up for what it has lost.

    w_e = c_o (w - sign(w) θ) where |w| > θ, else 0; dL/dw = g for every w, g the gradient of w_e.
    θ is the quantile of |w| over all layers at the sparsity of the moment, which rises cubically
    from ``ramp_begin`` to ``ramp_end`` of the training. c_o = 1.01 / (r_o + 0.01), r_o the part of
    the sum of |w| in output channel o that exceeds θ (``rescale=False``: c_o = 1). ``sigma``
    compares |w| √(sum of the layer's dimensions) instead, which costs fewer multiplications at
    some accuracy. From ``freeze_at`` on (None: never) the weights are w_e and only they train on.
    ``clip_norm`` is the paper's bound of the joint gradient.
    """

    name: ClassVar[str] = "st3"
    summary: ClassVar[str] = "soft threshold, straight-through gradients, rescaled channels"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2023
    reference: ClassVar[str] = (
        "A. Vanderschueren and C. De Vleeschouwer, Are Straight-Through gradients and "
        "Soft-Thresholding all you need for Sparse Training?, WACV 2023"
    )

    ramp_begin: float = 0.03
    ramp_end: float = 0.47
    freeze_at: float | None = 0.94
    rescale: bool = True
    sigma: bool = False
    clip_norm: float | None = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ramp(
            "ST3", ramp_begin=self.ramp_begin, ramp_end=self.ramp_end, meaning="sparsity rises"
        )
        if self.freeze_at is not None:
            check_within("ST3", "freeze_at", self.freeze_at, 0, 1, meaning="a part of the training")
        if self.clip_norm is not None:
            check_within("ST3", "clip_norm", self.clip_norm, 1e-9, math.inf, meaning="a norm")
        for name in ("rescale", "sigma"):
            check_choice("ST3", name, getattr(self, name), (True, False))

    def begin(self, sites: Sequence[Site], context: Context) -> ThresholdMasker:
        """Start dense."""
        return ThresholdMasker(
            sites,
            [ST3Weight(site, rescale=self.rescale) for site in sites],
            checked_keep(self, sites),
            ramp=(self.ramp_begin, self.ramp_end),
            freeze_at=self.freeze_at,
            scales=[math.sqrt(sum(site.shape)) for site in sites] if self.sigma else None,
            clip_norm=self.clip_norm,
        )


class ST3Weight(ThresholdedWeight):
    """One site: c_o (w - sign(w) θ) where active."""

    def __init__(self, site: Site, *, rescale: bool) -> None:
        super().__init__(site)
        self.rescale = rescale
        transposed = any(
            isinstance(module, nn.modules.conv._ConvTransposeNd) for module, _ in site.holders
        )
        # Of a grouped transposed convolution, the channels of the same place in their groups.
        self.channels = 1 if transposed else 0

    def effective(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        """Shrink towards zero, then scale up."""
        size = weight.abs()
        shrunk = weight.sign() * (size - threshold).clamp_min(0.0)
        if self.rescale:
            shrunk = shrunk * self._scale(size, active)
        return torch.where(active, shrunk, 0.0)

    def _scale(self, size: Tensor, active: Tensor) -> Tensor:
        """c_o, of a shape that multiplies the weight."""
        others = [dim for dim in range(size.dim()) if dim != self.channels]
        whole, left = size, torch.where(active, size, 0.0)
        if others:
            whole, left = (part.mean(others, keepdim=True) for part in (whole, left))
        return 1.01 / ((left + 1e-6) / (whole + 1e-6) + 0.01)
