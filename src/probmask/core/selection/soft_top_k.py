"""The soft top-k: a mask with values in [0, 1] and the sum K that follows the values smoothly."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# |Σ m - K| / K at which the search stops; the masks are rounded to fp32 afterwards.
_TOLERANCE = 1e-10
_MOST_STEPS = 200


def soft_top(values: Sequence[Tensor], keep: int, sharpness: float) -> list[Tensor]:
    """m = σ(β v - ν) with ν such that Σ m = K over all tensors, in fp32.

    The optimum of max Σ m·v + H(m)/β subject to Σ m = K, 0 ≤ m ≤ 1, H the entropy of m and 1 - m:
    the regularised transport problem of Spartan (NeurIPS 2022, section 3), whose Sinkhorn
    iteration has this fixed point. ν is found by safeguarded Newton steps in fp64.
    """
    size = sum(value.numel() for value in values)
    if keep == size:
        return [torch.ones_like(value, dtype=torch.float32) for value in values]
    logits = [sharpness * value.double() for value in values]
    dual = _dual(logits, keep, size)
    return [torch.sigmoid(logit - dual).float() for logit in logits]


def _dual(logits: Sequence[Tensor], keep: int, size: int) -> float:
    """ν between the values it would have if all entries were the least, or the largest one."""
    offset = math.log(keep / (size - keep))
    filled = [logit for logit in logits if logit.numel()]
    low = min(float(logit.amin()) for logit in filled) - offset
    high = max(float(logit.amax()) for logit in filled) - offset
    dual = (low + high) / 2
    for _ in range(_MOST_STEPS):
        total, slope = _sum_and_slope(filled, dual)
        excess = total - keep
        if abs(excess) <= _TOLERANCE * keep or high <= low:
            break
        low, high = (dual, high) if excess > 0 else (low, dual)
        proposal = dual + excess / slope if slope > 0 else math.inf
        dual = proposal if low < proposal < high else (low + high) / 2
    return dual


def _sum_and_slope(logits: Sequence[Tensor], dual: float) -> tuple[float, float]:
    """Σ m, and by how much it falls per unit of ν: Σ m (1 - m)."""
    masks = [torch.sigmoid(logit - dual) for logit in logits]
    total = sum(float(mask.sum()) for mask in masks)
    return total, sum(float((mask * (1 - mask)).sum()) for mask in masks)
