"""Rounding the weights of a network before they are saved, and the errors that it causes."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from probmask.core.integer_grid import narrow, quantized
from probmask.errors import InputError
from probmask.storage.integers import INTEGERS

# The ways in which `save` rounds weights.
ROUNDINGS = ("fp16", *reversed(INTEGERS))

_FP16_MAX = torch.finfo(torch.float16).max
_FP16_TINY = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps


def may_be_rounded(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight to be rounded: fp32 or fp64, two dimensions or more."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    return wide and tensor.dim() >= 2 and tensor.numel() > 0


def round_tensors(
    tensors: Mapping[str, Tensor], values: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return `tensors` with rounded weights, and the rounding errors.

    For integers, weights keep their dtype, and other tensors become fp16 if `narrow` allows it. For
    fp16, other tensors stay exact.

    `max_error` is the largest |rounded - weight|. `relative_error` is |rounded - weight| /
    |weight|, with Euclidean norms over all weights.
    """
    rounded = dict(tensors)
    largest = error_squares = weight_squares = 0.0
    for name, tensor in tensors.items():
        if may_be_rounded(tensor):
            weight = tensor.detach()
            if values in INTEGERS:
                rounded[name] = quantized(weight, INTEGERS[values])
            else:
                rounded[name] = _to_fp16(name, weight)
            error = (rounded[name].to(weight) - weight).nan_to_num_(0.0)
            largest = max(largest, float(error.abs().max()))
            error_squares += _squares(error)
            weight_squares += _squares(weight.nan_to_num(0.0, 0.0, 0.0))
        elif values in INTEGERS:
            rounded[name] = narrow(tensor.detach())
    relative = math.sqrt(error_squares / weight_squares) if weight_squares else 0.0
    return rounded, {"values": values, "max_error": largest, "relative_error": relative}


def _to_fp16(name: str, weight: Tensor) -> Tensor:
    """Round to the nearest fp16 number, but never a non-zero weight to zero.

    The number of kept weights therefore stays the same.
    """
    half = weight.to(torch.float16)
    overflow = half.isinf() & weight.isfinite()
    if overflow.any():
        raise InputError(
            f"save(values='fp16'): {name} contains {float(weight[overflow][0]):g}, and the largest "
            f"fp16 number is {_FP16_MAX:g}; save without values=, or rescale the layer."
        )
    tiny = torch.full_like(half, _FP16_TINY).copysign_(half)
    return torch.where((half == 0) & (weight != 0), tiny, half)


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
