"""Weights that are kept while their magnitude exceeds a threshold, and trained on either side of it.

Pruned weights still receive the gradient of the effective weight, or a fraction of it, and return
when they have grown beyond the threshold. Nothing has to be saved for a resume: the masks are a
function of the weights and of the progress.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
GradientRule = Callable[[Tensor, Tensor], Tensor]

_EXTREME = 0.95


def usual_outside(sparsity: float) -> float:
    """Return the fraction of the gradient that pruned weights get: 0.5 above 95 % sparsity, else 1.

    This is Feather's rule (BMVC 2023): with so few kept weights, the many pruned ones would be kept
    and pruned again too easily.
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
