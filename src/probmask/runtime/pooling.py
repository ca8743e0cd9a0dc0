"""Maxima and means of windows."""

import numpy as np
from numba import njit

from probmask.runtime.columns import (
    BEFORE,
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
    TABLE,
    TARGET,
    TARGET_LEAD,
    TARGET_PLANE,
    TARGET_STRIDE,
    WHOLE,
    WINDOW,
)
from probmask.runtime.curves import LOOSE
from probmask.runtime.pairs import largest_of_three_by_three, largest_of_two_by_two


@njit(error_model="numpy", fastmath=LOOSE)
def pool(op, arena, longs, consts, scratch, doubt, first, last, largest):
    """The channels from ``first`` to ``last``.

    The table has first and last row of each output row, first and last column of each output
    column; the divisors of averages are constants, one per position.
    """
    lanes, height, width, table = op[LANES], op[HEIGHT], op[IMAGE_WIDTH], op[TABLE]
    columns, step = op[SOURCE_WIDTH] * lanes, op[SOURCE_STRIDE] * lanes
    windows = longs[table + 2 * height : table + 2 * height + 2 * width]
    pairs = largest and lanes == 1 and op[STEP_X] == 2 and 2 <= op[WINDOW] <= 3
    whole = not largest and lanes == 1 and op[WHOLE] > 0
    for c in range(first, last):
        source = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
        if whole:
            total = _sum(arena[source : source + op[WHOLE]])
            doubt[0] += total * np.float32(0.0)  # the sum's overflow
            arena[target] = total * consts[op[BIAS]]
            continue
        for y in range(height):
            top, bottom = longs[table + 2 * y], longs[table + 2 * y + 1]
            out = target + y * op[TARGET_STRIDE] * lanes
            result = arena[out : out + width * lanes]
            if pairs and bottom - top <= op[WINDOW]:
                _largest_at_step_two(
                    arena, source + top * step, step, bottom - top, windows, result,
                    op[WINDOW], op[BEFORE], columns,
                )  # fmt: skip
                continue
            middle = scratch[:columns]
            _over_rows(arena[source + top * step :], middle, step, bottom - top, largest)
            _over_columns(middle, windows, result, lanes, largest)
            if not largest:
                divisors = consts[op[BIAS] + y * width : op[BIAS] + (y + 1) * width]
                for x in range(width):
                    for lane in range(lanes):
                        doubt[0] += result[x * lanes + lane] * np.float32(0.0)
                        result[x * lanes + lane] *= divisors[x]


@njit(error_model="numpy", fastmath=LOOSE)
def _sum(numbers):
    total = np.float32(0.0)
    for i in range(len(numbers)):
        total += numbers[i]
    return total


@njit(error_model="numpy")
def _largest_at_step_two(arena, source, step, rows, windows, result, window, before, columns):
    """Windows of two or three columns at distance two; those cut by the padding one by one."""
    at, out = arena.ctypes.data, result.ctypes.data
    begin = (before + 1) // 2
    end = max(begin, min(len(result), (columns - window + before) // 2 + 1))
    upper = at + 4 * (source + 2 * begin - before)
    middle = upper + 4 * step * min(1, rows - 1)
    lower = upper + 4 * step * min(2, rows - 1)
    if window == 2:
        largest_of_two_by_two(upper, middle, out + 4 * begin, end - begin)
    else:
        largest_of_three_by_three(upper, middle, lower, out + 4 * begin, end - begin)
    for x in range(len(result)):
        if x < begin or x >= end:
            best = np.float32(-np.inf)
            for k in range(rows):
                for column in range(windows[2 * x], windows[2 * x + 1]):
                    best = max(best, arena[source + k * step + column])
            result[x] = best


@njit(error_model="numpy", fastmath=LOOSE)
def _over_rows(source, middle, step, rows, largest):
    """The rows of the windows of an output row, column by column."""
    for i in range(len(middle)):
        middle[i] = source[i]
    for k in range(1, rows):
        row = source[k * step : k * step + len(middle)]
        if largest:
            for i in range(len(middle)):
                middle[i] = row[i] if row[i] > middle[i] else middle[i]
        else:
            for i in range(len(middle)):
                middle[i] += row[i]


@njit(error_model="numpy", fastmath=LOOSE)
def _over_columns(middle, windows, result, lanes, largest):
    """The columns of a row's windows, for all lanes at once."""
    for x in range(len(windows) // 2):
        here = result[x * lanes : (x + 1) * lanes]
        first = middle[windows[2 * x] * lanes : (windows[2 * x] + 1) * lanes]
        for lane in range(lanes):
            here[lane] = first[lane]
        for k in range(windows[2 * x] + 1, windows[2 * x + 1]):
            more = middle[k * lanes : (k + 1) * lanes]
            if largest:
                for lane in range(lanes):
                    here[lane] = max(here[lane], more[lane])
            else:
                for lane in range(lanes):
                    here[lane] += more[lane]
