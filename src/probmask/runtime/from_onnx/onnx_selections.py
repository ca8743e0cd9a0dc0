"""Operators of ONNX that take parts of their inputs, put them together, or pad them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import (
    Operator,
    axes_of,
    is_array,
    numbers,
    optional,
    tensor,
    unsupported,
)


def _concat(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    given = [value for value in inputs if value is not None]
    if all(map(is_array, given)):
        return np.concatenate(given, op.attributes["axis"])
    return torch.cat([tensor(value) for value in given], op.attributes["axis"])


def _split(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, axis = inputs[0], op.attributes.get("axis", 0)
    sizes = op.attributes.get("split")
    if optional(inputs, 1) is not None:
        sizes = numbers(inputs[1], "sizes", op)
    if sizes is None:
        count = op.attributes.get("num_outputs", len(op.outputs))
        length = -(-int(x.shape[axis]) // count)
        sizes = [min(length, int(x.shape[axis]) - i * length) for i in range(count)]
    if is_array(x):
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))
    return torch.split(x, sizes, axis)


def _slice(op: Operation, inputs: Sequence[Any], opset: int) -> Any:
    x = inputs[0]
    for axis, taken in _slices(op, inputs, opset):
        axis %= x.ndim
        if is_array(x) or taken.step > 0:
            x = x[(slice(None),) * axis + (taken,)]
        else:
            x = _backwards(x, axis, taken)
    return x


def _slices(op: Operation, inputs: Sequence[Any], opset: int) -> list[tuple[int, slice]]:
    """Return the axes, and the slice of each."""
    if opset >= 10:
        starts, ends = (numbers(inputs[i], "bounds", op) for i in (1, 2))
        axes = axes_of(op, inputs, 3)
        given = optional(inputs, 4)
        steps = [1] * len(starts) if given is None else numbers(given, "steps", op)
    else:
        starts, ends = op.attributes["starts"], op.attributes["ends"]
        axes, steps = op.attributes.get("axes"), [1] * len(starts)
    if any(not isinstance(step, int) or step == 0 for step in steps):
        raise unsupported(op, "steps that are computed from sizes, or zero")
    ends = [min(end, 2**62) if isinstance(end, int) else end for end in ends]
    axes = list(range(len(starts))) if axes is None else axes
    return list(zip(axes, map(slice, starts, ends, steps), strict=True))


def _backwards(x: Tensor, axis: int, taken: slice) -> Tensor:
    """Return a slice with a negative step, which PyTorch does not have."""
    size = int(x.shape[axis])
    places = range(size)[taken]
    if places == range(size)[::-1]:
        return x.flip(axis)
    return x.index_select(axis, torch.tensor(places))


def _gather(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    data, indices = inputs
    axis = op.attributes.get("axis", 0)
    if is_array(data) and is_array(indices):
        return np.take(data, indices.astype(np.int64), axis)
    x = tensor(data)
    axis %= x.dim()
    if is_array(indices):
        if indices.ndim == 0:
            return x.select(axis, int(indices))
        chosen = tensor(indices.astype(np.int64).reshape(-1))
        chosen = torch.where(chosen < 0, chosen + x.shape[axis], chosen)
        return _in_shape(x.index_select(axis, chosen), axis, indices.shape)
    if axis == 0 and x.dim() == 2:
        return functional.embedding(indices, x)
    return _in_shape(x.index_select(axis, indices.reshape(-1)), axis, indices.shape)


def _in_shape(taken: Tensor, axis: int, shape: Sequence[Any]) -> Tensor:
    """Return rows that were taken one after the other in the shape of their indices."""
    if len(shape) == 1:
        return taken
    return taken.reshape([*taken.shape[:axis], *shape, *taken.shape[axis + 1 :]])


def _pad(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, mode = tensor(inputs[0]), op.attributes.get("mode", "constant")
    given = optional(inputs, 1)
    pads = op.attributes.get("pads", []) if given is None else numbers(given, "pads", op)
    value = op.attributes.get("value", 0.0)
    if optional(inputs, 2) is not None:
        value = float(numbers(inputs[2], "value", op)[0])
    axes = axes_of(op, inputs, 3)
    axes = list(range(x.dim())) if axes is None else [axis % x.dim() for axis in axes]
    pairs = dict.fromkeys(range(x.dim()), (0, 0))
    pairs |= dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :], strict=True), strict=True))
    first = min((axis for axis, pair in pairs.items() if pair != (0, 0)), default=None)
    if first is None:
        return x
    flat = [size for axis in reversed(range(first, x.dim())) for size in pairs[axis]]
    if mode == "constant":
        return functional.pad(x, flat, value=value)
    modes = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    return functional.pad(x, flat, mode=modes[mode])


SELECTIONS: dict[str, Operator] = {
    "Concat": _concat,
    "Gather": _gather,
    "Pad": _pad,
    "Slice": _slice,
    "Split": _split,
}
