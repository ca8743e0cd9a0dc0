"""Maxima and means of windows."""

import numpy as np
from numba import njit

from probmask.runtime.columns import (
    BEFORE,
    BIAS,
    DEPTH,
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
    if (
        largest
        and lanes == 1
        and op[STEP_X] == 2
        and 2 <= op[WINDOW] <= 3
        and op[DEPTH] <= op[WINDOW]
    ):
        _pool_in_pairs(op, arena, longs, first, last)
        return
    windows = longs[table + 2 * height : table + 2 * height + 2 * width]
    middle = scratch[:columns]
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
def _pool_in_pairs(op, arena, longs, first, last):
    """Largest of two or three columns at distance two; windows cut by the padding one by one.

    By addresses: a view of an array per row would take longer than the row.
    """
    window, before, width, step = op[WINDOW], op[BEFORE], op[IMAGE_WIDTH], op[SOURCE_STRIDE]
    table, windows = op[TABLE], op[TABLE] + 2 * op[HEIGHT]
    at = arena.ctypes.data
    begin = (before + 1) // 2
    end = max(begin, min(width, (op[SOURCE_WIDTH] - window + before) // 2 + 1))
    for c in range(first, last):
        plane = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
        for y in range(op[HEIGHT]):
            rows = longs[table + 2 * y + 1] - longs[table + 2 * y]
            source = plane + longs[table + 2 * y] * step
            out = target + y * op[TARGET_STRIDE]
            upper = at + 4 * (source + 2 * begin - before)
            middle = upper + 4 * step * min(1, rows - 1)
            lower = upper + 4 * step * min(2, rows - 1)
            if window == 2:
                largest_of_two_by_two(upper, middle, at + 4 * (out + begin), end - begin)
            else:
                largest_of_three_by_three(upper, middle, lower, at + 4 * (out + begin), end - begin)
            for x in range(width - (end - begin)):
                cut = x if x < begin else x + end - begin
                left, right = longs[windows + 2 * cut], longs[windows + 2 * cut + 1]
                arena[out + cut] = _largest_of_one(arena, source, step, rows, left, right)


@njit(error_model="numpy")
def _largest_of_one(arena, source, step, rows, left, right):
    """The largest number of one window."""
    best = np.float32(-np.inf)
    for k in range(rows):
        for column in range(left, right):
            best = max(best, arena[source + k * step + column])
    return best


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
