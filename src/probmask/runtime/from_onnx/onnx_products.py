"""Operators of ONNX that multiply matrices."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import Operator, is_array, optional_tensor, tensor


def _gemm(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    a, b = tensor(inputs[0]), tensor(inputs[1])
    c = optional_tensor(inputs, 2)
    alpha, beta = op.attributes.get("alpha", 1.0), op.attributes.get("beta", 1.0)
    a = a.t() if op.attributes.get("transA", 0) else a
    weight = b if op.attributes.get("transB", 0) else b.t()
    if alpha == 1.0 and beta == 1.0 and (c is None or c.dim() == 1):
        return functional.linear(a, weight, c)
    product = functional.linear(a, weight) * alpha
    return product if c is None else product + beta * c


def _matmul(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    return torch.matmul(tensor(inputs[0]), tensor(inputs[1]))


def _linear_layer(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    """Return a product with a constant matrix, plus a constant vector if there is one."""
    x, weight, *bias = map(tensor, inputs)
    return functional.linear(x, weight.t(), *bias)


def _scaled_matmul(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    """Return the product of two tensors that are each scaled by a number, or not.

    The numbers multiply the product, as in the attention that lowering looks for.
    """
    first, second = map(tensor, inputs[:2])
    scales = [value for value in inputs[2:] if value is not None]
    if all(is_array(value) and value.size == 1 for value in scales):
        return torch.matmul(first, second) * math.prod(value.item() for value in scales)
    first, second = (
        x if scale is None else x * tensor(scale)
        for x, scale in zip((first, second), inputs[2:], strict=True)
    )
    return torch.matmul(first, second)


PRODUCTS: dict[str, Operator] = {
    "Gemm": _gemm,
    "LinearLayer": _linear_layer,
    "MatMul": _matmul,
    "ScaledMatMul": _scaled_matmul,
}
