"""Spartan: a soft top-k mask from regularised transport, sharpened as training goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from probmask.checks import check_within
from probmask.core.selection import select_top, soft_top
from probmask.masking.budgets import checked_keep
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Context, Masker, Method, Progress
from probmask.masking.sites import Site


@dataclass(frozen=True, kw_only=True)
class Spartan(Method):
    """Weigh all weights by a soft top-k mask, and compute with the K largest of them.

    m = σ(β |w| - ν), ν such that Σ m = K over all layers; w_e = w m for the K largest |w|, else 0.
    The gradient ignores the cut and follows the mask: with g that of w_e,

        dL/dw = g m + β m (1 - m) (g w - c) sign(w),  c = Σ g w m (1 - m) / (K - Σ m²).

    K falls linearly until ``ramp_end`` of the training; β rises linearly from ``sharpness_start``
    to ``sharpness_end`` until ``freeze_at``. From there on the mask is fixed with its soft values,
    dL/dw = g m for weights that stay and 0 for the others.
    """

    name: ClassVar[str] = "spartan"
    summary: ClassVar[str] = "a soft top-k mask that sharpens, then stays"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2022
    reference: ClassVar[str] = (
        "K. S. Tai, T.-P. Tian and S. N. Lim, Spartan: Differentiable Sparsity via Regularized "
        "Transportation, NeurIPS 2022"
    )

    ramp_end: float = 0.2
    freeze_at: float = 0.8
    sharpness_start: float = 1.0
    sharpness_end: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ramp_end", "freeze_at"):
            value = getattr(self, name)
            check_within("Spartan", name, value, 0, 1, meaning="a part of the training")
        for name in ("sharpness_start", "sharpness_end"):
            value = getattr(self, name)
            check_within("Spartan", name, value, 1e-6, 1e9, meaning="a sharpness")

    def begin(self, sites: Sequence[Site], context: Context) -> "SpartanMasker":
        """Start dense."""
        return SpartanMasker(self, sites)


class SpartanWeight(MaskedWeight):
    """One site: its soft mask and the largest weights, for training and for evaluation."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.soft = torch.ones_like(site.weight, dtype=torch.float32, requires_grad=False)
        self.active = torch.ones_like(site.weight, dtype=torch.bool, requires_grad=False)
        self.settled_soft = self.soft.clone()
        self.sharpness = 0.0  # 0 while the mask does not follow the weights
        self.whole = self.settled_whole = True

    def training_weight(self, weight: Tensor) -> Tensor:
        """w m for the largest weights."""
        if self.whole:
            return weight
        masked: Tensor = _SoftMasked.apply(  # type: ignore[no-untyped-call]
            weight, self.soft, self.active, self.sharpness
        )
        return masked

    def settled_weight(self, weight: Tensor) -> Tensor:
        """w m, with the mask of the final budget."""
        return weight if self.settled_whole else weight * self.settled_soft.to(weight.dtype)


class _SoftMasked(torch.autograd.Function):
    """w m where active; the part of the gradient that needs no other layer: g m (1 + β(1-m)|w|).

    With sharpness 0 the mask is fixed: g m where active.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, soft: Tensor, active: Tensor, sharpness: float) -> Tensor:
        ctx.save_for_backward(weight, soft, active)
        ctx.sharpness = sharpness
        return torch.where(active, weight * soft.to(weight.dtype), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weight, soft, active = ctx.saved_tensors
        if ctx.sharpness == 0:
            slope = torch.where(active, soft, 0.0)
        else:
            slope = soft * _relative_slope(weight, soft, ctx.sharpness)
        return grad * slope.to(grad.dtype), None, None, None


def _relative_slope(weight: Tensor, soft: Tensor, sharpness: float) -> Tensor:
    """d(w m)/dw / m at fixed ν: 1 + β (1 - m) |w|."""
    return 1 + sharpness * (1 - soft) * weight.abs()


class SpartanMasker(Masker):
    """Spartan at work on one model."""

    masks: tuple[SpartanWeight, ...]

    def __init__(self, method: Spartan, sites: Sequence[Site]) -> None:
        super().__init__(sites, [SpartanWeight(site) for site in sites])
        self.method = method
        self.size = sum(site.size for site in sites)
        self.keep = checked_keep(method, sites)
        self.fixed = False
        self._kept = self.size
        self._sharpness = method.sharpness_start
        if self.keep == self.size:
            self.freeze()  # there is nothing to remove

    def before_forward(self, now: Progress, draw: int) -> None:
        """Solve for the mask of this moment, until it is fixed."""
        if self.frozen or self.fixed:
            return
        self.fixed = now.fraction >= self.method.freeze_at
        self._kept = self.keep if self.fixed else self._budget(now)
        self._sharpness = self._schedule_sharpness(now)
        for mask, soft, active in zip(self.masks, *self._select(self._kept), strict=True):
            mask.soft.copy_(soft)
            mask.active.copy_(active)
            mask.sharpness = 0.0 if self.fixed else self._sharpness
            mask.whole = self._kept == self.size
            mask.outdate()

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Add the part of the gradient that comes through ν: - β m (1 - m) c sign(w).

        The gradients so far are A = g m (1 + β(1-m)|w|), averaged over the ranks: from them follows
        g w m (1 - m) = A w (1 - m) / (1 + β(1-m)|w|).
        """
        if self.frozen or self.fixed or self._kept == self.size:
            return
        pairs = [
            (mask, weight)
            for mask, weight in zip(self.masks, self.weights, strict=True)
            if weight.grad is not None
        ]
        spread = self._kept - sum(_sum(mask.soft.double().square()) for mask in self.masks)
        if spread <= 0:  # a mask of zeros and ones: it does not move
            return
        shift = sum(_sum(_through_mask(weight, mask, self._sharpness)) for mask, weight in pairs)
        for mask, weight in pairs:
            assert weight.grad is not None
            slope = self._sharpness * mask.soft * (1 - mask.soft) * weight.sign()
            weight.grad.sub_((slope * (shift / spread)).to(weight.grad.dtype))

    def choose(self) -> list[Tensor]:
        """The largest weights of the final budget, with the soft mask that belongs to them."""
        if self.fixed:
            softs, actives = [m.soft for m in self.masks], [m.active.clone() for m in self.masks]
        else:
            softs, actives = self._select(self.keep)
        for mask, soft in zip(self.masks, softs, strict=True):
            mask.settled_soft.copy_(soft)
            mask.settled_whole = self.keep == self.size
        return actives

    def metrics(self) -> dict[str, float]:
        """How sparse the network is at the moment, and how sharp the mask."""
        kept = self.keep if self.frozen else self._kept
        return {"expected_sparsity": 1 - kept / self.size, "sharpness": self._sharpness}

    def state_dict(self) -> dict[str, Any]:
        """The masks once they are fixed, soft values too; before, they follow from the weights."""
        fixed = [{"soft": m.soft.clone(), "active": m.active.clone()} for m in self.masks]
        return {
            **super().state_dict(),
            "fixed": fixed if self.fixed else None,
            "sharpness": self._sharpness,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self._sharpness = state["sharpness"]
        self.fixed = state["fixed"] is not None
        if not self.fixed:
            return
        self._kept = self.keep
        for mask, saved in zip(self.masks, state["fixed"], strict=True):
            mask.soft.copy_(saved["soft"])
            mask.active.copy_(saved["active"])
            mask.sharpness, mask.whole = 0.0, False
            mask.outdate()

    def _select(self, keep: int) -> tuple[list[Tensor], list[Tensor]]:
        magnitudes = [weight.detach().abs() for weight in self.weights]
        soft = soft_top(magnitudes, keep, self._sharpness)
        return soft, select_top(magnitudes, keep, names=self.names)

    def _budget(self, now: Progress) -> int:
        end = self.method.ramp_end
        done = 1.0 if now.fraction >= end else now.fraction / end
        return self.size - round(done * (self.size - self.keep))

    def _schedule_sharpness(self, now: Progress) -> float:
        start, end = self.method.sharpness_start, self.method.sharpness_end
        until = self.method.freeze_at
        return end if now.fraction >= until else start + (end - start) * now.fraction / until


def _through_mask(weight: Tensor, mask: SpartanWeight, sharpness: float) -> Tensor:
    """g w m (1 - m), from the gradient that `_SoftMasked` gave."""
    assert weight.grad is not None
    relative = _relative_slope(weight, mask.soft, sharpness)
    return weight.grad.double() * weight * (1 - mask.soft) / relative


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))
