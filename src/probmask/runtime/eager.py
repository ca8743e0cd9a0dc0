"""What a node computes, in PyTorch: the dense kernels that the sparse ones compete with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probmask.runtime.fields import Curve
from probmask.runtime.nodes import (
    INFINITY,
    Clamp,
    Convolution,
)


def undefined(*_: Any) -> Any:
    """Stand in for a call that is set as soon as its node is made."""
    raise AssertionError("a node without its call")


def apply_(x: Tensor, after: Clamp) -> Tensor:
    """Apply what follows a layer, in place where PyTorch can."""
    if after.curve is not Curve.NONE:
        return _CURVES[after.curve](x)
    if after.low == 0 and after.high == INFINITY:
        return x.relu_()
    return x if after.is_nothing else x.clamp_(after.low, after.high)


class EagerConvolution:
    """A convolution node in PyTorch: the dense kernel that the sparse one competes with."""

    def __init__(self, node: Convolution) -> None:
        self.node = node
        shape = node.weight.shape
        kernel = {0: shape[:2], 1: (*shape[:2], shape[3]), 2: shape}[node.rank]
        self.weight = torch.from_numpy(np.ascontiguousarray(node.weight)).reshape(kernel)
        self.bias = torch.from_numpy(node.bias)
        (top, bottom), (left, right) = node.padding
        self.even = top == bottom and left == right
        self.pad = (left, right, top, bottom) if node.rank == 2 else (left, right)
        self.settings: tuple[Any, ...] = (node.stride, (top, left), node.dilation, node.groups)
        if node.rank == 1:
            self.settings = (node.stride[1], left, node.dilation[1], node.groups)
        if not self.even:
            self.settings = (self.settings[0], 0, *self.settings[2:])

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Convolve, add, apply."""
        if self.node.rank == 0:
            out = nn.functional.linear(x, self.weight, self.bias)
        else:
            x = x if self.even else nn.functional.pad(x, self.pad)
            convolve = nn.functional.conv2d if self.node.rank == 2 else nn.functional.conv1d
            out = convolve(x, self.weight, self.bias, *self.settings)
        if residual is not None:
            out += residual
        return apply_(out, self.node.after)


class EagerScaling:
    """A convolution node that scales and shifts each channel, in PyTorch: BatchNorm of its own."""

    def __init__(self, node: Convolution) -> None:
        self.node = node
        ones = (1,) * node.rank
        self.scale = torch.from_numpy(node.weight.reshape(-1, *ones))
        self.shift = torch.from_numpy(node.bias.reshape(-1, *ones))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Scale, shift, add, apply."""
        out = torch.addcmul(self.shift, x, self.scale)
        if residual is not None:
            out += residual
        return apply_(out, self.node.after)


def in_pytorch(node: Convolution) -> Callable[..., Tensor]:
    """What computes a convolution node in PyTorch, with its weights as they are now."""
    per_channel = node.groups == len(node.weight) and node.weight.shape[1:] == (1, 1, 1)
    in_place = node.stride == (1, 1) and node.padding == ((0, 0), (0, 0))
    return EagerScaling(node) if per_channel and in_place else EagerConvolution(node)


_CURVES: dict[Curve, Callable[[Tensor], Tensor]] = {
    Curve.SILU: nn.functional.silu,
    Curve.GELU: nn.functional.gelu,
    Curve.GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
    Curve.HARDSWISH: nn.functional.hardswish,
}
