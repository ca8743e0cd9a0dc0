"""The non-zero weights of a layer as the kernels read them, and the offsets of their inputs.

Offsets are given per input channel and tap. A strided layer reads its input from a copy that is
split into phases, so that the inputs of every weight are a contiguous run again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.rows import SPLIT_STEPS
from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import Convolution, Pair
from probmask.runtime.plan.tensor_layout import (
    Layout,
    Longs,
    Tap,
    padded_layout,
    phase_size,
    taps_of,
)

# Cost of a row without weights, for its bias and for storing its results, in weights.
_ROW_COST = 4


def single_position_offsets(node: Convolution, layout: Layout) -> tuple[Longs, list[Tap]]:
    """Return the offsets of the inputs of a layer whose output has one position."""
    form = node.input_forms[0]
    if node.rank == 0:  # every element of the image is a channel of the weight
        y, x = np.divmod(np.arange(form.positions), form.width)
        within = layout.lead + (y * layout.stride + x) * layout.lanes
        offsets = (np.arange(form.channels)[:, None] * layout.plane + within).reshape(-1, 1)
        return offsets, [Tap(0, 0, (0, 0), (0, 0))]
    taps = taps_of(node)
    positions = [
        (tap.shift[0] * node.stride[0] + tap.phase[0], tap.shift[1] * node.stride[1] + tap.phase[1])
        for tap in taps
    ]
    within = np.array([layout.offset(*position) for position in positions], np.int64)
    return np.arange(form.channels)[:, None] * layout.plane + within, taps


def direct_offsets(node: Convolution, layout: Layout) -> tuple[Longs, list[Tap]]:
    """Return where each weight's run of inputs starts, relative to the plane's first position."""
    taps = taps_of(node)
    within = np.array(
        [(tap.shift[0] * layout.stride + tap.shift[1]) * layout.lanes for tap in taps], np.int64
    )
    channels = np.arange(node.input_forms[0].channels)
    return channels[:, None] * layout.plane + within, taps


@dataclass(frozen=True)
class Phases:
    """The planes of a strided layer's phases that weights read.

    If all phases of a row can be split at once, those are present too that no weight reads.
    """

    layout: Layout
    # One row per plane: offset in the source, offset here, number of rows, number of columns.
    entries: Longs
    # Offsets of the inputs, by input channel and tap.
    offsets: Longs
    taps: list[Tap]
    # Number of entries in a row that `split_row` can copy at once, or 1.
    together: int


def phases_of(node: Convolution, source: Layout, target: Layout) -> Phases:
    """Plan the phases of a layer's input, with the row stride of its output."""
    taps = taps_of(node)
    layout = _phase_layout(node, taps, target)
    together = _split_together(node, taps, target)
    planes = _phase_planes(node, taps, whole_rows=together > 1)
    entries = [
        (
            channel * source.plane + source.offset(*phase),
            number * layout.plane + layout.lead,
            *phase_size(node, phase),
        )
        for (channel, phase), number in planes.items()
    ]
    offsets = np.zeros((node.input_forms[0].channels, len(taps)), np.int64)
    for channel in range(len(offsets)):
        for k, tap in enumerate(taps):
            plane = planes.get((channel, tap.phase), 0) * layout.plane
            y, x = tap.shift
            offsets[channel, k] = plane + (y * layout.stride + x) * target.lanes
    return Phases(layout, np.array(entries, np.int64).reshape(-1, 4), offsets, taps, together)


def _split_together(node: Convolution, taps: list[Tap], target: Layout) -> int:
    """Return the number of phases that rows of the input are split into at once, or 1."""
    step = node.stride[1]
    phases = {tap.phase for tap in taps}
    all_columns = len(phases) == step * len({row for row, _ in phases})
    same_width = node.input_forms[0].width % step == 0
    is_image = node.depth is None and target.lanes == 1
    return step if step in SPLIT_STEPS and all_columns and same_width and is_image else 1


def _phase_layout(node: Convolution, taps: list[Tap], target: Layout) -> Layout:
    sizes = [phase_size(node, tap.phase) for tap in taps]
    return padded_layout(
        max([1, *(height for height, _ in sizes)]),
        max([1, *(width for _, width in sizes)]),
        target.stride,
        target.lanes,
        [tap.shift for tap in taps],
        run=target.vectors * WIDTH,
    )


def _phase_planes(
    node: Convolution, taps: list[Tap], *, whole_rows: bool
) -> dict[tuple[int, Pair], int]:
    """Number the planes that a weight reads, or the whole rows of phases, by channel and phase."""
    is_read = _read_taps(node, taps)
    phases = sorted({tap.phase for tap in taps})
    slices = node.depth.inputs if node.depth is not None else 1
    planes: dict[tuple[int, Pair], int] = {}
    for channel in range(len(is_read)):
        for phase in phases:
            read_by = (
                k
                for k, tap in enumerate(taps)
                if tap.phase == phase or (whole_rows and tap.phase[0] == phase[0])
            )
            if any(is_read[channel, k] for k in read_by):
                # The slices of a volume are as far from each other in all channels and phases.
                for place in range(channel * slices, (channel + 1) * slices):
                    planes[place, phase] = len(planes)
    return planes


def _read_taps(node: Convolution, taps: Sequence[Tap]) -> npt.NDArray[np.bool_]:
    """Return, by input channel and tap, whether some output channel has a non-zero weight.

    All slices of a volume are one channel.
    """
    outputs, per_group = node.weight.shape[:2]
    slices = node.depth.kernel if node.depth is not None else 1
    nonzero = _tap_weights(node, taps) != 0
    grouped = nonzero.reshape(
        node.groups, outputs // node.groups, per_group // slices, slices, len(taps)
    )
    is_read: npt.NDArray[np.bool_] = grouped.any((1, 3)).reshape(-1, len(taps))
    return is_read


def _tap_weights(node: Convolution, taps: Sequence[Tap]) -> npt.NDArray[np.float32]:
    rows, columns = [tap.row for tap in taps], [tap.column for tap in taps]
    return node.weight[:, :, rows, columns]


@dataclass(frozen=True)
class SparseRows:
    """The non-zero weights of a layer, by block of input channels and by row.

    A row has the weights of an output channel. Each thread computes the same output channels in all
    blocks.
    """

    starts: Longs  # where the weights of each block's rows start
    offsets: Longs  # of the inputs
    values: npt.NDArray[np.float32]
    order: Longs  # output channel of each block's rows
    first_rows: Longs  # of each thread


def sparse_rows_of(
    node: Convolution,
    input_offsets: Longs,
    taps: Sequence[Tap],
    blocks: int,
    threads: int,
    *,
    by_count: bool,
) -> SparseRows:
    """Return the non-zero weights; with ``by_count``, rows of equal length follow each other.

    The processor then predicts where their loops end. For a ViT at 98 %, with four weights per row,
    that saves a fifth of the time of its linear layers.
    """
    weights = _tap_weights(node, taps)
    outputs, per_group = weights.shape[:2]
    channel, column, tap = np.nonzero(weights)
    block = column * blocks // max(1, per_group)
    counts = np.bincount(block * outputs + channel, minlength=blocks * outputs)
    counts = counts.reshape(blocks, outputs)
    first_rows = split_rows(counts.sum(0), threads)
    thread = np.searchsorted(first_rows, np.arange(outputs), side="right")
    keys = counts if by_count else np.zeros_like(counts)
    order = np.array([np.lexsort((key, thread)) for key in keys]).reshape(blocks, outputs)
    row = np.argsort(order, axis=1)[block, channel]  # where the order has each weight's channel
    starts = np.zeros(blocks * outputs + 1, np.int64)
    np.cumsum(np.take_along_axis(counts, order, 1), out=starts[1:])
    group = channel // max(1, outputs // node.groups)
    offsets = input_offsets[group * per_group + column, tap]
    places = np.argsort(block * outputs + row, kind="stable")
    values = weights[channel, column, tap]
    return SparseRows(starts, offsets[places], values[places], order, first_rows)


def split_rows(weights_per_row: Longs, threads: int) -> Longs:
    """Return the first row of each thread, such that all threads have about the same work."""
    cost = np.concatenate([[0], np.cumsum(weights_per_row + _ROW_COST)])
    targets = cost[-1] * np.arange(threads + 1) / threads
    first_rows: Longs = np.searchsorted(cost, targets).astype(np.int64)
    first_rows[0], first_rows[-1] = 0, len(weights_per_row)
    return first_rows
