"""How PyTorch computes the nodes of a network."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probmask.runtime.kernels.operation_table import Curve
from probmask.runtime.lower.nodes import (
    INFINITY,
    Activation,
    Convolution,
    Depth,
    Node,
    TransposedConvolution,
)
from probmask.runtime.lower.views import View

_linear = nn.functional.linear


class ViewCall:
    """A view as a tensor, from the root's tensor."""

    def __init__(self, view: View) -> None:
        self.view = view

    def __call__(self, root: Tensor) -> Tensor:
        """Return the view."""
        view = self.view
        root = root.contiguous()
        sizes, steps, offset = view.strides(len(root))
        shape = view.sizes(len(root))
        return root.as_strided(sizes, steps, root.storage_offset() + offset).reshape(shape)


def contiguous_view(root: Tensor, *_: Tensor, view: View) -> Tensor:
    """Return a view as a tensor with its elements in order in memory."""
    return ViewCall(view)(root).contiguous()


def root_of(view: View, tensor: Tensor) -> Tensor:
    """Return the tensor of a root of which ``tensor`` is this view: batch, positions, channels.

    The view has to run over the whole root.
    """
    batch = tensor.numel() // (view.channels * view.positions)
    sizes = [factor.count(batch) for factor in view.factors]
    ordered = tensor.reshape(sizes).permute(view.order())
    return ordered.reshape(batch, view.positions, view.channels)


def apply_activation_(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation, in place where PyTorch can."""
    if activation.curve is not Curve.NONE:
        return _CURVES[activation.curve](x, activation)
    if activation.low == 0 and activation.high == INFINITY:
        return x.relu_()
    return x if activation.is_identity else x.clamp_(activation.low, activation.high)


def pytorch_call(node: Convolution) -> Callable[..., Tensor]:
    """Return a function that computes a convolution node in PyTorch, with its current weights."""
    per_channel = node.groups == len(node.weight) and node.weight.shape[1:] == (1, 1, 1)
    same_positions = node.stride == (1, 1) and node.padding == ((0, 0), (0, 0))
    same_positions = same_positions and (
        node.depth is None or node.depth == Depth(node.depth.inputs, node.depth.inputs)
    )
    if node.views:
        on = OnRows if node.rank == 0 else OnViews
        return on(node, _DenseConvolution(node))
    return _ChannelScaling(node) if per_channel and same_positions else _DenseConvolution(node)


def transposed_call(node: TransposedConvolution) -> Callable[..., Tensor]:
    """Return a function that computes a transposed convolution in PyTorch."""
    call = _DenseTransposed(node)
    return OnViews(node, call) if node.views else call


class _DenseTransposed:
    """PyTorch's dense kernel for a transposed convolution."""

    def __init__(self, node: TransposedConvolution) -> None:
        self.node = node

    def __getstate__(self) -> dict[str, Any]:
        return {"node": self.node}

    @cached_property
    def weight(self) -> Tensor:
        shape = self.node.weight.shape
        kernel = shape if self.node.rank == 2 else (*shape[:2], shape[3])
        return torch.from_numpy(np.ascontiguousarray(self.node.weight)).reshape(kernel)

    @cached_property
    def bias(self) -> Tensor:
        return torch.from_numpy(self.node.bias)

    def __call__(self, x: Tensor) -> Tensor:
        node = self.node
        first = 2 - node.rank
        stride, padding, extra, dilation = (
            pair[first:] for pair in (node.stride, node.padding, node.output_padding, node.dilation)
        )
        convolve = nn.functional.conv_transpose2d
        if node.rank == 1:
            convolve = nn.functional.conv_transpose1d
        out = convolve(x, self.weight, self.bias, stride, padding, extra, node.groups, dilation)
        return apply_activation_(out, node.activation)


class OnRows:
    """A function of tensors of batch × positions × channels, applied to the views of a node."""

    def __init__(self, node: Node, function: Callable[..., Tensor]) -> None:
        self.node, self.function = node, function

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the output of the node."""
        rows = [_rows(view, x) for view, x in zip(self.node.views, inputs, strict=True)]
        result = self.function(*rows)
        form = self.node.form
        if form is not None and form.positions > 1 and not form.tokens:  # the order of an image
            result = result.transpose(1, 2)
        return result.reshape(len(rows[0]), *self.node.trailing)


class OnViews:
    """A function of tensors, applied to the views that a node reads."""

    def __init__(self, node: Node, function: Callable[..., Tensor]) -> None:
        self.node, self.function = node, function

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the output of the node."""
        pairs = zip(self.node.views, inputs, strict=True)
        return self.function(*(ViewCall(view)(x) for view, x in pairs))


def _rows(view: View, root: Tensor) -> Tensor:
    """Return the channels that a whole view runs over, as batch × positions × channels."""
    if view.tokens:
        rows = root.reshape(len(root), view.positions, view.channels)
    else:
        rows = root.reshape(len(root), view.channels, view.positions).transpose(1, 2)
    return rows[..., view.channel : view.channel + view.width()]


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {
    1: nn.functional.conv1d,
    2: nn.functional.conv2d,
    3: nn.functional.conv3d,
}


class _DenseConvolution:
    """PyTorch's dense kernel for a convolution node."""

    def __init__(self, node: Convolution) -> None:
        self.node = node

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the weight: it is that of the node, which is pickled too."""
        return {"node": self.node}

    @cached_property
    def weight(self) -> Tensor:
        outputs, inputs, rows, columns = self.node.weight.shape
        slices = self.node.depth.kernel if self.node.depth is not None else 1
        kernel = (slices, rows, columns)[3 - self.node.rank :]
        shape = (outputs, inputs // slices, *kernel)
        return torch.from_numpy(np.ascontiguousarray(self.node.weight)).reshape(shape)

    @cached_property
    def bias(self) -> Tensor:
        return torch.from_numpy(self.node.bias)

    @cached_property
    def padding(self) -> list[tuple[int, int]]:
        """Padding before and after, of each dimension that the kernel has."""
        depth = self.node.depth if self.node.depth is not None else Depth(1, 1)
        return [depth.padding, *self.node.padding][3 - self.node.rank :]

    @cached_property
    def symmetric(self) -> bool:
        return all(before == after for before, after in self.padding)

    @cached_property
    def pad(self) -> list[int]:
        return [number for pair in reversed(self.padding) for number in pair]

    @cached_property
    def settings(self) -> tuple[Any, ...]:
        node, first = self.node, 3 - self.node.rank
        depth = node.depth if node.depth is not None else Depth(1, 1)
        padding = [before for before, _ in self.padding] if self.symmetric else 0
        stride, dilation = (depth.stride, *node.stride), (depth.dilation, *node.dilation)
        return stride[first:], padding, dilation[first:], node.groups

    @cached_property
    def activates(self) -> bool:
        return not self.node.activation.is_identity

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.node.rank == 0:
            out = _linear(x, self.weight, self.bias)
        else:
            x = x if self.symmetric else nn.functional.pad(x, self.pad)
            out = _CONVOLUTIONS[self.node.rank](x, self.weight, self.bias, *self.settings)
        if residual is not None:
            out += residual
        return apply_activation_(out, self.node.activation) if self.activates else out


class _ChannelScaling:
    """A convolution node that scales and shifts each channel, in PyTorch: an unfolded BatchNorm."""

    def __init__(self, node: Convolution) -> None:
        self.node = node

    def __getstate__(self) -> dict[str, Any]:
        return {"node": self.node}

    @cached_property
    def scale(self) -> Tensor:
        return torch.from_numpy(self.node.weight.reshape(-1, *(1,) * self.node.rank))

    @cached_property
    def shift(self) -> Tensor:
        return torch.from_numpy(self.node.bias.reshape(-1, *(1,) * self.node.rank))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = torch.addcmul(self.shift, x, self.scale)
        if residual is not None:
            out += residual
        return apply_activation_(out, self.node.activation)


def _two_sided(x: Tensor, below: Tensor, activation: Activation) -> Tensor:
    return torch.where(x > 0, x * activation.positive, below * activation.negative)


_CURVES: dict[Curve, Callable[[Tensor, Activation], Tensor]] = {
    Curve.SILU: lambda x, _: nn.functional.silu(x),
    Curve.GELU: lambda x, _: nn.functional.gelu(x),
    Curve.GELU_TANH: lambda x, _: nn.functional.gelu(x, approximate="tanh"),
    Curve.HARDSWISH: lambda x, _: nn.functional.hardswish(x),
    Curve.TANH: lambda x, _: x.tanh(),
    Curve.MISH: lambda x, _: nn.functional.mish(x),
    Curve.LEAKY: lambda x, a: _two_sided(x, x, a),
    Curve.ELU: lambda x, a: _two_sided(x, x.expm1(), a),
    Curve.SIGMOID: lambda x, _: x.sigmoid(),
    Curve.HARDSIGMOID: lambda x, _: nn.functional.hardsigmoid(x),
}
