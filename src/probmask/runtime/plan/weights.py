"""The non-zero weights of a layer as the kernels read them, and where their inputs lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import Convolution, Pair
from probmask.runtime.plan.tensor_layout import Layout, Longs, Tap, phase_sizes, plane_layout, taps

# What a row costs beside its weights, in weights: its bias and the storing of its results.
_ROW_COST = 4


def places_of_one(node: Convolution, layout: Layout) -> tuple[Longs, list[Tap]]:
    """For one output position: where each weight's input lies, by channel and tap."""
    form = node.input_forms[0]
    if node.rank == 0:  # each number of the image is a channel of the weight
        y, x = np.divmod(np.arange(form.positions), form.width)
        within = layout.lead + (y * layout.stride + x) * layout.lanes
        places = (np.arange(form.channels)[:, None] * layout.plane + within).reshape(-1, 1)
        return places, [Tap(0, 0, (0, 0), (0, 0))]
    found = taps(node)
    steps = [
        (tap.shift[0] * node.stride[0] + tap.phase[0], tap.shift[1] * node.stride[1] + tap.phase[1])
        for tap in found
    ]
    within = np.array([layout.place(*step) for step in steps], np.int64)
    return np.arange(form.channels)[:, None] * layout.plane + within, found


def places_direct(node: Convolution, layout: Layout) -> tuple[Longs, list[Tap]]:
    """Where each weight's inputs begin, from the plane's first position."""
    found = taps(node)
    within = np.array(
        [(tap.shift[0] * layout.stride + tap.shift[1]) * layout.lanes for tap in found], np.int64
    )
    channels = np.arange(node.input_forms[0].channels)
    return channels[:, None] * layout.plane + within, found


def read_taps(node: Convolution, found: Sequence[Tap]) -> npt.NDArray[np.bool_]:
    """By input channel and tap: whether any output channel has a weight there."""
    outputs, per_group = node.weight.shape[:2]
    kept = _tap_weights(node, found) != 0
    grouped = kept.reshape(node.groups, outputs // node.groups, per_group, len(found))
    read: npt.NDArray[np.bool_] = grouped.any(1).reshape(node.groups * per_group, len(found))
    return read


def _tap_weights(node: Convolution, found: Sequence[Tap]) -> npt.NDArray[np.float32]:
    rows, columns = [tap.row for tap in found], [tap.column for tap in found]
    return node.weight[:, :, rows, columns]


def sparse_rows(
    node: Convolution, places: Longs, found: Sequence[Tap], blocks: int
) -> tuple[Longs, Longs, npt.NDArray[np.float32]]:
    """Of each block and output channel: where its weights begin, their inputs and values."""
    weights = _tap_weights(node, found)
    outputs, per_group = weights.shape[:2]
    row, channel, tap = np.nonzero(weights)
    group = row // max(1, outputs // node.groups)
    block = channel * blocks // max(1, per_group)
    order = np.argsort(block * outputs + row, kind="stable")
    starts = np.zeros(blocks * outputs + 1, np.int64)
    np.cumsum(np.bincount(block * outputs + row, minlength=blocks * outputs), out=starts[1:])
    offsets = places[group * per_group + channel, tap]
    return starts, offsets[order], weights[row, channel, tap][order]


def splits(weights: Longs, threads: int) -> Longs:
    """The first row of each thread, such that all have about as much to do."""
    cost = np.concatenate([[0], np.cumsum(weights + _ROW_COST)])
    wanted = cost[-1] * np.arange(threads + 1) / threads
    splits = np.searchsorted(cost, wanted)
    splits[0], splits[-1] = 0, len(weights)
    first_rows: Longs = splits.astype(np.int64)
    return first_rows


@dataclass(frozen=True)
class Phases:
    """The planes of a layer's phases: those that a weight reads."""

    layout: Layout
    entries: Longs  # of each plane: where it begins in the source and here, its rows and columns
    places: Longs  # by input channel and tap: where a weight's inputs begin
    taps: list[Tap]


def phases_of(node: Convolution, source: Layout, target: Layout) -> Phases:
    """Plan the phases of a layer's input, in rows as far apart as those of its output."""
    found = taps(node)
    layout = _layout(node, found, target)
    index = _index(node, found)
    entries = [
        (
            channel * source.plane + source.place(*phase),
            number * layout.plane + layout.lead,
            *phase_sizes(node, phase),
        )
        for (channel, phase), number in index.items()
    ]
    places = np.zeros((node.input_forms[0].channels, len(found)), np.int64)
    for channel in range(len(places)):
        for k, tap in enumerate(found):
            plane = index.get((channel, tap.phase), 0) * layout.plane
            y, x = tap.shift
            places[channel, k] = plane + (y * layout.stride + x) * target.lanes
    return Phases(layout, np.array(entries, np.int64).reshape(-1, 4), places, found)


def _layout(node: Convolution, found: list[Tap], target: Layout) -> Layout:
    sizes = [phase_sizes(node, tap.phase) for tap in found]
    return plane_layout(
        max([1, *(height for height, _ in sizes)]),
        max([1, *(width for _, width in sizes)]),
        target.stride,
        target.lanes,
        [tap.shift for tap in found],
        run=target.vectors * WIDTH,
    )


def _index(node: Convolution, found: list[Tap]) -> dict[tuple[int, Pair], int]:
    """The number of each plane, by input channel and phase."""
    read = read_taps(node, found)
    phases = sorted({tap.phase for tap in found})
    index: dict[tuple[int, Pair], int] = {}
    for channel in range(len(read)):
        for phase in phases:
            if any(read[channel, k] for k, tap in enumerate(found) if tap.phase == phase):
                index[channel, phase] = len(index)
    return index
