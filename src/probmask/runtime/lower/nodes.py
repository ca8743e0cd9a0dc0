"""A lowered network: a list of nodes in an order in which they can run.

Each node can run in PyTorch (`call`); those with a `form` can also run on the engine's kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from probmask.runtime.kernels.operation_table import Curve

Floats = npt.NDArray[np.float32]


Pair = tuple[int, int]


INFINITY = float("inf")


@dataclass(frozen=True)
class Form:
    """How a tensor is seen by the kernels: so many images, each of channels × height × width.

    ``unit`` are the leading dimensions, counted as images: the batch, and for a linear layer on a
    sequence also its positions. A ``flat`` one has its channels, rows and columns in one dimension.
    """

    unit: tuple[str, ...]
    channels: int
    height: int = 1
    width: int = 1
    flat: bool = False

    @property
    def positions(self) -> int:
        """Of one channel."""
        return self.height * self.width

    @property
    def size(self) -> int:
        """Numbers in one image."""
        return self.channels * self.positions


@dataclass
class Node:
    """One computation. What ``call`` takes are the tensors named by ``inputs``."""

    name: str
    inputs: tuple[str, ...]
    call: Callable[..., Any]
    label: str
    # Of the output, and of each input; none: it runs in PyTorch.
    form: Form | None = None
    input_forms: tuple[Form, ...] = ()
    # The output's shape without its leading dimensions.
    tail: tuple[int, ...] = ()
    # Why it runs in PyTorch.
    reason: str = ""


@dataclass
class Clamp:
    """What follows a layer: its results are kept between two limits, or go through a curve."""

    low: float = -INFINITY
    high: float = INFINITY
    curve: Curve = Curve.NONE

    @property
    def is_nothing(self) -> bool:
        """Whether results stay as they are."""
        return self.low == -INFINITY and self.high == INFINITY and self.curve is Curve.NONE


@dataclass
class Convolution(Node):
    """A convolution or a linear layer (of rank 0), with BatchNorm folded into it.

    A second input is added to its results before ``after`` is applied.
    """

    weight: Floats = field(default_factory=lambda: np.zeros((0, 0, 1, 1), np.float32))
    bias: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    rank: int = 2
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))  # before and after, for rows and for columns
    dilation: Pair = (1, 1)
    groups: int = 1
    after: Clamp = field(default_factory=Clamp)

    @property
    def density(self) -> float:
        """The share of its weights that are not zero."""
        return float(np.count_nonzero(self.weight) / max(1, self.weight.size))


@dataclass
class Pool(Node):
    """The largest or the mean of windows, given by their rows and columns."""

    largest: bool = True
    rows: tuple[Pair, ...] = ()
    columns: tuple[Pair, ...] = ()
    divisors: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))


@dataclass
class Combine(Node):
    """The sum or the product of two tensors of one form."""

    product: bool = False
    after: Clamp = field(default_factory=Clamp)


@dataclass
class Activate(Node):
    """An activation function that maps 0 to 0."""

    after: Clamp = field(default_factory=Clamp)


@dataclass
class Concatenate(Node):
    """Tensors one after the other, along the channels."""


@dataclass
class Reshape(Node):
    """The same numbers in the same order, each image by itself."""


@dataclass
class Network:
    """All nodes; the names of the inputs and of what a call computes; how that is handed back."""

    nodes: list[Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pack_outputs: Callable[[dict[str, Any]], Any]
    # Inputs that a call changes in place, and which output they become.
    changed_inputs: dict[str, str]
    # Of the inputs: dtype and shape, with a name where a size may vary; equal names, equal sizes.
    input_shapes: tuple[tuple[int | str, ...], ...]
    input_dtypes: tuple[Any, ...]


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
