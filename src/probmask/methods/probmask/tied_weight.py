"""One tied weight: the effective weight w s, its gradient, and its initial value."""

import torch
from torch import Tensor

from probmask.core.shrinkage import (
    Growth,
    bound_pruned_gradient,
    kept_part,
    power_grow,
    power_shrink,
)
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sharding import shards_of
from probmask.masking.sites import Site
from probmask.methods.families.thresholds import straight_through
from probmask.methods.probmask.initial_values import fade_, squared_norm

_MOST = 3.0  # bound on the gradients of pruned weights, in units of the RMS of kept weights


class TiedWeight(MaskedWeight):
    """One site: the effective weight w s, and the gradient that w receives.

    Thresholds and powers are tensors, so that a compiled graph does not depend on their values.
    """

    saved = ("active", "threshold", "power", "outside", "initial", "discounted", "discount")

    def __init__(self, site: Site, power: float, outside: float) -> None:
        super().__init__(site)
        device = site.rows.device
        self.active = torch.ones_like(site.rows, dtype=torch.bool, requires_grad=False)
        self.threshold = torch.zeros((), device=device)  # of the current budget, for training
        self.final_threshold = torch.zeros((), device=device)  # of the final one, for evaluation
        self.power = torch.full((), power, device=device)
        self.outside = torch.full((), outside, device=device)  # 0 after the final selection
        self.initial: Tensor | None = None  # the initial value, until it is forgotten
        self.discounted = False  # whether it is discounted; otherwise it fades out
        self.discount = torch.zeros((), device=device)  # c
        self._initial_square: Tensor | None = None
        self.shards = shards_of([site.weight])
        self.rms: float | None = None  # of the gradients of kept weights, if FSDP2 shards them

    def training_weight(self, weight: Tensor) -> Tensor:
        """w s at the current threshold."""
        return straight_through(
            weight, self.active, self.threshold, self._shrunk, self._bounded_gradient
        )

    def final_weight(self, weight: Tensor) -> Tensor:
        """w s at the threshold of the final budget."""
        return straight_through(
            weight, self.mask, self.final_threshold, self._shrunk, self._bounded_gradient
        )

    @property
    def growth(self) -> Growth | None:
        """The growth that takes the place of w if the initial value is discounted."""
        if not self.discounted or self.initial is None:
            return None
        return Growth(self.initial, self.discount, self.power)

    def grown(self, weight: Tensor) -> Tensor:
        """Return the growth of the weight, or w if the initial value is not discounted."""
        growth = self.growth
        return weight if growth is None else growth(weight)

    def _shrunk(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        growth = self.growth
        if growth is None:
            return power_shrink(weight, active, threshold, self.power)
        return growth.shrink(weight, active, threshold)

    def _bounded_gradient(self, grad: Tensor, active: Tensor) -> Tensor:
        """Return the gradient, bounded for pruned weights by the RMS of the kept ones.

        In a channel without weights BatchNorm divides by a standard deviation of zero, and an
        unbounded gradient would lift all of its pruned weights beyond the threshold at once. The
        bound is applied here, so that a training loop that clips gradients sees it applied.
        """
        return bound_pruned_gradient(grad, active, self.outside, most=_MOST, rms=self.rms)

    def prob(self, weight: Tensor, *, final: bool = False) -> Tensor:
        """Return s at the current threshold, or at that of the final budget."""
        kept = self.mask if final else self.active
        threshold = self.final_threshold if final else self.threshold
        weight = weight.detach().float()
        grown = self.grown(weight)
        part = kept_part(grown, threshold, self.power)
        if grown is not weight:
            part = part * (grown / weight).nan_to_num(0.0)
        return torch.where(kept, part, 0.0)

    def set_active(self, active: Tensor, threshold: float) -> None:
        """Compute with these weights in training until the next call."""
        if active is not self.active:
            self.active.copy_(active)
        self.threshold.fill_(threshold)

    def set_initial(self, initial: Tensor | None, *, discounted: bool = False) -> None:
        """Set the initial value to fade out or to discount, or None once it is forgotten."""
        self.initial, self._initial_square = initial, None
        self.discounted = discounted

    def fade_initial_(self, weight: Tensor, left: float) -> None:
        """Leave at most this fraction of the initial value in the weight."""
        if self.initial is not None:
            if self._initial_square is None:
                self._initial_square = squared_norm(self.initial, self.shards)
            fade_(weight, self.initial, self._initial_square, left, self.shards)
        if left == 0:
            self.set_initial(None)

    def fold_discount_(self, weight: Tensor) -> None:
        """w ← sign(w) (|w|^p - c |w₀|^p)^(1/p): the network's output does not change."""
        if self.discounted:
            weight.copy_(self.grown(weight))
            self.set_initial(None)

    def lower_threshold_(self, weight: Tensor, threshold: Tensor, least: float) -> None:
        """Lower θ, and shrink the kept weights so that w s stays the same.

        A kept weight below the threshold falls with it, but not below ``least``: a kept weight is
        never zero, or the network would keep fewer weights than requested. Pruned weights stay
        below the threshold, so that a copy with averaged weights (EMA) selects the same weights
        by their magnitudes.
        """
        if not self.trained:
            self.threshold.copy_(threshold)
            return
        kept = weight[self.active]  # few weights, whose powers are cheap
        wide = kept if kept.dtype == torch.float64 else kept.float()
        effective = power_shrink(wide, self.active[self.active], self.threshold, self.power)
        least = max(least, torch.finfo(weight.dtype).tiny)  # fp16 would round it to zero
        grown = power_grow(effective.abs(), threshold, self.power).clamp_min(least)
        weight.clamp_(-threshold, threshold)
        weight[self.active] = torch.where(wide < 0, -grown, grown).to(weight.dtype)
        self.threshold.copy_(threshold)
