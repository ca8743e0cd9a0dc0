"""Operators of ONNX that move a window over images: convolutions and pooling."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import Operator, optional_tensor, tensor, unsupported


def convolution(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    """Return the convolution of an image."""
    x, weight = tensor(inputs[0]), tensor(inputs[1])
    bias = optional_tensor(inputs, 2)
    kernel = list(weight.shape[2:])
    convolve = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}.get(len(kernel))
    if convolve is None:
        raise unsupported(op, f"{len(kernel)} dimensions")
    x, padding = _padded(x, _pads(op, x, kernel), 0.0, [math.inf] * len(kernel))  # type: ignore[list-item]
    strides, dilations = (_spatial(op, key, len(kernel)) for key in ("strides", "dilations"))
    return convolve(x, weight, bias, strides, padding, dilations, op.attributes.get("group", 1))


def _transposed_convolution(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, weight = tensor(inputs[0]), tensor(inputs[1])
    bias = optional_tensor(inputs, 2)
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
    def apply(op: Operation, inputs: Sequence[Any], _: int) -> Any:
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


WINDOWS: dict[str, Operator] = {
    "AveragePool": _pool(is_max=False),
    "Conv": convolution,
    "ConvTranspose": _transposed_convolution,
    "MaxPool": _pool(is_max=True),
}
