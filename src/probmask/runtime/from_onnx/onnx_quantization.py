"""Operators of ONNX on quantized numbers.

Of constants, they are evaluated when the file is read, so that layers have weights in fp32. Of
other values, they run in PyTorch, with the rounding and the saturation of ONNX.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import (
    Operator,
    is_array,
    optional,
    optional_tensor,
    tensor,
    unsupported,
)
from probmask.runtime.from_onnx.onnx_windows import convolution

# The least and the largest number of each quantized type.
_RANGES = {
    "int2": (-2, 1), "uint2": (0, 3), "int4": (-8, 7), "uint4": (0, 15),
    "int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535),
}  # fmt: skip
# Those that PyTorch has. Others are computed in 32 bits.
_DTYPES = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16}


def _dequantize(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    """Return (x - zero point) · scale."""
    x, scale = tensor(inputs[0]), tensor(inputs[1])
    zero = optional_tensor(inputs, 2)
    if x.is_floating_point():
        raise unsupported(op, "numbers of 8 bits with a fraction")
    whole = x.to(torch.int32)
    if zero is not None:
        whole = whole - _along(op, zero.to(torch.int32), x)
    return whole.to(scale.dtype) * _along(op, scale, x)


def _quantize(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    """Return x / scale, rounded half to even, plus the zero point, within the range of its type."""
    x, scale, zero = tensor(inputs[0]), tensor(inputs[1]), optional_tensor(inputs, 2)
    name = _quantized_type(op, inputs)
    if name not in _RANGES or op.attributes.get("precision", 0):
        raise unsupported(op, f"the type {name}" if name not in _RANGES else "a precision")
    low, high = _RANGES[name]
    rounded = torch.round(x / _along(op, scale, x))
    if zero is not None:
        rounded = rounded + _along(op, zero.to(rounded.dtype), x)
    return rounded.clamp(low, high).to(_DTYPES.get(name, torch.int32))


def _quantized_type(op: Operation, inputs: Sequence[Any]) -> str:
    """Return the name of the type of the result: that of the zero point, or an attribute."""
    zero = optional(inputs, 2)
    if is_array(zero):
        return str(zero.dtype.name)
    if isinstance(zero, Tensor):
        return str(zero.dtype).removeprefix("torch.")
    from onnx import helper

    code = op.attributes.get("output_dtype", 0)
    return str(helper.tensor_dtype_to_np_dtype(code).name) if code else "uint8"


def _along(op: Operation, given: Tensor, x: Tensor) -> Tensor:
    """Return the scales or zero points of all elements, of an axis, or of blocks along it."""
    if given.numel() == 1 and given.dim() <= 1:
        return given.reshape(())
    axis, block = op.attributes.get("axis", 1) % x.dim(), op.attributes.get("block_size", 0)
    if block:
        return given.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return given.reshape([-1 if i == axis else 1 for i in range(x.dim())])


def _quantize_by_range(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    """Return x as uint8 numbers, their scale and zero point, which depend on the range of x."""
    x = tensor(inputs[0])
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round(-low / scale).clamp(0, 255)
    quantized = (torch.round(x / scale) + zero).clamp(0, 255)
    return quantized.to(torch.uint8), scale, zero.to(torch.uint8)


def _integer_product(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    """Return the product of two integer matrices."""
    first, second = _without_zero_point(inputs, 0, (-1, 1)), _without_zero_point(inputs, 1, (1, -1))
    return torch.matmul(first, second).to(torch.int32)


def _integer_convolution(op: Operation, inputs: Sequence[Any], opset: int) -> Any:
    """Return the convolution of an integer image; its padding is zero."""
    x = _without_zero_point(inputs, 0, ())
    weight = _without_zero_point(inputs, 1, (-1, *[1] * (x.dim() - 1)))
    return convolution(op, (x, weight), opset).to(torch.int32)


def _without_zero_point(inputs: Sequence[Any], index: int, shape: Sequence[int]) -> Tensor:
    """Return integers minus their zero points, as doubles, whose products are exact."""
    x, zero = tensor(inputs[index]).double(), optional_tensor(inputs, index + 2)
    if zero is None:
        return x
    return x - (zero if zero.numel() == 1 else zero.reshape(shape)).double()


QUANTIZATION: dict[str, Operator] = {
    "ConvInteger": _integer_convolution,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _quantize_by_range,
    "MatMulInteger": _integer_product,
    "QuantizeLinear": _quantize,
}
