"""Operators of ONNX that compute each element on its own."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import (
    Operator,
    is_array,
    numbers,
    optional,
    tensor,
)


def _unary(
    function: Callable[[Tensor], Any], of_array: Callable[..., Any] | None = None
) -> Operator:
    """Return an operator of one tensor, or of an array if there is a function for it."""

    def apply(_: Operation, inputs: Sequence[Any], __: int) -> Any:
        value = inputs[0]
        if of_array is not None and is_array(value):
            return of_array(value)
        return function(tensor(value))

    return apply


def _binary(
    function: Callable[[Any, Any], Any], of_arrays: Callable[[Any, Any], Any] | None = None
) -> Operator:
    """Return an operator of two tensors or two arrays.

    A constant number next to a tensor becomes a Python number.
    """

    def apply(_: Operation, inputs: Sequence[Any], __: int) -> Any:
        if all(map(is_array, inputs)):
            return (of_arrays or function)(*inputs)
        return function(*map(_operand, inputs))

    return apply


def _operand(value: Any) -> Any:
    if is_array(value) and value.size == 1 and value.ndim <= 1 and value.dtype.kind in "fiO":
        return value.item()
    return tensor(value)


def _variadic(of_tensors: Callable[..., Tensor], of_arrays: Callable[..., Any]) -> Operator:
    def apply(_: Operation, inputs: Sequence[Any], __: int) -> Any:
        on_arrays = all(map(is_array, inputs))
        function = of_arrays if on_arrays else of_tensors
        total = inputs[0] if on_arrays else tensor(inputs[0])
        for value in inputs[1:]:
            total = function(total, value if on_arrays else tensor(value))
        return total

    return apply


def _mean(op: Operation, inputs: Sequence[Any], opset: int) -> Any:
    return _variadic(torch.add, np.add)(op, inputs, opset) / len(inputs)


def _divide(first: Any, second: Any) -> Any:
    """Divide; integers are rounded towards zero."""
    operands = [first, second]
    if any(isinstance(value, Tensor) for value in operands):
        kinds = [
            v.is_floating_point() if isinstance(v, Tensor) else type(v) is float for v in operands
        ]
        return first / second if any(kinds) else torch.div(first, second, rounding_mode="trunc")
    if any(value.dtype == object for value in operands):  # sizes are not negative
        return first // second
    if first.dtype.kind not in "iu":
        return first / second
    return (np.sign(first) * np.sign(second) * (abs(first) // abs(second))).astype(first.dtype)


def _modulo(op: Operation, inputs: Sequence[Any], opset: int) -> Any:
    """Return the remainder, with the sign of the divisor, or with fmod that of the dividend."""
    if op.attributes.get("fmod", 0):
        return _binary(torch.fmod, np.fmod)(op, inputs, opset)
    return _binary(torch.remainder, operator.mod)(op, inputs, opset)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, Tensor) or isinstance(exponent, Tensor):
        return torch.pow(base, exponent)
    return (base**exponent).astype(base.dtype)


def _cast(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    from onnx import helper

    value, dtype = inputs[0], helper.tensor_dtype_to_np_dtype(op.attributes["to"])
    if not is_array(value):
        return value.to(tensor(np.zeros(1, dtype)).dtype)
    if value.dtype == object:
        return _of_sizes(torch.sym_float if dtype.kind == "f" else torch.sym_int, value)
    return value.astype(dtype)


def _of_sizes(function: Callable[..., Any], sizes: Any) -> Any:
    """Return a function of each element of an array of sizes."""
    made: Any = np.empty(sizes.shape, object)
    for place, size in np.ndenumerate(sizes):
        made[place] = function(size)
    return made


def _rounded(
    of_tensor: Callable[[Tensor], Tensor], of_array: Callable[..., Any], of_size: Any
) -> Operator:
    """Return an operator that rounds, also numbers that depend on sizes."""

    def apply(_: Operation, inputs: Sequence[Any], __: int) -> Any:
        value = inputs[0]
        if not is_array(value):
            return of_tensor(value)
        if value.dtype != object:
            return of_array(value)
        return _of_sizes(torch.sym_float, _of_sizes(of_size, value))

    return apply


def _where(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    if all(map(is_array, inputs)):
        return np.where(*inputs)
    return torch.where(*map(tensor, inputs))


def _clip(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    bounds: list[float] = []
    for index, key, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        given = optional(inputs, index)
        if given is None:
            bounds.append(float(op.attributes.get(key, default)))
        else:
            bounds.append(float(numbers(given, key, op)[0]))
    low, high = bounds
    if is_array(inputs[0]):
        return np.clip(inputs[0], low, high).astype(inputs[0].dtype)
    x = tensor(inputs[0])
    if low == 0 and high == math.inf:
        return functional.relu(x)
    return functional.hardtanh(x, low, high) if low < high else x.clamp(low, high)


def _gelu(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    return functional.gelu(tensor(inputs[0]), approximate=op.attributes.get("approximate", "none"))


def _leaky_relu(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    return functional.leaky_relu(tensor(inputs[0]), op.attributes.get("alpha", 0.01))


def _elu(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    return functional.elu(tensor(inputs[0]), op.attributes.get("alpha", 1.0))


def _hard_sigmoid(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    alpha, beta = op.attributes.get("alpha", 0.2), op.attributes.get("beta", 0.5)
    x = tensor(inputs[0])
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return functional.hardsigmoid(x)
    return (alpha * x + beta).clamp(0, 1)


def _prelu(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    x, slope = map(tensor, inputs)
    return torch.where(x < 0, slope * x, x)


def _identity(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    return inputs[0]


ARITHMETIC: dict[str, Operator] = {
    "Abs": _unary(torch.abs, abs),
    "Add": _binary(operator.add),
    "And": _binary(torch.logical_and, np.logical_and),
    "Cast": _cast,
    "Ceil": _rounded(torch.ceil, np.ceil, math.ceil),
    "Clip": _clip,
    "Cos": _unary(torch.cos),
    "Div": _binary(_divide),
    "Dropout": _identity,
    "Elu": _elu,
    "Equal": _binary(operator.eq),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp, np.exp),
    "Floor": _rounded(torch.floor, np.floor, math.floor),
    "Gelu": _gelu,
    "Greater": _binary(operator.gt),
    "GreaterOrEqual": _binary(operator.ge),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary(functional.hardswish),
    "Identity": _identity,
    "IsNaN": _unary(torch.isnan),
    "LeakyRelu": _leaky_relu,
    "Less": _binary(operator.lt),
    "LessOrEqual": _binary(operator.le),
    "Log": _unary(torch.log, np.log),
    "Max": _variadic(torch.maximum, np.maximum),
    "Mean": _mean,
    "Min": _variadic(torch.minimum, np.minimum),
    "Mish": _unary(functional.mish),
    "Mod": _modulo,
    "Mul": _binary(operator.mul),
    "Neg": _unary(torch.neg, operator.neg),
    "Not": _unary(torch.logical_not, np.logical_not),
    "Or": _binary(torch.logical_or, np.logical_or),
    "PRelu": _prelu,
    "Pow": _binary(_power),
    "Reciprocal": _unary(torch.reciprocal, np.reciprocal),
    "ReciprocalRoot": _unary(torch.rsqrt),
    "Relu": _unary(functional.relu),
    "Round": _unary(torch.round),
    "Sigmoid": _unary(torch.sigmoid),
    "Sin": _unary(torch.sin),
    "Softplus": _unary(functional.softplus),
    "Sqrt": _unary(torch.sqrt, np.sqrt),
    "Sub": _binary(operator.sub),
    "Sum": _variadic(torch.add, np.add),
    "Tanh": _unary(torch.tanh),
    "Where": _where,
}
