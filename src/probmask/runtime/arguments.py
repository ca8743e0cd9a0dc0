"""The arguments of exported operations, as nodes want them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from probmask.runtime.nodes import (
    Pair,
)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operation by name, defaults filled in."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return defaults | given | dict(node.kwargs)


def as_pair(value: Any, rank: int) -> Pair:
    """For rows and columns; of rank 1 there is one row."""
    values = list(value) if isinstance(value, Sequence) else [value]
    values = values * rank if len(values) == 1 else values
    return (1, int(values[0])) if rank == 1 else (int(values[0]), int(values[1]))


def padding_of(value: Any, kernel: tuple[int, ...], dilation: Pair, rank: int) -> tuple[Pair, Pair]:
    """Zeros before and after the rows, and the columns."""
    if isinstance(value, str):
        sizes = [
            d * (k - 1) if value == "same" else 0 for k, d in zip(kernel, dilation, strict=True)
        ]
        first, second = ((size // 2, size - size // 2) for size in sizes)
        return first, second
    values = list(value) if isinstance(value, Sequence) else [value]
    values = values * rank if len(values) == 1 else values
    rows, columns = (0, int(values[0])) if rank == 1 else (int(values[0]), int(values[1]))
    return (rows, rows), (columns, columns)


def lengths_of(node: Any, rank: int) -> Pair:
    """Rows and columns of a tensor; of rank 1 there is one row."""
    sizes = tuple(node.meta["val"].shape[-2:]) if rank == 2 else (1, node.meta["val"].shape[-1])
    return int(sizes[0]), int(sizes[1])


def axes_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[tuple[int, ...]]:
    """Per axis: kernel, stride, padding, size before and after."""
    kernel = as_pair(arguments["kernel_size"], rank)
    stride = as_pair(arguments["stride"] or arguments["kernel_size"], rank)
    ((top, _), (left, _)) = padding_of(arguments["padding"], kernel, (1, 1), rank)
    before, after = lengths_of(node.args[0], rank), lengths_of(node, rank)
    return list(zip(kernel, stride, (top, left), before, after, strict=True))


def windows_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[list[Pair]]:
    """Where each output of a pooling begins and ends to read, along rows and columns."""
    return [
        [(max(0, o * s - p), min(size, o * s - p + k)) for o in range(out)]
        for k, s, p, size, out in axes_of(arguments, node, rank)
    ]


def padded_sizes_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[Any]:
    """Of each window, how much of it lies in the image or its padding."""
    return [
        np.array([min(size + p, o * s - p + k) - (o * s - p) for o in range(out)], float)
        for k, s, p, size, out in axes_of(arguments, node, rank)
    ]


# Numbers


def as_array(tensor: Tensor) -> Any:
    """The tensor in single precision."""
    return tensor.to(torch.float32).cpu().numpy()


def bias_or_zeros(tensor: Tensor | None, channels: int) -> Any:
    """The bias, or zeros where there is none."""
    return np.zeros(channels, np.float32) if tensor is None else as_array(tensor)


def scale_and_shift(
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, *, epsilon: float
) -> tuple[Any, Any]:
    """A BatchNorm as x · scale + shift, in double precision."""
    scale = 1 / np.sqrt(variance.double().cpu().numpy() + epsilon)
    if weight is not None:
        scale = scale * weight.double().cpu().numpy()
    shift = -mean.double().cpu().numpy() * scale
    if bias is not None:
        shift = shift + bias.double().cpu().numpy()
    return scale, shift


def label_of(node: fx.Node) -> str:
    """What to call an operation before people."""
    name = getattr(node.target, "__name__", str(node.target))
    module = _module_name(node)
    return f"{module} ({name})" if module else f"{node.name} ({name})"


def _module_name(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    name: str = paths[-1] if paths else ""
    return name.removeprefix("L['self'].").removeprefix("L['self']")
