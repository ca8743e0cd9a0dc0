"""Operators of ONNX that reduce dimensions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import Operator, axes_of, is_array, tensor


def _reduce(function: Callable[..., Tensor], of_array: Callable[..., Any]) -> Operator:
    def apply(op: Operation, inputs: Sequence[Any], _: int) -> Any:
        x, axes, keep = inputs[0], axes_of(op, inputs), bool(op.attributes.get("keepdims", 1))
        if not axes:
            if op.attributes.get("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.ndim))
        if is_array(x):
            return np.asarray(of_array(x, axis=tuple(axes), keepdims=keep), x.dtype)
        return function(x, axes, keepdim=keep)

    return apply


def _product(x: Tensor, axes: list[int], *, keepdim: bool) -> Tensor:
    """Return the product over several axes; PyTorch takes one at a time."""
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keepdim)
    return x


def _argmax(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    keep = bool(op.attributes.get("keepdims", 1))
    return tensor(inputs[0]).argmax(op.attributes.get("axis", 0), keepdim=keep)


def _global_average(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    x = tensor(inputs[0])
    return x.mean(list(range(2, x.dim())), keepdim=True)


def _global_max(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    x = tensor(inputs[0])
    return x.amax(list(range(2, x.dim())), keepdim=True)


REDUCTIONS: dict[str, Operator] = {
    "ArgMax": _argmax,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "ReduceMax": _reduce(torch.amax, np.max),
    "ReduceMean": _reduce(torch.mean, np.mean),
    "ReduceMin": _reduce(torch.amin, np.min),
    "ReduceProd": _reduce(_product, np.prod),
    "ReduceSum": _reduce(torch.sum, np.sum),
}
