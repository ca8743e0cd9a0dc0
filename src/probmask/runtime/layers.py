"""The layers with weights: sparse rows over tiles of positions, or times a vector."""

import numpy as np
from numba import njit

from probmask.runtime.columns import (
    BIAS,
    BLOCKS,
    LANES,
    LINES,
    MASK,
    OTHER,
    OTHER_PLANE,
    ROWS,
    SOURCE,
    SOURCE_LEAD,
    STARTS,
    TARGET,
    TARGET_LEAD,
    TARGET_PLANE,
    TARGET_STRIDE,
    TILES,
    VECTORS,
    WEIGHTS,
)
from probmask.runtime.curves import LOOSE
from probmask.runtime.tiles import FIRST_PART, LAST_PART, MIDDLE_PART, MOST, sparse_rows
from probmask.runtime.vectors import WIDTH


@njit(error_model="numpy")
def convolve(op, arena, longs, offsets, values, consts, masks, low, high, doubt, first, last):
    """Output channels from ``first`` to ``last``: all of them per tile and block of inputs."""
    at = arena.ctypes.data
    source = at + 4 * (op[SOURCE] + op[SOURCE_LEAD])
    target = at + 4 * (op[TARGET] + op[TARGET_LEAD])
    other = at + 4 * (op[OTHER] + op[TARGET_LEAD]) if op[OTHER] >= 0 else 0
    mask = masks.ctypes.data + 4 * op[MASK]
    line = 4 * op[TARGET_STRIDE] * op[LANES]
    rows, blocks = op[ROWS], op[BLOCKS]
    done = 0
    for tile in range(op[TILES]):
        if op[LINES] > 0:
            shape = op[LINES] * (MOST + 1) + op[VECTORS]
            skipped = tile * op[LINES] * line
        else:
            vectors = op[VECTORS] * (tile + 1) // op[TILES] - done
            shape = MOST + 1 + vectors
            skipped = 4 * WIDTH * done
            done += vectors
        here = target + skipped
        for block in range(blocks):
            # What the blocks before have summed is in the target, and is added like a residual.
            before, plane = here, 4 * op[TARGET_PLANE]
            if block == 0:
                before, plane = other + skipped if other != 0 else 0, 4 * op[OTHER_PLANE]
            stage = FIRST_PART if block == 0 else MIDDLE_PART
            if block == blocks - 1:
                stage = LAST_PART
            sparse_rows(
                shape,
                source + skipped,
                offsets.ctypes.data + 4 * op[WEIGHTS],
                values.ctypes.data + 4 * op[WEIGHTS],
                longs.ctypes.data + 8 * (op[STARTS] + block * rows),
                first,
                last,
                here,
                4 * op[TARGET_PLANE],
                consts.ctypes.data + 4 * (op[BIAS] + block * rows),
                before,
                plane,
                mask + skipped,
                line,
                stage,
                low,
                high,
                doubt.ctypes.data,
            )


@njit(error_model="numpy", fastmath=LOOSE)
def multiply(op, arena, longs, offsets, values, consts, low, high, doubt, first, last):
    """Rows times a vector, four sums at a time."""
    starts = longs[op[STARTS] :]
    base = op[SOURCE]
    wrong = np.float32(0.0)
    for r in range(first, last):
        a = b = c = d = np.float32(0.0)
        k, end = starts[r] + op[WEIGHTS], starts[r + 1] + op[WEIGHTS]
        while k + 4 <= end:
            a += values[k] * arena[base + offsets[k]]
            b += values[k + 1] * arena[base + offsets[k + 1]]
            c += values[k + 2] * arena[base + offsets[k + 2]]
            d += values[k + 3] * arena[base + offsets[k + 3]]
            k += 4
        while k < end:
            a += values[k] * arena[base + offsets[k]]
            k += 1
        total = (a + b) + (c + d) + consts[op[BIAS] + r]
        if op[OTHER] >= 0:
            total += arena[op[OTHER] + r]
        wrong += total * np.float32(0.0)
        arena[op[TARGET] + r] = min(max(total, low), high)
    doubt[0] += wrong
