"""Spartan: a soft top-k mask from regularized transport, sharpened during training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from probmask.checks import Range, TrainingFraction
from probmask.core.selection import select_top
from probmask.core.shards import WHOLE, Shards
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site

# The search for the dual stops at |Σ m - K| / K below this; the masks are then rounded to fp32.
_TOLERANCE = 1e-10
_MAX_STEPS = 200

Sharpness = Annotated[float, Range(1e-6, 1e9, "a sharpness")]


@dataclass(frozen=True, kw_only=True)
class Spartan(Method):
    """Multiply all weights by a soft top-k mask, and compute with the K largest of them.

        m = σ(β |w| - ν),  ν such that Σ m = K over all layers
        w_e = w m for the K largest |w|, else 0

    The gradient ignores the cut and follows the mask: with g the gradient of w_e,

        dL/dw = g m + β m (1 - m) (g w - c) sign(w),  c = Σ g w m (1 - m) / (K - Σ m²)

    From ``freeze_at`` on the mask is fixed with its soft values: dL/dw = g m for kept weights and 0
    for the others.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        ramp_end: Fraction of the training at which K, which falls linearly, reaches the budget.
        freeze_at: Fraction of the training at which the mask is fixed.
        sharpness_start: The sharpness β at the start.
        sharpness_end: β at ``freeze_at``; it rises linearly.
    """

    name: ClassVar[str] = "spartan"
    summary: ClassVar[str] = "a soft top-k mask that sharpens, then stays"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2022
    reference: ClassVar[str] = (
        "K. S. Tai, T.-P. Tian and S. N. Lim, Spartan: Differentiable Sparsity via Regularized "
        "Transportation, NeurIPS 2022"
    )

    ramp_end: TrainingFraction = 0.2
    freeze_at: TrainingFraction = 0.8
    sharpness_start: Sharpness = 1.0
    sharpness_end: Sharpness = 10.0

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "SpartanMasker":
        """Start dense."""
        return SpartanMasker(self, sites)


def soft_top(
    values: Sequence[Tensor], keep: int, sharpness: float, shards: Shards = WHOLE
) -> list[Tensor]:
    """m = σ(β v - ν) with ν such that Σ m = K over all tensors.

    This is argmax of Σ m·v + H(m)/β subject to Σ m = K and 0 ≤ m ≤ 1, where H is the entropy of m
    and 1 - m: the regularized transport problem of Spartan (NeurIPS 2022, section 3), whose
    Sinkhorn iteration has this fixed point. ν is found by safeguarded Newton steps in fp64.

    Args:
        values: the tensors v.
        keep: K, from 1 to the number of entries.
        sharpness: β > 0; for β → ∞ the mask becomes the exact top-k.
        shards: the division of the tensors, if ``values`` are the shards of this rank.

    Returns:
        One fp32 tensor m per tensor of values.

    Example:
        >>> (m,) = soft_top([torch.tensor([1.0, 2.0, 4.0])], 1, sharpness=2.0)
        >>> round(float(m.sum()), 6)
        1.0
    """
    here = torch.tensor([sum(value.numel() for value in values)])
    size = int(shards.total(here))
    if keep == size:
        return [torch.ones_like(value, dtype=torch.float32) for value in values]
    logits = [sharpness * value.double() for value in values]
    dual = _dual(logits, keep, size, shards)
    return [torch.sigmoid(logit - dual).float() for logit in logits]


def _dual(logits: Sequence[Tensor], keep: int, size: int, shards: Shards) -> float:
    """Return ν; it lies between its values for all entries at the minimum and at the maximum."""
    offset = math.log(keep / (size - keep))
    nonempty = [logit for logit in logits if logit.numel()]
    least = min((float(logit.amin()) for logit in nonempty), default=math.inf)
    most = max((float(logit.amax()) for logit in nonempty), default=-math.inf)
    ends = shards.gathered(torch.tensor([least, -most], dtype=torch.float64)).amin(0)
    low, high = float(ends[0]) - offset, -float(ends[1]) - offset
    dual = (low + high) / 2
    for _ in range(_MAX_STEPS):
        total, slope = _sum_and_slope(nonempty, dual, shards)
        excess = total - keep
        if abs(excess) <= _TOLERANCE * keep or high <= low:
            break
        low, high = (dual, high) if excess > 0 else (low, dual)
        proposal = dual + excess / slope if slope > 0 else math.inf
        dual = proposal if low < proposal < high else (low + high) / 2
    return dual


def _sum_and_slope(logits: Sequence[Tensor], dual: float, shards: Shards) -> tuple[float, float]:
    """Return Σ m and -dΣm/dν = Σ m (1 - m)."""
    masks = [torch.sigmoid(logit - dual) for logit in logits]
    total = sum(float(mask.sum()) for mask in masks)
    slope = sum(float((mask * (1 - mask)).sum()) for mask in masks)
    total, slope = shards.total(torch.tensor([total, slope], dtype=torch.float64)).tolist()
    return total, slope


class SpartanWeight(MaskedWeight):
    """One site: its soft mask and its largest weights, for training and for evaluation."""

    saved = ("soft", "active")

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.soft = torch.ones_like(site.rows, dtype=torch.float32, requires_grad=False)
        self.active = torch.ones_like(site.rows, dtype=torch.bool, requires_grad=False)
        self.final_soft = self.soft.clone()
        self.sharpness = 0.0  # 0 once the mask is fixed
        self.dense = True  # while nothing is pruned

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return w m for the largest weights."""
        if self.dense:
            return weight
        masked: Tensor = _SoftMasked.apply(  # type: ignore[no-untyped-call]
            weight, self.soft, self.active, self.sharpness
        )
        return masked

    def final_weight(self, weight: Tensor) -> Tensor:
        """Return w m, with the mask of the final budget."""
        return weight * self.final_soft.to(weight.dtype)


class _SoftMasked(torch.autograd.Function):
    """w m where active. The gradient has only the term of this layer: g m (1 + β(1-m)|w|).

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
    """Masker of Spartan."""

    saved = ("fixed", "_sharpness")
    masked: tuple[SpartanWeight, ...]

    def __init__(self, method: Spartan, sites: Sequence[Site]) -> None:
        super().__init__(sites, [SpartanWeight(site) for site in sites], method.keep_of(sites))
        self.method = method
        self.fixed = False
        self._kept = self.size
        self._sharpness = method.sharpness_start

    def before_forward(self, now: Progress, draw: int) -> None:
        """Compute the current mask, until it is fixed."""
        if self.frozen:
            return
        if not self.fixed:
            self._compute_masks(now)
        self._kept = self.keep if self.fixed else self._keep_at(now)
        for masked in self.masked:
            masked.sharpness = 0.0 if self.fixed else self._sharpness
            masked.dense = self._kept == self.size

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Add the term of the gradient that comes through ν: - β m (1 - m) c sign(w).

        The gradients so far are A = g m (1 + β(1-m)|w|), averaged over the ranks. Therefore
        g w m (1 - m) = A w (1 - m) / (1 + β(1-m)|w|).
        """
        if self.frozen or self.fixed or self._kept == self.size:
            return
        pairs = [
            (masked, weight)
            for masked, weight in zip(self.masked, self.weights, strict=True)
            if weight.grad is not None
        ]
        squares = sum(_sum(masked.soft.double().square()) for masked in self.masked)
        shift = sum(
            _sum(_through_mask(weight, masked, self._sharpness)) for masked, weight in pairs
        )
        sums = torch.tensor([squares, shift], dtype=torch.float64)
        squares, shift = self.shards.total(sums).tolist()
        spread = self._kept - squares
        if spread <= 0:  # a mask of zeros and ones does not move
            return
        for masked, weight in pairs:
            assert weight.grad is not None
            slope = self._sharpness * masked.soft * (1 - masked.soft) * weight.sign()
            weight.grad.sub_((slope * (shift / spread)).to(weight.grad.dtype))

    def choose(self) -> list[Tensor]:
        """Return the largest weights of the final budget; set the soft mask of the evaluation."""
        if self.fixed:
            softs = [masked.soft for masked in self.masked]
            actives = [masked.active.clone() for masked in self.masked]
        else:
            softs, actives = self._select(self.keep)
        for masked, soft in zip(self.masked, softs, strict=True):
            masked.final_soft.copy_(soft)
        return actives

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity, and the sharpness of the mask."""
        kept = self.keep if self.frozen else self._kept
        return {"expected_sparsity": 1 - kept / self.size, "sharpness": self._sharpness}

    def _compute_masks(self, now: Progress) -> None:
        self.fixed = now.fraction >= self.method.freeze_at
        self._sharpness = self._sharpness_at(now)
        keep = self.keep if self.fixed else self._keep_at(now)
        for masked, soft, active in zip(self.masked, *self._select(keep), strict=True):
            masked.soft.copy_(soft)
            masked.active.copy_(active)
            masked.invalidate()

    def _select(self, keep: int) -> tuple[list[Tensor], list[Tensor]]:
        magnitudes = [weight.detach().abs() for weight in self.weights]
        soft = soft_top(magnitudes, keep, self._sharpness, self.shards)
        return soft, select_top(magnitudes, keep, names=self.names, shards=self.shards)

    def _keep_at(self, now: Progress) -> int:
        end = self.method.ramp_end
        done = 1.0 if now.fraction >= end else now.fraction / end
        return self.size - round(done * (self.size - self.keep))

    def _sharpness_at(self, now: Progress) -> float:
        start, end = self.method.sharpness_start, self.method.sharpness_end
        until = self.method.freeze_at
        return end if now.fraction >= until else start + (end - start) * now.fraction / until


def _through_mask(weight: Tensor, masked: SpartanWeight, sharpness: float) -> Tensor:
    """g w m (1 - m), from the gradient that `_SoftMasked` returned."""
    assert weight.grad is not None
    relative = _relative_slope(weight, masked.soft, sharpness)
    return weight.grad.double() * weight * (1 - masked.soft) / relative


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))
