"""Storing weights in half the bytes, and saying what that changes."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from probmask.checks import is_number
from probmask.errors import InputError

Model = TypeVar("Model", bound=nn.Module)

_LARGEST = torch.finfo(torch.float16).max
_TINIEST = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps


def round_to_fp16(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return `tensors` with wide weights rounded to fp16, and how far they moved.

    Weights are what has two dimensions or more; biases and BatchNorm's numbers, few and of any
    magnitude, stay exact. `max_error` is the largest |rounded - weight|, `relative_error` is
    |rounded - weight| / |weight| with Euclidean norms over all weights together.
    """
    rounded = dict(tensors)
    largest = error_squares = weight_squares = 0.0
    for name, tensor in tensors.items():
        if tensor.dtype in (torch.float32, torch.float64) and tensor.dim() >= 2 and tensor.numel():
            weight = tensor.detach()
            rounded[name] = _to_fp16(name, weight)
            error = (rounded[name].to(weight.dtype) - weight).nan_to_num_(0.0)
            largest = max(largest, float(error.abs().max()))
            error_squares += _squares(error)
            weight_squares += _squares(weight.nan_to_num(0.0, 0.0, 0.0))
    relative = math.sqrt(error_squares / weight_squares) if weight_squares else 0.0
    return rounded, {"values": "fp16", "max_error": largest, "relative_error": relative}


def _to_fp16(name: str, weight: Tensor) -> Tensor:
    """Return the nearest fp16 numbers, except that what is not zero does not become zero.

    So the number of weights that are kept stays what it is.
    """
    half = weight.to(torch.float16)
    beyond = half.isinf() & weight.isfinite()
    if beyond.any():
        raise InputError(
            f"save(values='fp16'): {name} holds {float(weight[beyond][0]):g}, and fp16 ends at "
            f"{_LARGEST:g}; save without values=, or rescale the layer"
        )
    tiny = torch.full_like(half, _TINIEST).copysign_(half)
    return torch.where((half == 0) & (weight != 0), tiny, half)


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def measure_change(
    model: Model, measure: Callable[[Model], float], rounded: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return what `measure` makes of the model and of a copy with the rounded weights."""
    twin = copy.deepcopy(model)
    twin.load_state_dict(dict(rounded), strict=False)
    results = {"before": measure(model), "after": measure(twin)}
    for result in results.values():
        if not is_number(result):
            raise InputError(
                f"save(measure=...): returned {result!r:.80}; expected a finite number, "
                "such as an accuracy"
            )
    return results
