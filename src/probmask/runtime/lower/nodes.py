"""The nodes of a lowered network: data that the planner reads, without PyTorch.

Nodes with a ``form`` can run on the kernels. If the network was lowered here, every node can also
run in PyTorch by its ``call``, which `pytorch_calls` makes.
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.operation_table import Cell, Curve
from probmask.runtime.lower.folding import Folded
from probmask.runtime.lower.views import View

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
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

    # Which elements of another node's output its result has, if it only moves elements.
    moved: View | None = None


@final
@dataclass
class Move(Node):
    """Elements of another node's output or of an input, in the order of a view of it."""

    view: View | None = None


@final
@dataclass
class Embed(Node):
    """Rows of a table, chosen by integers. It runs before the kernels, in PyTorch or NumPy."""

    table: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))


@final
@dataclass
class AttendedKeys(Node):
    """A mask for an attention that depends on which elements of an input equal a number.

    The input has batch × keys. Where an element equals ``number``, its key has the numbers
    ``where_equal``, otherwise those ``elsewhere``: both have queries × (heads · keys). If they are
    None, these are -∞ and 0. It runs before the kernels, in PyTorch or NumPy.
    """

    number: int = 0
    where_equal: Floats | None = None
    elsewhere: Floats | None = None

    def sides(self, keys: int) -> tuple[Floats, Floats]:
        """Return the numbers where an element equals ``number``, and those elsewhere."""
        if self.where_equal is None or self.elsewhere is None:
            hidden = np.full((1, keys), -np.inf, np.float32)
            return hidden, np.zeros_like(hidden)
        return self.where_equal, self.elsewhere


@dataclass(frozen=True)
class Activation:
    """Clamp to [low, high], or an activation function that is more than a clamp.

    ``positive`` and ``negative`` are the factors of the curves that have two sides.
    """

    low: float = -INFINITY
    high: float = INFINITY
    curve: Curve = Curve.NONE
    positive: float = 1.0
    negative: float = 1.0

    @property
    def limits(self) -> tuple[float, float]:
        """The two numbers that the kernel reads."""
        if self.curve in (Curve.LEAKY, Curve.ELU):
            return self.positive, self.negative
        return self.low, self.high

    @property
    def is_identity(self) -> bool:
        """Whether it leaves its input unchanged."""
        return self.low == -INFINITY and self.high == INFINITY and self.curve is Curve.NONE


@dataclass(frozen=True)
class Depth:
    """The first dimension of the volumes that a 3-D convolution reads and writes.

    Each slice of a volume is a channel of an image: slice d of channel c is channel
    c · ``inputs`` + d.
    """

    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    padding: Pair = (0, 0)
    dilation: int = 1


@final
@dataclass
class Convolution(Node):
    """A convolution or a linear layer (rank 0), with BatchNorm folded into it.

    A second input is a residual: it is added before ``activation`` is applied. The weight of a
    convolution with ``depth`` (rank 3) has outputs × (inputs per group · kernel depth) × rows ×
    columns.
    """

    weight: Floats = field(default_factory=lambda: np.zeros((0, 0, 1, 1), np.float32))
    bias: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    rank: int = 2
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))  # before and after, for rows and for columns
    dilation: Pair = (1, 1)
    groups: int = 1
    depth: Depth | None = None
    activation: Activation = field(default_factory=Activation)
    # The BatchNorm in the weight and the bias, if there is exactly one.
    folded: Folded | None = None

    @property
    def density(self) -> float:
        """Fraction of the weights that are not zero."""
        return float(np.count_nonzero(self.weight) / max(1, self.weight.size))

    def scaled(self, scale: Any) -> Any:
        """Return the weight with each output channel multiplied by a number."""
        return self.weight * scale[:, None, None, None]


@final
@dataclass
class TransposedConvolution(Node):
    """A transposed convolution, with BatchNorm folded into it.

    The weight has inputs × outputs per group × rows × columns, as in PyTorch.
    """

    weight: Floats = field(default_factory=lambda: np.zeros((0, 0, 1, 1), np.float32))
    bias: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    rank: int = 2
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: Activation = field(default_factory=Activation)

    @property
    def density(self) -> float:
        """Fraction of the weights that are not zero."""
        return float(np.count_nonzero(self.weight) / max(1, self.weight.size))

    def scaled(self, scale: Any) -> Any:
        """Return the weight with each output channel multiplied by a number."""
        inputs, outputs, *kernel = self.weight.shape
        grouped = self.weight.reshape(self.groups, inputs // self.groups, outputs, *kernel)
        factors = scale.reshape(self.groups, 1, outputs, 1, 1)
        return (grouped * factors).reshape(self.weight.shape)


@final
@dataclass
class Resize(Node):
    """Interpolation: each output row is a mean of two input rows, and likewise for columns.

    ``first`` and ``second`` have the indices of the two, ``weights`` the weight of the second.
    """

    first: tuple[Longs, Longs] = field(default_factory=lambda: (np.zeros(0, np.int64),) * 2)
    second: tuple[Longs, Longs] = field(default_factory=lambda: (np.zeros(0, np.int64),) * 2)
    weights: tuple[Floats, Floats] = field(default_factory=lambda: (np.zeros(0, np.float32),) * 2)

    takes_groups: ClassVar[bool] = False


@final
@dataclass
class Pool(Node):
    """The maximum or the mean of windows, each given by its start and end rows and columns."""

    is_max: bool = True
    rows: tuple[Pair, ...] = ()
    columns: tuple[Pair, ...] = ()
    # Reciprocal of the divisor of each mean.
    factors: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    # The windows of slices, if the images are volumes, and the factors of their means.
    slices: tuple[Pair, ...] = ()
    slice_factors: Floats = field(default_factory=lambda: np.zeros(0, np.float32))


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
    """An activation function, or PReLU if there is a slope for each channel."""

    activation: Activation = field(default_factory=Activation)
    slopes: Floats | None = None


@final
@dataclass
class Broadcast(Node):
    """The sum or the product of a tensor and one number per channel, the second input."""

    product: bool = False


@final
@dataclass
class NormalizeGroups(Node):
    """GroupNorm; InstanceNorm if every channel is a group."""

    groups: int = 1
    scale: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    bias: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    epsilon: float = 1e-5

    takes_groups: ClassVar[bool] = False


@final
@dataclass
class Softmax(Node):
    """The softmax over the channels of each position."""

    takes_groups: ClassVar[bool] = False


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
    the fourth input, has queries as positions and heads · keys as channels. A query whose mask is
    -∞ for all keys gives zeros, as in `scaled_dot_product_attention`, or NaN, as the softmax that
    is written out (``written_out``).
    """

    heads: tuple[tuple[int, int, int], ...] = ()
    depth: int = 0
    keys: int = 0
    scale: float = 1.0
    causal: bool = False
    mask_heads: int = 1
    mask: Floats | None = None
    written_out: bool = False

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


@dataclass(frozen=True)
class CellWeights:
    """The weights of one direction of a recurrent layer, in PyTorch's order of gates."""

    of_input: Floats
    of_state: Floats
    input_bias: Floats
    state_bias: Floats


@final
@dataclass
class Recurrent(Node):
    """LSTM, GRU or RNN: layers with one or two directions each.

    The inputs are the sequence, and optionally the initial hidden states and cell states, with one
    position per layer and direction. The channels of the output are the units of all directions.
    Its positions are the steps, then the final hidden states of all layers, then their final cell
    states, as far as they are ``returned``.
    """

    cell: Cell = Cell.LSTM
    layers: tuple[tuple[CellWeights, ...], ...] = ()
    steps: int = 1
    # Whether the hidden state of each step, the final hidden states and cell states are needed.
    returned: tuple[bool, bool, bool] = (True, False, False)

    @property
    def units(self) -> int:
        """Number of hidden units of one direction."""
        return int(self.layers[0][0].of_state.shape[1])

    @property
    def directions(self) -> int:
        """Number of directions."""
        return len(self.layers[0])

    @property
    def density(self) -> float:
        """Fraction of the weights that are not zero."""
        own = [w for layer in self.layers for c in layer for w in (c.of_input, c.of_state)]
        return float(sum(map(np.count_nonzero, own)) / max(1, sum(w.size for w in own)))


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
