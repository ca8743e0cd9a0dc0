"""Where the numbers of a tensor lie: planes of padded rows, one after the other.

A plane holds one channel of an image, or of several images side by side (lanes). Its rows are
``stride`` positions apart, more than the image is wide: what lies between two rows is the padding
on the right of the one and on the left of the other, and is always zero. So a weight's inputs for
all positions of a plane are one run, shifted by a constant.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.tiles import MOST, SHAPES
from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import Convolution, Form, Node, Pair

Longs = npt.NDArray[np.int64]
# Planes begin at multiples of so many floats: a cache line.
_LINE = 16


# Planes this many floats apart would fall into the same few places of the first cache.
_ALIASING = 512


@dataclass(frozen=True)
class Layout:
    """One plane. ``lead`` and ``plane`` are in floats, ``stride`` in positions."""

    height: int
    width: int
    stride: int
    lead: int
    plane: int
    lanes: int

    @property
    def run(self) -> int:
        """Floats from the first position to the last."""
        return ((self.height - 1) * self.stride + self.width) * self.lanes

    @property
    def vectors(self) -> int:
        """In the run from the first position to the last."""
        return -(-self.run // WIDTH)

    def place(self, y: int, x: int) -> int:
        """Where the first lane of a position lies, from the plane's first float."""
        return self.lead + (y * self.stride + x) * self.lanes

    def mask(self) -> npt.NDArray[np.int32]:
        """All ones where the run has positions, zeros in the padding between."""
        mask = np.zeros(self.vectors * WIDTH, np.int32)
        rows, columns = np.arange(self.height)[:, None], np.arange(self.width)
        positions = (rows * self.stride + columns).ravel()
        mask[(positions[:, None] * self.lanes + np.arange(self.lanes)).ravel()] = -1
        return mask


@dataclass(frozen=True)
class Tap:
    """A place of the kernel: its phase (0 for stride 1), and its shift in steps of the stride."""

    row: int
    column: int
    phase: Pair
    shift: Pair


def taps(node: Convolution) -> list[Tap]:
    """The places of the kernel that meet the image at any position."""
    (top, _), (left, _) = node.padding
    before, after = node.input_forms[0], node.form
    assert after is not None
    found = []
    for row in range(node.weight.shape[2]):
        y, phase_y = divmod(row * node.dilation[0] - top, node.stride[0])
        if not _meets(y, phase_y, node.stride[0], before.height, after.height):
            continue
        for column in range(node.weight.shape[3]):
            x, phase_x = divmod(column * node.dilation[1] - left, node.stride[1])
            if _meets(x, phase_x, node.stride[1], before.width, after.width):
                found.append(Tap(row, column, (phase_y, phase_x), (y, x)))
    return found


def _meets(shift: int, phase: int, stride: int, size: int, outputs: int) -> bool:
    first = (shift * stride) + phase
    return (
        first < size
        and first + (outputs - 1) * stride >= 0
        and (first >= 0 or any(0 <= first + o * stride < size for o in range(outputs)))
    )


def phase_sizes(node: Convolution, phase: Pair) -> Pair:
    """Rows and columns of the input's positions of a phase."""
    form = node.input_forms[0]
    height, width = (
        -(-(size - start) // step)
        for size, start, step in zip((form.height, form.width), phase, node.stride, strict=True)
    )
    return height, width


class Layouts:
    """One layout per size of image, such that layers read and write it without copies."""

    def __init__(self, nodes: Sequence[Node], lanes: int) -> None:
        self.lanes = lanes
        self._convolutions = [node for node in nodes if isinstance(node, Convolution)]
        self._strides: dict[Pair, int] = {}
        for node in self._convolutions:
            assert node.form is not None
            size = (node.form.height, node.form.width)
            needed = _needed_stride(node, taps(node))
            self._strides[size] = max(self._strides.get(size, size[1]), needed)
        self._made: dict[Pair, Layout] = {}

    def of(self, form: Form) -> Layout:
        """The layout of a tensor."""
        size = (form.height, form.width)
        if size not in self._made:
            self._made[size] = self._make(*size)
        return self._made[size]

    def is_direct(self, node: Convolution) -> bool:
        """Whether the layer reads its input as it lies; otherwise it needs its phases."""
        assert node.form is not None
        if node.form.positions == 1:
            return True
        before = node.input_forms[0]
        same = self.stride(before.height, before.width) == self.stride(
            node.form.height, node.form.width
        )
        return node.stride == (1, 1) and same and before.positions > 1

    def stride(self, height: int, width: int) -> int:
        """Positions from one row to the next."""
        return self._strides.get((height, width), width)

    def _make(self, height: int, width: int) -> Layout:
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
        shifts = [tap.shift for node in readers for tap in taps(node)]
        return plane_layout(height, width, stride, self.lanes, shifts)


def plane_layout(
    height: int, width: int, stride: int, lanes: int, shifts: Iterable[Pair], *, run: int = 0
) -> Layout:
    """A plane with zeros around it for all shifts of a run (its own, or one of ``run`` floats)."""
    offsets = [0, *((y * stride + x) * lanes for y, x in shifts)]
    lead = -(-max(0, -min(offsets)) // _LINE) * _LINE
    own = -(-(((height - 1) * stride + width) * lanes) // WIDTH) * WIDTH
    plane = -(-(lead + max(own, run) + max(0, *offsets)) // _LINE) * _LINE
    if plane % _ALIASING == 0:
        plane += _LINE
    return Layout(height, width, stride, lead, plane, lanes)


def _needed_stride(node: Convolution, found: Sequence[Tap]) -> int:
    """So wide that a shifted run reads zeros where it leaves the image."""
    assert node.form is not None
    width = node.form.width
    if node.form.positions == 1 or not found:
        return width
    columns = [tap.shift[1] for tap in found]
    data = max(phase_sizes(node, tap.phase)[1] for tap in found)
    return max(width, data + max(0, -min(columns)), width + max(0, *columns))


# Of the first cache, for what a tile reads; the rest is for weights and sums.
_CACHE = 20_000  # bytes


# Weights of a row that a block has to have, to be worth the loading and storing of its sums.
_LEAST_WEIGHTS = 6


@dataclass(frozen=True)
class Tiling:
    """How a plane is cut into tiles: into so many, of lines of so many vectors; 0: of the run."""

    tiles: int
    lines: int
    vectors: int


def tiling_of(layout: Layout) -> Tiling:
    """Rows of the image where the padding between them would cost more than more tiles do."""
    run = layout.vectors
    options = {Tiling(-(-run // MOST), 0, run): run + 2 * -(-run // MOST)}
    vectors, rest = divmod(layout.width * layout.lanes, WIDTH)
    for lines, fitting in SHAPES:
        if not rest and fitting == vectors and layout.height % lines == 0:
            tiles = layout.height // lines
            options[Tiling(tiles, lines, vectors)] = tiles * (lines * vectors + 2)
    return min(options, key=lambda tiling: options[tiling])


def blocks_of(
    node: Convolution,
    places: Longs,
    found: Sequence[Tap],
    tiling: Tiling,
    layout: Layout,
) -> int:
    """Of input channels: so many that what a tile reads of one stays in the first cache."""
    if node.groups > 1 or not found:
        return 1
    channels = len(places)
    if tiling.lines:
        length = ((tiling.lines - 1) * layout.stride + layout.width) * layout.lanes
    else:
        length = -(-tiling.vectors // tiling.tiles) * WIDTH
    span = int(places[0].max() - places[0].min()) + length
    wanted = 4 * span * channels / _CACHE
    weights = np.count_nonzero(node.weight) / max(1, len(node.weight))
    return max(1, min(round(wanted), int(weights / _LEAST_WEIGHTS), channels))
