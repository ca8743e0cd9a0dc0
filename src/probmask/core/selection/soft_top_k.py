"""Soft top-k: a mask with values in [0, 1] and sum K that is smooth in the values."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The search stops at |Σ m - K| / K below this; the masks are then rounded to fp32.
_TOLERANCE = 1e-10
_MAX_STEPS = 200


def soft_top(values: Sequence[Tensor], keep: int, sharpness: float) -> list[Tensor]:
    """m = σ(β v - ν) with ν such that Σ m = K over all tensors.

    This is argmax of Σ m·v + H(m)/β subject to Σ m = K and 0 ≤ m ≤ 1, where H is the entropy of m
    and 1 - m: the regularized transport problem of Spartan (NeurIPS 2022, section 3), whose
    Sinkhorn iteration has this fixed point. ν is found by safeguarded Newton steps in fp64.

    Args:
        values: the tensors v.
        keep: K, from 1 to the number of entries.
        sharpness: β > 0; for β → ∞ the mask becomes the exact top-k.

    Returns:
        One fp32 tensor m per tensor of values.

    Example:
        >>> (m,) = soft_top([torch.tensor([1.0, 2.0, 4.0])], 1, sharpness=2.0)
        >>> round(float(m.sum()), 6)
        1.0
    """
    size = sum(value.numel() for value in values)
    if keep == size:
        return [torch.ones_like(value, dtype=torch.float32) for value in values]
    logits = [sharpness * value.double() for value in values]
    dual = _dual(logits, keep, size)
    return [torch.sigmoid(logit - dual).float() for logit in logits]


def _dual(logits: Sequence[Tensor], keep: int, size: int) -> float:
    """Return ν; it lies between its values for all entries at the minimum and at the maximum."""
    offset = math.log(keep / (size - keep))
    nonempty = [logit for logit in logits if logit.numel()]
    low = min(float(logit.amin()) for logit in nonempty) - offset
    high = max(float(logit.amax()) for logit in nonempty) - offset
    dual = (low + high) / 2
    for _ in range(_MAX_STEPS):
        total, slope = _sum_and_slope(nonempty, dual)
        excess = total - keep
        if abs(excess) <= _TOLERANCE * keep or high <= low:
            break
        low, high = (dual, high) if excess > 0 else (low, dual)
        proposal = dual + excess / slope if slope > 0 else math.inf
        dual = proposal if low < proposal < high else (low + high) / 2
    return dual


def _sum_and_slope(logits: Sequence[Tensor], dual: float) -> tuple[float, float]:
    """Return Σ m and -dΣm/dν = Σ m (1 - m)."""
    masks = [torch.sigmoid(logit - dual) for logit in logits]
    total = sum(float(mask.sum()) for mask in masks)
    return total, sum(float((mask * (1 - mask)).sum()) for mask in masks)
