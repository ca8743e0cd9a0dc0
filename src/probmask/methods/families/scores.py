"""Scores: each weight has a trained score, and the weights with the highest scores are kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probmask.core.allocation import Spread
from probmask.masking.masker import Masker
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.families.stored import (
    count_active,
    select_by,
)


class ScoredWeight(MaskedWeight):
    """One site: w_e = w m, dL/dw = g m and dL/ds = g w, g the gradient of w_e.

    Only weights with m = 1 are trained, but all scores are. Scores start at 0 and are fp32 for
    weights of any dtype.
    """

    saved = ("active",)

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.score = nn.Parameter(torch.zeros_like(site.rows, dtype=torch.float32))
        self.active = torch.ones_like(site.rows, dtype=torch.bool, requires_grad=False)

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the active weights."""
        masked: Tensor = _Scored.apply(weight, self.score, self.active)  # type: ignore[no-untyped-call]
        return masked

    def set_active(self, active: Tensor) -> None:
        """Make these the active weights."""
        self.active.copy_(active)
        self.invalidate()


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, score: Tensor, active: Tensor) -> Tensor:
        ctx.save_for_backward(weight, active)
        ctx.score_dtype = score.dtype
        return torch.where(active, weight, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, active = ctx.saved_tensors
        return torch.where(active, grad, 0.0), (grad * weight).to(ctx.score_dtype), None


def highest_scores(
    masker: Masker, masked: Sequence[ScoredWeight], keep: int, spread: Spread
) -> list[Tensor]:
    """Return masks of the ``keep`` highest scores; equal scores are decided by magnitude."""
    ties = [weight.detach().abs() for weight in masker.weights]
    scores = [each.score for each in masked]
    return select_by(masker, scores, spread, keep=keep, ties=ties)


def set_active_scores(masked: Sequence[ScoredWeight], active: Sequence[Tensor]) -> None:
    """Make these the active weights of all sites."""
    for each, chosen in zip(masked, active, strict=True):
        each.set_active(chosen)


def score_metrics(masker: Masker, masked: Sequence[ScoredWeight]) -> dict[str, float]:
    """Return the metric ``expected_sparsity``."""
    kept = masker.keep if masker.frozen else count_active(masker, masked)
    return {"expected_sparsity": 1 - kept / masker.size}
