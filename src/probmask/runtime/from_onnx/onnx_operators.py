"""The operators of ONNX as functions of PyTorch.

A value is a tensor, an array (a constant of the file), or a list or a number of sizes: what `Shape`
returns, and what is computed from it. Sizes stay numbers of Python, so that `torch.export` can keep
the batch size open.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from probmask.errors import InputError
from probmask.runtime.from_onnx.onnx_file import Operation

# Takes the operation, its inputs (None for a missing one) and the version of the operators.
Operator = Callable[[Operation, list[Any], int], Any]


def tensor(value: Any) -> Tensor:
    """Return a value as a tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
    return torch.tensor(value)


def is_sizes(value: Any) -> bool:
    """Return whether a value is sizes: a list, or a number."""
    return isinstance(value, list | int | torch.SymInt)


def numbers(value: Any, what: str, op: Operation) -> list[Any]:
    """Return sizes or a constant array as a list. Raise if the value is computed by the network."""
    if isinstance(value, list):
        return value
    if isinstance(value, np.ndarray):
        return list(value.reshape(-1).tolist())
    if isinstance(value, int | float | torch.SymInt):
        return [value]
    raise InputError(
        f"runtime.compile: the ONNX operator {op.kind} ({op.name}) computes its {what} from the "
        "inputs of the network; only constants and sizes are supported."
    )


def unsupported(op: Operation, form: str) -> InputError:
    """Return the error for an operator in a form without a counterpart."""
    return InputError(
        f"runtime.compile: the ONNX operator {op.kind} ({op.name}) has {form}, which is not "
        "supported."
    )


def _unary(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda _, inputs, __: function(tensor(inputs[0]))


def _binary(function: Callable[[Any, Any], Any]) -> Operator:
    """Return an operator of two tensors, or of sizes or constants that sizes are computed from.

    A constant number next to a tensor becomes a Python number.
    """

    def apply(_: Operation, inputs: list[Any], __: int) -> Any:
        first, second = inputs
        on_tensors = isinstance(first, Tensor) or isinstance(second, Tensor)
        if not on_tensors and (is_sizes(first) or is_sizes(second)):
            return _of_sizes(function, first, second)
        if not on_tensors and all(value.dtype.kind == "i" for value in inputs):
            return np.asarray(function(first, second))
        return function(_operand(first), _operand(second))

    return apply


def _operand(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fi":
        return value.item() if value.ndim <= 1 else tensor(value)
    return tensor(value) if isinstance(value, np.ndarray) else value


def _of_sizes(function: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    lists = [_as_list(value) for value in (first, second)]
    length = max(len(items) for items in lists)
    a, b = (items * length if len(items) == 1 else items for items in lists)
    made = [function(x, y) for x, y in zip(a, b, strict=True)]
    return made if any(_has_axis(value) for value in (first, second)) else made[0]


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return list(value.reshape(-1).tolist())
    return value if isinstance(value, list) else [value]


def _has_axis(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _divide(first: Any, second: Any) -> Any:
    is_integer = not isinstance(first, Tensor) or not first.is_floating_point()
    if is_integer and isinstance(first, Tensor):
        return torch.div(first, second, rounding_mode="trunc")
    return (
        first / second
        if isinstance(first, Tensor) or isinstance(second, Tensor)
        else (first // second)
    )


def _axes(op: Operation, inputs: list[Any], index: int = 1) -> list[int] | None:
    """Return the axes, which older versions have as an attribute."""
    if len(inputs) > index and inputs[index] is not None:
        return [int(axis) for axis in numbers(inputs[index], "axes", op)]
    return op.attributes.get("axes")


def _pads(op: Operation, x: Tensor, kernel: Sequence[int]) -> list[tuple[int, int]]:
    """Return the padding of each spatial dimension, before and after."""
    rank = len(kernel)
    mode = op.attributes.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        pads = op.attributes.get("pads", [0] * 2 * rank)
        return list(zip(pads[:rank], pads[rank:], strict=True))
    if mode == "VALID":
        return [(0, 0)] * rank
    strides, dilations = _spatial(op, "strides", rank), _spatial(op, "dilations", rank)
    made = []
    for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max(0, (-(-int(size) // s) - 1) * s + d * (k - 1) + 1 - int(size))
        small, large = total // 2, total - total // 2
        made.append((small, large) if mode == "SAME_UPPER" else (large, small))
    return made


def _spatial(op: Operation, name: str, rank: int) -> list[int]:
    return list(op.attributes.get(name, [1] * rank))


def _padded(
    x: Tensor, pads: list[tuple[int, int]], value: float, largest: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Return x and the padding that PyTorch's operation can add itself; the rest is added here."""
    fits = all(a == b and a <= most for (a, b), most in zip(pads, largest, strict=True))
    if fits:
        return x, [before for before, _ in pads]
    flat = [size for pair in reversed(pads) for size in pair]
    return functional.pad(x, flat, value=value), [0] * len(pads)


def _convolution(op: Operation, inputs: list[Any], _: int) -> Any:
    x, weight = tensor(inputs[0]), tensor(inputs[1])
    bias = tensor(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else None
    kernel = list(weight.shape[2:])
    convolve = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}.get(len(kernel))
    if convolve is None:
        raise unsupported(op, f"{len(kernel)} dimensions")
    x, padding = _padded(x, _pads(op, x, kernel), 0.0, [math.inf] * len(kernel))  # type: ignore[list-item]
    strides, dilations = (_spatial(op, key, len(kernel)) for key in ("strides", "dilations"))
    return convolve(x, weight, bias, strides, padding, dilations, op.attributes.get("group", 1))


def _transposed_convolution(op: Operation, inputs: list[Any], _: int) -> Any:
    x, weight = tensor(inputs[0]), tensor(inputs[1])
    bias = tensor(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else None
    rank = weight.dim() - 2
    convolve = {
        1: functional.conv_transpose1d,
        2: functional.conv_transpose2d,
        3: functional.conv_transpose3d,
    }.get(rank)
    pads = op.attributes.get("pads", [0] * 2 * rank)
    plain = op.attributes.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    if convolve is None or not plain or "output_shape" in op.attributes:
        raise unsupported(op, "auto_pad, output_shape or another rank")
    if pads[:rank] != pads[rank:]:
        raise unsupported(op, "padding that differs before and after")
    strides, dilations = (_spatial(op, key, rank) for key in ("strides", "dilations"))
    extra = list(op.attributes.get("output_padding", [0] * rank))
    groups = op.attributes.get("group", 1)
    return convolve(x, weight, bias, strides, pads[:rank], extra, groups, dilations)


def _pool(is_max: bool) -> Operator:
    def apply(op: Operation, inputs: list[Any], _: int) -> Any:
        x, kernel = tensor(inputs[0]), list(op.attributes["kernel_shape"])
        rank = len(kernel)
        if rank not in (1, 2) or len(op.outputs) > 1:
            raise unsupported(op, "indices or another rank")
        strides, dilations = (_spatial(op, key, rank) for key in ("strides", "dilations"))
        pads, ceil = _pads(op, x, kernel), bool(op.attributes.get("ceil_mode", 0))
        halves = [size // 2 for size in kernel]
        if is_max:
            x, padding = _padded(x, pads, -math.inf, halves)
            pool = functional.max_pool1d if rank == 1 else functional.max_pool2d
            return pool(x, kernel, strides, padding, dilations, ceil)
        counts = bool(op.attributes.get("count_include_pad", 0))
        known = all(a == b <= half for (a, b), half in zip(pads, halves, strict=True))
        if not (known or counts) or any(size != 1 for size in dilations):
            raise unsupported(op, "padding that differs before and after, or dilation")
        x, padding = _padded(x, pads, 0.0, halves)
        average = functional.avg_pool1d if rank == 1 else functional.avg_pool2d
        return average(x, kernel, strides, padding, ceil, counts)

    return apply


def _global_average(_: Operation, inputs: list[Any], __: int) -> Any:
    x = tensor(inputs[0])
    return x.mean(list(range(2, x.dim())), keepdim=True)


def _global_max(_: Operation, inputs: list[Any], __: int) -> Any:
    x = tensor(inputs[0])
    return x.amax(list(range(2, x.dim())), keepdim=True)


def _batch_normalization(op: Operation, inputs: list[Any], _: int) -> Any:
    x, scale, bias, mean, variance = map(tensor, inputs)
    if op.attributes.get("training_mode", 0):
        raise unsupported(op, "training_mode")
    epsilon = op.attributes.get("epsilon", 1e-5)
    return functional.batch_norm(x, mean, variance, scale, bias, training=False, eps=epsilon)


def _layer_normalization(op: Operation, inputs: list[Any], _: int) -> Any:
    x, scale = tensor(inputs[0]), tensor(inputs[1])
    bias = tensor(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else None
    axis = op.attributes.get("axis", -1) % x.dim()
    shape = [int(size) for size in x.shape[axis:]]
    epsilon = op.attributes.get("epsilon", 1e-5)
    return functional.layer_norm(x, shape, scale.reshape(shape), bias, epsilon)


def _rms_normalization(op: Operation, inputs: list[Any], _: int) -> Any:
    x, scale = tensor(inputs[0]), tensor(inputs[1])
    axis = op.attributes.get("axis", -1) % x.dim()
    shape = [int(size) for size in x.shape[axis:]]
    return functional.rms_norm(x, shape, scale, op.attributes.get("epsilon", 1e-5))


def _instance_normalization(op: Operation, inputs: list[Any], _: int) -> Any:
    x, scale, bias = map(tensor, inputs)
    epsilon = op.attributes.get("epsilon", 1e-5)
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def _group_normalization(op: Operation, inputs: list[Any], _: int) -> Any:
    x, scale, bias = map(tensor, inputs)
    groups, channels = op.attributes["num_groups"], x.shape[1]
    if len(scale) != channels:  # one number per group, up to version 20
        repeats = int(channels) // groups
        scale, bias = scale.repeat_interleave(repeats), bias.repeat_interleave(repeats)
    return functional.group_norm(x, groups, scale, bias, op.attributes.get("epsilon", 1e-5))


def _gemm(op: Operation, inputs: list[Any], _: int) -> Any:
    a, b = tensor(inputs[0]), tensor(inputs[1])
    c = tensor(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else None
    alpha, beta = op.attributes.get("alpha", 1.0), op.attributes.get("beta", 1.0)
    a = a.t() if op.attributes.get("transA", 0) else a
    weight = b if op.attributes.get("transB", 0) else b.t()
    if alpha == 1.0 and beta == 1.0 and (c is None or c.dim() == 1):
        return functional.linear(a, weight, c)
    product = functional.linear(a, weight) * alpha
    return product if c is None else product + beta * c


def _matmul(_: Operation, inputs: list[Any], __: int) -> Any:
    return torch.matmul(tensor(inputs[0]), tensor(inputs[1]))


def _linear_layer(_: Operation, inputs: list[Any], __: int) -> Any:
    """Return a product with a constant matrix, plus a constant vector if there is one."""
    x, weight, *bias = map(tensor, inputs)
    return functional.linear(x, weight.t(), *bias)


def _scaled_matmul(op: Operation, inputs: list[Any], _: int) -> Any:
    """Return the product of two tensors, times a number."""
    return torch.matmul(tensor(inputs[0]), tensor(inputs[1])) * op.attributes["scale"]


def _swapped(op: Operation, inputs: list[Any], _: int) -> Any:
    """Return x with its last two dimensions swapped, from a reshape, a swap and a reshape.

    PyTorch's exporter writes the keys of an attention so.
    """
    x, between, after = tensor(inputs[0]), inputs[1], numbers(inputs[2], "shape", op)
    inner = numbers(between, "shape", op)
    rows, columns = x.shape[-2:]
    same_last = list(inner[-2:]) == [rows, columns] and list(after[-2:]) == [columns, rows]
    pairs = zip(x.shape[:-2], after[:-2], strict=False)
    known = [a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int) and b > 0]
    if len(after) == x.dim() and same_last and all(known):
        return x.transpose(-1, -2)
    return x.reshape(inner).transpose(-1, -2).reshape(after)


def _clip(op: Operation, inputs: list[Any], _: int) -> Any:
    bounds: list[float] = []
    for index, key, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        given = inputs[index] if len(inputs) > index else None
        if given is None:
            bounds.append(float(op.attributes.get(key, default)))
        else:
            bounds.append(float(numbers(given, key, op)[0]))
    x, (low, high) = tensor(inputs[0]), bounds
    if low == 0 and high == math.inf:
        return functional.relu(x)
    return functional.hardtanh(x, low, high) if low < high else x.clamp(low, high)


def _softmax(function: Callable[..., Tensor]) -> Operator:
    def apply(op: Operation, inputs: list[Any], opset: int) -> Any:
        x = tensor(inputs[0])
        axis = op.attributes.get("axis", -1 if opset >= 13 else 1) % max(1, x.dim())
        if opset >= 13 or axis == x.dim() - 1:
            return function(x, axis)
        return function(x.flatten(axis), axis).reshape(x.shape)

    return apply


def _reduce(function: Callable[..., Tensor], of_sizes: Any = None) -> Operator:
    def apply(op: Operation, inputs: list[Any], _: int) -> Any:
        axes, keep = _axes(op, inputs), bool(op.attributes.get("keepdims", 1))
        if isinstance(inputs[0], list) and of_sizes is not None:
            total = of_sizes(inputs[0])
            return [total] if keep else total
        x = tensor(inputs[0])
        if axes is None or not axes:
            if op.attributes.get("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.dim()))
        return function(x, axes, keepdim=keep)

    return apply


def _reshape(op: Operation, inputs: list[Any], _: int) -> Any:
    given = inputs[1] if len(inputs) > 1 else np.array(op.attributes["shape"])
    shape = numbers(given, "shape", op)
    if is_sizes(inputs[0]):  # sizes as a list, or one size without an axis
        flat = _as_list(inputs[0])
        return flat if shape else flat[0]
    x = tensor(inputs[0])
    if not op.attributes.get("allowzero", 0):
        shape = [x.shape[i] if _is_zero(size) else size for i, size in enumerate(shape)]
    return x.reshape(_with_batch(shape, x))


def _with_batch(shape: list[Any], x: Tensor) -> list[Any]:
    """Return a shape with the batch size of x for -1, if the other sizes are those of x.

    PyTorch would name the size by a formula, and not see that it is the batch size.
    """
    if x.dim() < 1 or not shape or not isinstance(shape[0], int) or shape[0] != -1:
        return shape
    own, others = list(x.shape[1:]), shape[1:]
    fixed = all(isinstance(size, int) for size in (*own, *others))
    return [x.shape[0], *others] if fixed and math.prod(own) == math.prod(others) else shape


def _is_zero(size: Any) -> bool:
    return isinstance(size, int) and size == 0


def _flatten(op: Operation, inputs: list[Any], _: int) -> Any:
    x = tensor(inputs[0])
    axis = op.attributes.get("axis", 1)
    axis = axis % x.dim() if axis != x.dim() else axis
    if axis == 1:
        return x.flatten(1) if x.dim() > 1 else x[:, None]
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _transpose(op: Operation, inputs: list[Any], _: int) -> Any:
    x = tensor(inputs[0])
    order = op.attributes.get("perm", list(range(x.dim()))[::-1])
    moved = [i for i, dim in enumerate(order) if i != dim]
    if len(moved) == 2:
        return x.transpose(*moved)
    if op.attributes.get("swap_last"):  # as a key of an attention, which lowering looks for
        return x.permute([*order[:-2], order[-1], order[-2]]).transpose(-1, -2)
    return x.permute(order)


def _concat(op: Operation, inputs: list[Any], _: int) -> Any:
    given = [value for value in inputs if value is not None]
    if any(is_sizes(value) for value in given):
        return [item for value in given for item in numbers(value, "sizes", op)]
    if all(isinstance(value, np.ndarray) for value in given):
        return np.concatenate(given, op.attributes["axis"])
    return torch.cat([tensor(value) for value in given], op.attributes["axis"])


def _split(op: Operation, inputs: list[Any], _: int) -> Any:
    x, axis = tensor(inputs[0]), op.attributes.get("axis", 0)
    sizes = op.attributes.get("split")
    if len(inputs) > 1 and inputs[1] is not None:
        sizes = numbers(inputs[1], "sizes", op)
    count = op.attributes.get("num_outputs", len(op.outputs))
    if sizes is None:
        return torch.split(x, -(-int(x.shape[axis]) // count), axis)
    return torch.split(x, sizes, axis)


def _slice(op: Operation, inputs: list[Any], opset: int) -> Any:
    x = inputs[0]
    if opset >= 10:
        starts, ends = (numbers(inputs[i], "bounds", op) for i in (1, 2))
        axes = _axes(op, inputs, 3)
        given = inputs[4] if len(inputs) > 4 else None
        steps = [1] * len(starts) if given is None else numbers(given, "steps", op)
    else:
        starts, ends = op.attributes["starts"], op.attributes["ends"]
        axes, steps = op.attributes.get("axes"), [1] * len(starts)
    if any(not isinstance(step, int) or step == 0 for step in steps):
        raise unsupported(op, "steps that are computed from sizes, or zero")
    axes = list(range(len(starts))) if axes is None else axes
    if is_sizes(x) or isinstance(x, np.ndarray):
        taken: Any = x if isinstance(x, np.ndarray) else numbers(x, "sizes", op)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            if isinstance(taken, list):
                taken = taken[start:end:step]
            else:
                taken = taken[(slice(None),) * (axis % taken.ndim) + (slice(start, end, step),)]
        return taken
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if isinstance(end, int) and end > 2**62:
            end = 2**62
        axis %= x.dim()
        if step < 0:
            x = _backwards(x, axis, slice(start, end, step))
        else:
            x = x[(slice(None),) * axis + (slice(start, end, step),)]
    return x


def _backwards(x: Tensor, axis: int, taken: slice) -> Tensor:
    """Return a slice with a negative step, which PyTorch does not have."""
    size = int(x.shape[axis])
    places = range(size)[taken]
    if places == range(size)[::-1]:
        return x.flip(axis)
    return x.index_select(axis, torch.tensor(places))


def _gather(op: Operation, inputs: list[Any], _: int) -> Any:
    data, indices = inputs
    axis = op.attributes.get("axis", 0)
    if isinstance(data, list):
        wanted = numbers(indices, "indices", op)
        taken = [data[int(i)] for i in wanted]
        return taken if _has_axis(indices) else taken[0]
    if isinstance(data, np.ndarray) and not isinstance(indices, Tensor):
        return np.take(data, np.array(numbers(indices, "indices", op)), axis)
    x = tensor(data)
    if not isinstance(indices, Tensor):
        if not _has_axis(indices):
            return x.select(axis, int(numbers(indices, "indices", op)[0]))
        indices = tensor(np.array(numbers(indices, "indices", op)))
        indices = torch.where(indices < 0, indices + x.shape[axis], indices)
        return x.index_select(axis, indices)
    if axis == 0 and x.dim() == 2:
        return functional.embedding(indices, x)
    axis %= x.dim()
    flat = x.index_select(axis, indices.reshape(-1))
    return flat.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _squeeze(op: Operation, inputs: list[Any], _: int) -> Any:
    axes = _axes(op, inputs)
    if is_sizes(inputs[0]):
        return numbers(inputs[0], "sizes", op)[0]
    if isinstance(inputs[0], np.ndarray):
        return np.squeeze(inputs[0], None if axes is None else tuple(axes))
    return inputs[0].squeeze() if axes is None else inputs[0].squeeze(axes)


def _unsqueeze(op: Operation, inputs: list[Any], _: int) -> Any:
    axes = _axes(op, inputs) or []
    if is_sizes(inputs[0]):
        return numbers(inputs[0], "sizes", op)
    if isinstance(inputs[0], np.ndarray):
        return np.expand_dims(inputs[0], tuple(axes))
    x: Tensor = inputs[0]
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _shape(op: Operation, inputs: list[Any], _: int) -> Any:
    sizes = list(inputs[0].shape)
    return sizes[op.attributes.get("start", 0) : op.attributes.get("end", len(sizes))]


def _expand(op: Operation, inputs: list[Any], _: int) -> Any:
    x, shape = tensor(inputs[0]), numbers(inputs[1], "shape", op)
    missing = len(shape) - x.dim()
    own = [1] * missing + list(x.shape) if missing > 0 else list(x.shape)
    shape = [1] * -missing + shape if missing < 0 else shape
    pairs = zip(shape, own, strict=True)
    return x.expand([n if isinstance(size, int) and size == 1 else size for size, n in pairs])


def _pad(op: Operation, inputs: list[Any], _: int) -> Any:
    x, mode = tensor(inputs[0]), op.attributes.get("mode", "constant")
    given = inputs[1] if len(inputs) > 1 else None
    pads = op.attributes.get("pads", []) if given is None else numbers(given, "pads", op)
    value = op.attributes.get("value", 0.0)
    if len(inputs) > 2 and inputs[2] is not None:
        value = float(numbers(inputs[2], "value", op)[0])
    axes = _axes(op, inputs, 3)
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


def _cast(op: Operation, inputs: list[Any], _: int) -> Any:
    from onnx import helper

    dtype = helper.tensor_dtype_to_np_dtype(op.attributes["to"])
    if is_sizes(inputs[0]):
        if dtype.kind in "iu":
            return inputs[0]
        return tensor(inputs[0]).to(torch.from_numpy(np.zeros(1, dtype)).dtype)
    if isinstance(inputs[0], np.ndarray):
        return inputs[0].astype(dtype)
    return inputs[0].to(torch.from_numpy(np.zeros(1, dtype)).dtype)


def _constant_of_shape(op: Operation, inputs: list[Any], _: int) -> Any:
    value = op.attributes.get("value", np.zeros(1, np.float32))
    shape = numbers(inputs[0], "shape", op)
    if all(isinstance(size, int) for size in shape):
        return np.full(shape, value.reshape(-1)[0], value.dtype)
    return torch.full(shape, value.item(), dtype=tensor(value).dtype)


def _range(op: Operation, inputs: list[Any], _: int) -> Any:
    start, end, step = (numbers(value, "bounds", op)[0] for value in inputs)
    return torch.arange(start, end, step)


def _where(_: Operation, inputs: list[Any], __: int) -> Any:
    if all(is_sizes(value) or isinstance(value, np.ndarray) for value in inputs):
        lists = [_as_list(value) for value in inputs]
        length = max(map(len, lists))
        rows = zip(*(items * length if len(items) == 1 else items for items in lists), strict=True)
        return [a if chosen else b for chosen, a, b in rows]
    return torch.where(*(tensor(value) for value in inputs))


def _resize(op: Operation, inputs: list[Any], opset: int) -> Any:
    x = tensor(inputs[0])
    place = 1 if opset < 11 or op.kind == "Upsample" else 2
    scales = numbers(inputs[place], "scales", op) if _given(inputs, place) else []
    sizes = numbers(inputs[3], "sizes", op) if _given(inputs, 3) else []
    mode = op.attributes.get("mode", "nearest")
    default = "asymmetric" if opset < 11 or op.kind == "Upsample" else "half_pixel"
    grid = op.attributes.get("coordinate_transformation_mode", default)
    spatial = x.dim() - 2
    whole = all(float(s) == int(s) for s in scales) if scales else False
    size = [int(n) for n in sizes[2:]] if sizes else None
    factors = None if size is not None else [float(s) for s in scales[2:]]
    if mode == "nearest" and (
        (grid == "asymmetric" and op.attributes.get("nearest_mode", "floor") == "floor") or whole
    ):
        return functional.interpolate(x, size, factors, mode="nearest")
    if mode == "linear" and grid in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        names = {1: "linear", 2: "bilinear", 3: "trilinear"}
        corners = grid == "align_corners"
        return functional.interpolate(x, size, factors, mode=names[spatial], align_corners=corners)
    raise unsupported(op, f"the mode {mode} with the coordinates {grid}")


def _given(inputs: list[Any], index: int) -> bool:
    value = inputs[index] if len(inputs) > index else None
    return value is not None and not (isinstance(value, np.ndarray) and value.size == 0)


def _depth_to_space(op: Operation, inputs: list[Any], _: int) -> Any:
    x, block = tensor(inputs[0]), op.attributes["blocksize"]
    if op.attributes.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    moved = x.reshape(n, block, block, int(c) // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return moved.reshape(n, int(c) // block**2, h * block, w * block)


def _identity(_: Operation, inputs: list[Any], __: int) -> Any:
    return inputs[0]


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def apply(_: Operation, inputs: list[Any], __: int) -> Any:
        total = tensor(inputs[0])
        for value in inputs[1:]:
            total = function(total, tensor(value))
        return total

    return apply


def _power(base: Any, exponent: Any) -> Any:
    return torch.pow(base, exponent) if isinstance(base, Tensor) else base**exponent


def _gelu(op: Operation, inputs: list[Any], _: int) -> Any:
    return functional.gelu(tensor(inputs[0]), approximate=op.attributes.get("approximate", "none"))


def _leaky_relu(op: Operation, inputs: list[Any], _: int) -> Any:
    return functional.leaky_relu(tensor(inputs[0]), op.attributes.get("alpha", 0.01))


def _elu(op: Operation, inputs: list[Any], _: int) -> Any:
    return functional.elu(tensor(inputs[0]), op.attributes.get("alpha", 1.0))


def _hard_sigmoid(op: Operation, inputs: list[Any], _: int) -> Any:
    alpha, beta = op.attributes.get("alpha", 0.2), op.attributes.get("beta", 0.5)
    x = tensor(inputs[0])
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return functional.hardsigmoid(x)
    return (alpha * x + beta).clamp(0, 1)


def _prelu(_: Operation, inputs: list[Any], __: int) -> Any:
    x, slope = map(tensor, inputs)
    return torch.where(x < 0, slope * x, x)


def _argmax(op: Operation, inputs: list[Any], _: int) -> Any:
    keep = bool(op.attributes.get("keepdims", 1))
    return tensor(inputs[0]).argmax(op.attributes.get("axis", 0), keepdim=keep)


# Operations that are joined from several operators, and that no file has.
JOINED: dict[str, Operator] = {
    "LinearLayer": _linear_layer,  # MatMul and Add
    "ScaledMatMul": _scaled_matmul,  # MatMul of tensors that are scaled by numbers
    "Swapped": _swapped,  # Reshape, Transpose and Reshape
}
OPERATORS: dict[str, Operator] = {
    **JOINED,
    "Abs": _unary(torch.abs),
    "Add": _binary(operator.add),
    "And": _binary(torch.logical_and),
    "ArgMax": _argmax,
    "AveragePool": _pool(is_max=False),
    "BatchNormalization": _batch_normalization,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "Cos": _unary(torch.cos),
    "DepthToSpace": _depth_to_space,
    "Div": _binary(_divide),
    "Dropout": _identity,
    "Elu": _elu,
    "Equal": _binary(operator.eq),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "Greater": _binary(operator.gt),
    "GreaterOrEqual": _binary(operator.ge),
    "GroupNormalization": _group_normalization,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary(functional.hardswish),
    "Identity": _identity,
    "InstanceNormalization": _instance_normalization,
    "IsNaN": _unary(torch.isnan),
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _leaky_relu,
    "Less": _binary(operator.lt),
    "LessOrEqual": _binary(operator.le),
    "Log": _unary(torch.log),
    "LogSoftmax": _softmax(functional.log_softmax),
    "MatMul": _matmul,
    "Max": _variadic(torch.maximum),
    "MaxPool": _pool(is_max=True),
    "Mean": lambda op, inputs, opset: _variadic(torch.add)(op, inputs, opset) / len(inputs),
    "Min": _variadic(torch.minimum),
    "Mish": _unary(functional.mish),
    "Mul": _binary(operator.mul),
    "Neg": _unary(torch.neg),
    "Not": _unary(torch.logical_not),
    "Or": _binary(torch.logical_or),
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _binary(_power),
    "RMSNormalization": _rms_normalization,
    "Range": _range,
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceProd": _reduce(torch.prod, math.prod),
    "ReduceSum": _reduce(torch.sum, sum),
    "Relu": _unary(functional.relu),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _shape,
    "Sigmoid": _unary(torch.sigmoid),
    "Sin": _unary(torch.sin),
    "Slice": _slice,
    "Softmax": _softmax(functional.softmax),
    "Softplus": _unary(functional.softplus),
    "Split": _split,
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(operator.sub),
    "Sum": _variadic(torch.add),
    "Tanh": _unary(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Upsample": _resize,
    "Where": _where,
}
