"""The memory layout of tensors, and how a layer's loops are tiled over it.

A tensor is stored as planes, one per channel. A plane holds one channel of an image, or of several
images interleaved at each position (lanes). Its rows are ``stride`` positions apart, which is more
than the image's width. The gap between two rows is the right padding of the first and the left
padding of the second, and is always zero. So the inputs that one weight reads for all positions of
a plane are one contiguous run: the output's run shifted by a constant.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.tiles import MAX_VECTORS, SHAPES
from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import (
    Convolution,
    Form,
    Node,
    Pair,
    TransposedConvolution,
)
from probmask.runtime.plan.phases import phase_convolution

Longs = npt.NDArray[np.int64]
# Planes are aligned to this many floats: one cache line.
_LINE = 16
# Planes at a multiple of this many floats would map to the same sets of the L1 cache.
_ALIASING = 512
# Bytes of the L1 cache for the input of a tile. The rest is for weights and sums.
_CACHE_BYTES = 20_000
# Weights per row that a block needs to be worth loading and storing its sums.
_MIN_WEIGHTS = 6


@dataclass(frozen=True)
class Layout:
    """Layout of a plane. ``lead`` and ``plane`` count floats, ``stride`` counts positions."""

    height: int
    width: int
    stride: int
    lead: int
    plane: int
    lanes: int

    @property
    def run(self) -> int:
        """Number of floats from the first position to the last."""
        return ((self.height - 1) * self.stride + self.width) * self.lanes

    @property
    def vectors(self) -> int:
        """Number of vectors in the run."""
        return -(-self.run // WIDTH)

    def offset(self, y: int, x: int) -> int:
        """Return the offset of a position's first lane from the start of the plane."""
        return self.lead + (y * self.stride + x) * self.lanes

    def position_bits(self) -> npt.NDArray[np.int32]:
        """Return the run's positions as all ones and its padding as zeros."""
        bits = np.zeros(self.vectors * WIDTH, np.int32)
        rows, columns = np.arange(self.height)[:, None], np.arange(self.width)
        positions = (rows * self.stride + columns).ravel()
        bits[(positions[:, None] * self.lanes + np.arange(self.lanes)).ravel()] = -1
        return bits


@dataclass(frozen=True)
class Tap:
    """An element of the convolution kernel.

    Its input row is ``shift[0] * stride + phase[0]`` from the output row times the stride, and
    likewise for the column. With stride 1 the phase is 0.
    """

    row: int
    column: int
    phase: Pair
    shift: Pair


def taps_of(node: Convolution) -> list[Tap]:
    """Return the kernel elements that read the image at some position, not only padding."""
    (top, _), (left, _) = node.padding
    before, after = node.input_forms[0], node.form
    assert after is not None
    taps = []
    for row in range(node.weight.shape[2]):
        y, phase_y = divmod(row * node.dilation[0] - top, node.stride[0])
        if not _reads_image(y, phase_y, node.stride[0], before.height, after.height):
            continue
        for column in range(node.weight.shape[3]):
            x, phase_x = divmod(column * node.dilation[1] - left, node.stride[1])
            if _reads_image(x, phase_x, node.stride[1], before.width, after.width):
                taps.append(Tap(row, column, (phase_y, phase_x), (y, x)))
    return taps


def _reads_image(shift: int, phase: int, stride: int, size: int, outputs: int) -> bool:
    first = (shift * stride) + phase
    return (
        first < size
        and first + (outputs - 1) * stride >= 0
        and (first >= 0 or any(0 <= first + o * stride < size for o in range(outputs)))
    )


def phase_size(node: Convolution, phase: Pair) -> Pair:
    """Return the numbers of rows and columns of the input that belong to a phase."""
    form = node.input_forms[0]
    height, width = (
        -(-(size - start) // step)
        for size, start, step in zip((form.height, form.width), phase, node.stride, strict=True)
    )
    return height, width


class Layouts:
    """One layout per image size, chosen so that layers read and write it without copies."""

    def __init__(self, nodes: Sequence[Node], lanes: int) -> None:
        self.lanes = lanes
        self._convolutions = [
            phase_convolution(node) if isinstance(node, TransposedConvolution) else node
            for node in nodes
            if isinstance(node, Convolution | TransposedConvolution)
        ]
        self._strides: dict[Pair, int] = {}
        for node in self._convolutions:
            assert node.form is not None
            size = (node.form.height, node.form.width)
            needed = _needed_stride(node, taps_of(node))
            self._strides[size] = max(self._strides.get(size, size[1]), needed)
        self._layouts: dict[Pair, Layout] = {}

    def of(self, form: Form) -> Layout:
        """Return the layout of a tensor."""
        size = (form.height, form.width)
        if size not in self._layouts:
            self._layouts[size] = self._create(*size)
        return self._layouts[size]

    def is_direct(self, node: Convolution) -> bool:
        """Return whether a layer reads its input in place; otherwise it reads split phases."""
        assert node.form is not None
        if node.form.positions == 1:
            return True
        before = node.input_forms[0]
        same = self.stride(before.height, before.width) == self.stride(
            node.form.height, node.form.width
        )
        return node.stride == (1, 1) and same and before.positions > 1

    def stride(self, height: int, width: int) -> int:
        """Return the number of positions from one row to the next."""
        return self._strides.get((height, width), width)

    def _create(self, height: int, width: int) -> Layout:
        if height == width == self.lanes == 1:
            return Layout(1, 1, 1, 0, 1, 1)
        stride = self.stride(height, width)
        readers = [
            node
            for node in self._convolutions
            if (node.input_forms[0].height, node.input_forms[0].width) == (height, width)
            and self.is_direct(node)
            and node.form is not None
            and node.form.positions > 1
        ]
        shifts = [tap.shift for node in readers for tap in taps_of(node)]
        return padded_layout(height, width, stride, self.lanes, shifts)


def padded_layout(
    height: int, width: int, stride: int, lanes: int, shifts: Iterable[Pair], *, run: int = 0
) -> Layout:
    """Return a layout with enough padding for all shifts of its run, or of ``run`` floats."""
    offsets = [0, *((y * stride + x) * lanes for y, x in shifts)]
    lead = -(-max(0, -min(offsets)) // _LINE) * _LINE
    own = -(-(((height - 1) * stride + width) * lanes) // WIDTH) * WIDTH
    plane = -(-(lead + max(own, run) + max(0, *offsets)) // _LINE) * _LINE
    if plane % _ALIASING == 0:
        plane += _LINE
    return Layout(height, width, stride, lead, plane, lanes)


def _needed_stride(node: Convolution, taps: Sequence[Tap]) -> int:
    """Return the smallest stride at which a shifted run reads zeros outside the image."""
    assert node.form is not None
    width = node.form.width
    if node.form.positions == 1 or not taps:
        return width
    columns = [tap.shift[1] for tap in taps]
    data = max(phase_size(node, tap.phase)[1] for tap in taps)
    return max(width, data + max(0, -min(columns)), width + max(0, *columns))


@dataclass(frozen=True)
class Tiling:
    """How a plane is divided into tiles.

    A tile is ``lines`` image rows of ``vectors`` vectors each. If ``lines`` is 0, the tiles are
    equal parts of the run, which has ``vectors`` vectors.
    """

    tiles: int
    lines: int
    vectors: int


def tiling_of(layout: Layout) -> Tiling:
    """Return the cheapest tiling: parts of the run, or image rows without their padding."""
    run = layout.vectors
    costs = {Tiling(-(-run // MAX_VECTORS), 0, run): run + 2 * -(-run // MAX_VECTORS)}
    vectors, rest = divmod(layout.width * layout.lanes, WIDTH)
    for lines, per_line in SHAPES:
        if not rest and per_line == vectors and layout.height % lines == 0:
            tiles = layout.height // lines
            costs[Tiling(tiles, lines, vectors)] = tiles * (lines * vectors + 2)
    return min(costs, key=lambda tiling: costs[tiling])


def blocks_of(
    node: Convolution, offsets: Longs, taps: Sequence[Tap], tiling: Tiling, layout: Layout
) -> int:
    """Return the number of blocks of input channels.

    A tile's input of one block has to fit into the L1 cache, if the blocks have enough weights.
    """
    if node.groups > 1 or not taps or not len(offsets):
        return 1
    channels = len(offsets)
    if tiling.lines:
        length = ((tiling.lines - 1) * layout.stride + layout.width) * layout.lanes
    else:
        length = -(-tiling.vectors // tiling.tiles) * WIDTH
    span = int(offsets[0].max() - offsets[0].min()) + length
    fitting = 4 * span * channels / _CACHE_BYTES
    weights = np.count_nonzero(node.weight) / max(1, len(node.weight))
    return max(1, min(round(fitting), int(weights / _MIN_WEIGHTS), channels))
