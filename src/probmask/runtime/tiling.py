"""How a layer is cut: its positions into tiles, its input channels into blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probmask.runtime.layout import Layout, Tap
from probmask.runtime.nodes import Convolution
from probmask.runtime.numbers import Longs
from probmask.runtime.tiles import MOST, SHAPES
from probmask.runtime.vectors import WIDTH

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
