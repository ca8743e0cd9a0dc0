"""A lowered network: a list of nodes in an order in which they can run.

Each node can run in PyTorch (`call`); those with a `form` can also run on the engine's kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.runtime.fields import Curve

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
