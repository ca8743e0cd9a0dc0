"""The input of a layer with strides, split into phases: then every weight reads a run again."""

from dataclasses import dataclass

import numpy as np

from probmask.runtime.layout import Layout, Tap, phase_sizes, plane_layout, taps
from probmask.runtime.nodes import Convolution, Pair
from probmask.runtime.numbers import Longs
from probmask.runtime.vectors import WIDTH
from probmask.runtime.weights import read_taps


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
