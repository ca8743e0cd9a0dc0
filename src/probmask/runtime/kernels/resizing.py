"""Kernels that enlarge images: interpolation, and merging the phases of transposed convolutions."""

import numpy as np
from numba import njit

from probmask.runtime.kernels.elementwise import FAST_SUMS
from probmask.runtime.kernels.operation_table import (
    BIAS,
    HEIGHT,
    IMAGE_WIDTH,
    LANES,
    SOURCE,
    SOURCE_LEAD,
    SOURCE_PLANE,
    SOURCE_STRIDE,
    SOURCE_WIDTH,
    STEP_X,
    STEP_Y,
    TABLE,
    TARGET,
    TARGET_LEAD,
    TARGET_PLANE,
    TARGET_STRIDE,
)
from probmask.runtime.kernels.rows import interleave_two


@njit(error_model="numpy")
def merge_phases(op, arena, first, last):
    """Write the phases of channels ``first`` to ``last`` between each other.

    Output row y is row y // step of the phases y % step, and likewise for columns. The phases of a
    channel are next to each other in the source.
    """
    lanes, step_y, step_x, width = op[LANES], op[STEP_Y], op[STEP_X], op[IMAGE_WIDTH]
    at = arena.ctypes.data
    for c in range(first, last):
        for y in range(op[HEIGHT]):
            plane = (c * step_y + y % step_y) * step_x
            row = op[SOURCE_LEAD] + y // step_y * op[SOURCE_STRIDE] * lanes
            source = op[SOURCE] + plane * op[SOURCE_PLANE] + row
            target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
            target += y * op[TARGET_STRIDE] * lanes
            if step_x == 2 and lanes == 1:
                odd = source + op[SOURCE_PLANE]
                interleave_two(at + 4 * source, at + 4 * odd, at + 4 * target, width // 2)
                if width % 2:
                    arena[target + width - 1] = arena[source + width // 2]
                continue
            for x in range(width):
                place = source + x % step_x * op[SOURCE_PLANE] + x // step_x * lanes
                for lane in range(lanes):
                    arena[target + x * lanes + lane] = arena[place + lane]


@njit(error_model="numpy", fastmath=FAST_SUMS)
def resize(op, arena, longs, consts, scratch, first, last):
    """Interpolate channels ``first`` to ``last``.

    The table holds the first and the second source row of each output row, then those of the
    columns. The constants hold the weight of each second row, then of each second column.
    """
    height, width, table, before = op[HEIGHT], op[IMAGE_WIDTH], op[TABLE], op[SOURCE_WIDTH]
    left = longs[table + 2 * height : table + 2 * height + width]
    right = longs[table + 2 * height + width : table + 2 * height + 2 * width]
    weights = consts[op[BIAS] + height : op[BIAS] + height + width]
    middle = scratch[:before]
    for c in range(first, last):
        plane = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
        for y in range(height):
            upper, lower = longs[table + y], longs[table + height + y]
            weight = consts[op[BIAS] + y]
            out = arena[target + y * op[TARGET_STRIDE] : target + y * op[TARGET_STRIDE] + width]
            plain = weight == 0 and y > 0 and consts[op[BIAS] + y - 1] == 0
            if plain and upper == longs[table + y - 1]:  # the same row again
                same = target + (y - 1) * op[TARGET_STRIDE]
                out[:] = arena[same : same + width]
                continue
            source = plane + upper * op[SOURCE_STRIDE]
            above = arena[source : source + before]
            source = plane + lower * op[SOURCE_STRIDE]
            below = arena[source : source + before]
            rest = np.float32(1.0) - weight
            for x in range(before):
                middle[x] = rest * above[x] + weight * below[x]
            for x in range(width):
                a, b = middle[left[x]], middle[right[x]]
                out[x] = (np.float32(1.0) - weights[x]) * a + weights[x] * b
