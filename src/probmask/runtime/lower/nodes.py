"""The nodes of a lowered network, and how PyTorch computes them.

Every node can run in PyTorch by its ``call``. Nodes with a ``form`` can also run on the kernels.
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from probmask.runtime.kernels.operation_table import Curve
from probmask.runtime.lower.views import View

Floats = npt.NDArray[np.float32]
Pair = tuple[int, int]
INFINITY = float("inf")


@dataclass(frozen=True)
class Form:
    """How the kernels see a tensor: a number of images of channels × height × width.

    ``leading`` names the sizes of the leading dimensions, which are counted as images. These are
    the batch and, for a linear layer on a sequence, its positions. A ``flat`` tensor has its
    channels, rows and columns in one dimension. In a tensor of ``tokens``, the channels are the
    last dimension, after the positions.
    """

    leading: tuple[str, ...]
    channels: int
    height: int = 1
    width: int = 1
    flat: bool = False
    tokens: bool = False

    @property
    def positions(self) -> int:
        """Number of positions in a channel."""
        return self.height * self.width

    @property
    def size(self) -> int:
        """Number of elements in an image."""
        return self.channels * self.positions


@dataclass
class Node(ABC):
    """One computation: ``call`` takes the tensors that ``inputs`` names."""

    name: str
    inputs: tuple[str, ...]
    call: Callable[..., Any]
    label: str
    # Forms of the output and of each input; None and empty if the node has no kernel.
    form: Form | None = None
    input_forms: tuple[Form, ...] = ()
    # Shape of the output without its leading dimensions.
    trailing: tuple[int, ...] = ()
    # Why the node has no kernel.
    reason: str = ""
    # Which part of each input the node reads; empty if it reads them as they are.
    views: tuple[View, ...] = ()
    # Whether a kernel can process groups of interleaved images.
    takes_groups: ClassVar[bool] = True


@final
@dataclass
class Fallback(Node):
    """An operation without a kernel. PyTorch runs it."""


@dataclass(frozen=True)
class Activation:
    """Clamp to [low, high], or an activation function that is more than a clamp."""

    low: float = -INFINITY
    high: float = INFINITY
    curve: Curve = Curve.NONE

    @property
    def is_identity(self) -> bool:
        """Whether it leaves its input unchanged."""
        return self.low == -INFINITY and self.high == INFINITY and self.curve is Curve.NONE


@final
@dataclass
class Convolution(Node):
    """A convolution or a linear layer (rank 0), with BatchNorm folded into it.

    A second input is a residual: it is added before ``activation`` is applied.
    """

    weight: Floats = field(default_factory=lambda: np.zeros((0, 0, 1, 1), np.float32))
    bias: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    rank: int = 2
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))  # before and after, for rows and for columns
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: Activation = field(default_factory=Activation)

    @property
    def density(self) -> float:
        """Fraction of the weights that are not zero."""
        return float(np.count_nonzero(self.weight) / max(1, self.weight.size))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the call: it holds the weight again, as PyTorch reads it."""
        return {**vars(self), "call": unset_call}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.call = pytorch_call(self)


@final
@dataclass
class Pool(Node):
    """The maximum or the mean of windows, each given by its start and end rows and columns."""

    is_max: bool = True
    rows: tuple[Pair, ...] = ()
    columns: tuple[Pair, ...] = ()
    # Reciprocal of the divisor of each mean.
    factors: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))


@final
@dataclass
class Combine(Node):
    """The sum or the product of two tensors of the same form, or of a tensor and a constant."""

    product: bool = False
    # The second tensor if it is constant, by position and channel.
    constant: Floats | None = None
    activation: Activation = field(default_factory=Activation)


@final
@dataclass
class Activate(Node):
    """An activation function that maps 0 to 0."""

    activation: Activation = field(default_factory=Activation)


@final
@dataclass
class Concatenate(Node):
    """Tensors concatenated along the channels."""


@final
@dataclass
class Normalize(Node):
    """LayerNorm, or RMSNorm if it is not ``centered``, over the channels of each position."""

    scale: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    bias: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    epsilon: float = 1e-5
    centered: bool = True


@final
@dataclass
class Attention(Node):
    """Attention of queries, keys and values, and optionally a mask that is added to the scores.

    ``heads`` has the first channels of each head's queries, keys and values. A mask, constant or
    the fourth input, has queries as positions and heads · keys as channels.
    """

    heads: tuple[tuple[int, int, int], ...] = ()
    depth: int = 0
    keys: int = 0
    scale: float = 1.0
    causal: bool = False
    mask_heads: int = 1
    mask: Floats | None = None

    takes_groups: ClassVar[bool] = False


@dataclass(frozen=True)
class Part:
    """A part of a rearranged tensor: a view of an input, or a constant, and where it goes.

    Both run over the same loops: the factors of ``source`` and ``target`` have the same sizes.
    """

    target: View
    source: View | None = None
    constant: Floats | None = None


@final
@dataclass
class Rearrange(Node):
    """Parts of tensors and constants, copied to their places in a new one."""

    parts: tuple[Part, ...] = ()

    takes_groups: ClassVar[bool] = False


@final
@dataclass
class Reshape(Node):
    """The same elements in the same order, image by image."""


@dataclass
class Network:
    """Nodes in an order in which they can run, with the names of the inputs and outputs."""

    nodes: list[Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    # Arranges the outputs as the model's `forward` returns them.
    pack_outputs: Callable[[dict[str, Any]], Any]
    # Inputs that a call changes in place, and the outputs that hold their new values.
    changed_inputs: dict[str, str]
    # Shapes of the inputs. A size that may vary is a name; sizes of one name are equal.
    input_shapes: tuple[tuple[int | str, ...], ...]
    input_dtypes: tuple[Any, ...]
    # The operation that fixes the batch size, if one does.
    batch_fixed_by: str = ""
    # Whether some output does not depend on the inputs.
    returns_constants: bool = False


def unset_call(*_: Any) -> Any:
    """Stand in for the call of a node until it is set."""
    raise AssertionError("the call of this node was not set")


def apply_activation_(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation, in place where PyTorch can."""
    if activation.curve is not Curve.NONE:
        return _CURVES[activation.curve](x)
    if activation.low == 0 and activation.high == INFINITY:
        return x.relu_()
    return x if activation.is_identity else x.clamp_(activation.low, activation.high)


def pytorch_call(node: Convolution) -> Callable[..., Tensor]:
    """Return a function that computes a convolution node in PyTorch, with its current weights."""
    per_channel = node.groups == len(node.weight) and node.weight.shape[1:] == (1, 1, 1)
    same_positions = node.stride == (1, 1) and node.padding == ((0, 0), (0, 0))
    if node.views:
        return OnRows(node, _DenseConvolution(node))
    return _ChannelScaling(node) if per_channel and same_positions else _DenseConvolution(node)


class OnRows:
    """A function of tensors of batch × positions × channels, applied to the views of a node."""

    def __init__(self, node: Node, function: Callable[..., Tensor]) -> None:
        self.node, self.function = node, function

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the output of the node."""
        rows = [_rows(view, x) for view, x in zip(self.node.views, inputs, strict=True)]
        result = self.function(*rows)
        return result.reshape(len(rows[0]), *self.node.trailing)


def _rows(view: View, root: Tensor) -> Tensor:
    """Return the channels that a whole view runs over, as batch × positions × channels."""
    if view.tokens:
        rows = root.reshape(len(root), view.positions, view.channels)
    else:
        rows = root.reshape(len(root), view.channels, view.positions).transpose(1, 2)
    return rows[..., view.channel : view.channel + view.width()]


class _DenseConvolution:
    """PyTorch's dense kernel for a convolution node."""

    def __init__(self, node: Convolution) -> None:
        self.node = node
        shape = node.weight.shape
        kernel = {0: shape[:2], 1: (*shape[:2], shape[3]), 2: shape}[node.rank]
        self.weight = torch.from_numpy(np.ascontiguousarray(node.weight)).reshape(kernel)
        self.bias = torch.from_numpy(node.bias)
        (top, bottom), (left, right) = node.padding
        self.symmetric = top == bottom and left == right
        self.pad = (left, right, top, bottom) if node.rank == 2 else (left, right)
        self.settings: tuple[Any, ...] = (node.stride, (top, left), node.dilation, node.groups)
        if node.rank == 1:
            self.settings = (node.stride[1], left, node.dilation[1], node.groups)
        if not self.symmetric:
            self.settings = (self.settings[0], 0, *self.settings[2:])

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.node.rank == 0:
            out = nn.functional.linear(x, self.weight, self.bias)
        else:
            x = x if self.symmetric else nn.functional.pad(x, self.pad)
            convolve = nn.functional.conv2d if self.node.rank == 2 else nn.functional.conv1d
            out = convolve(x, self.weight, self.bias, *self.settings)
        if residual is not None:
            out += residual
        return apply_activation_(out, self.node.activation)


class _ChannelScaling:
    """A convolution node that scales and shifts each channel, in PyTorch: an unfolded BatchNorm."""

    def __init__(self, node: Convolution) -> None:
        self.node = node
        ones = (1,) * node.rank
        self.scale = torch.from_numpy(node.weight.reshape(-1, *ones))
        self.shift = torch.from_numpy(node.bias.reshape(-1, *ones))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = torch.addcmul(self.shift, x, self.scale)
        if residual is not None:
            out += residual
        return apply_activation_(out, self.node.activation)


_CURVES: dict[Curve, Callable[[Tensor], Tensor]] = {
    Curve.SILU: nn.functional.silu,
    Curve.GELU: nn.functional.gelu,
    Curve.GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
    Curve.HARDSWISH: nn.functional.hardswish,
}
