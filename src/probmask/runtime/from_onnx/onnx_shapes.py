"""Operators of ONNX that return shapes, or an input in another shape or order."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import Operator, axes_of, is_array, numbers, tensor


def _shape(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    sizes = list(inputs[0].shape)
    return sizes[op.attributes.get("start", 0) : op.attributes.get("end", len(sizes))]


def _size(_: Operation, inputs: Sequence[Any], __: int) -> Any:
    return math.prod(inputs[0].shape)


def _reshape(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    given = inputs[1] if len(inputs) > 1 else np.array(op.attributes["shape"])
    return _reshaped(inputs[0], given, op)


def _reshaped(x: Any, given: Any, op: Operation) -> Any:
    shape = numbers(given, "shape", op)
    if not op.attributes.get("allowzero", 0):
        shape = [x.shape[i] if _is(size, 0) else size for i, size in enumerate(shape)]
    return x.reshape(_without_minus_one(shape, x))


def _without_minus_one(shape: list[Any], x: Any) -> list[Any]:
    """Return a shape with the size of x for -1, if all its other sizes are in the shape.

    PyTorch would name the size by a formula, and not see that it is the batch size.
    """
    own = list(x.shape)
    open_sizes = [size for size in own if not isinstance(size, int)]
    others = [size for size in shape if not _is(size, -1)]
    if len(open_sizes) != 1 or len(others) != len(shape) - 1:
        return shape
    fixed = math.prod(size for size in own if isinstance(size, int))
    if not all(isinstance(size, int) for size in others) or not math.prod(others):
        return shape
    factor, rest = divmod(fixed, math.prod(others))
    if rest or not factor:
        return shape
    found = open_sizes[0] if factor == 1 else factor * open_sizes[0]
    return [found if _is(size, -1) else size for size in shape]


def _is(size: Any, number: int) -> bool:
    """Return whether a size is this number, without a condition on sizes that may vary."""
    return isinstance(size, int) and size == number


def _flatten(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x = tensor(inputs[0])
    axis = op.attributes.get("axis", 1)
    axis = axis % x.dim() if axis != x.dim() else axis
    if axis == 1:
        return x.flatten(1) if x.dim() > 1 else x[:, None]
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _squeeze(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, axes = inputs[0], axes_of(op, inputs)
    if is_array(x):
        return np.squeeze(x, None if axes is None else tuple(axes))
    return x.squeeze() if axes is None else x.squeeze(axes)


def _unsqueeze(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, axes = inputs[0], axes_of(op, inputs) or []
    if is_array(x):
        return np.expand_dims(x, tuple(axes))
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _transpose(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x = inputs[0]
    order = op.attributes.get("perm", list(range(x.ndim))[::-1])
    if is_array(x):
        return np.transpose(x, order)
    moved = [i for i, dim in enumerate(order) if i != dim]
    if len(moved) == 2:
        return x.transpose(*moved)
    if op.attributes.get("swap_last"):  # as a key of an attention, which lowering looks for
        return x.permute([*order[:-2], order[-1], order[-2]]).transpose(-1, -2)
    return x.permute(order)


def _swapped(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    """Return x with its last two dimensions swapped and its others in another shape.

    PyTorch's exporter writes the keys of an attention so: with one dimension for the batch and the
    heads, after a reshape, or without it. Lowering looks for a swap at the end.
    """
    x, before, after = tensor(inputs[0]), inputs[1], numbers(inputs[2], "shape", op)
    flat = x if before is None else _reshaped(x, before, op)
    rows, columns = flat.shape[-2:]
    if list(after[-2:]) != [columns, rows]:
        return _reshaped(flat.transpose(-1, -2), inputs[2], op)
    pairs = zip(x.shape[:-2], after[:-2], strict=False)
    known = [a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int) and b > 0]
    if before is None or len(after) != x.dim() or not all(known):
        x = _reshaped(flat, np.array([*after[:-2], rows, columns], object), op)
    return x.transpose(-1, -2)


def _expand(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, shape = inputs[0], numbers(inputs[1], "shape", op)
    missing = len(shape) - x.ndim
    own = [1] * missing + list(x.shape) if missing > 0 else list(x.shape)
    shape = [1] * -missing + shape if missing < 0 else shape
    sizes = [n if _is(size, 1) else size for size, n in zip(shape, own, strict=True)]
    if is_array(x) and all(isinstance(size, int) for size in sizes):
        return np.broadcast_to(x, sizes)
    return tensor(x).expand(sizes)


def _tile(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, repeats = inputs[0], numbers(inputs[1], "repeats", op)
    if is_array(x) and all(isinstance(count, int) for count in repeats):
        return np.tile(x, repeats)
    return tensor(x).repeat(repeats)


def _triangle(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    """Return the upper or the lower triangle of matrices, and zeros elsewhere."""
    x, offset = inputs[0], 0
    if len(inputs) > 1 and inputs[1] is not None:
        offset = int(numbers(inputs[1], "diagonal", op)[0])
    upper = op.attributes.get("upper", 1)
    if is_array(x):
        return np.triu(x, offset) if upper else np.tril(x, offset)
    return x.triu(offset) if upper else x.tril(offset)


def _depth_to_space(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, block = tensor(inputs[0]), op.attributes["blocksize"]
    if op.attributes.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    moved = x.reshape(n, block, block, int(c) // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return moved.reshape(n, int(c) // block**2, h * block, w * block)


def _constant_of_shape(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    value = op.attributes.get("value", np.zeros(1, np.float32))
    shape = numbers(inputs[0], "shape", op)
    if all(isinstance(size, int) for size in shape):
        return np.full(shape, value.reshape(-1)[0], value.dtype)
    return torch.full(shape, value.item(), dtype=tensor(value).dtype)


def _range(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    bounds = [numbers(value, "bounds", op)[0] for value in inputs]
    if all(isinstance(bound, int) for bound in bounds):
        return np.arange(*bounds, dtype=inputs[0].dtype)
    made: Tensor = torch.arange(*bounds)
    return made


SHAPES: dict[str, Operator] = {
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Squeeze": _squeeze,
    "Swapped": _swapped,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _triangle,
    "Unsqueeze": _unsqueeze,
}
