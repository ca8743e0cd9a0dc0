"""The layers with weights: sparse rows over tiles of positions, or times a vector."""

import numpy as np
from numba import njit

from probmask.runtime.kernels.elementwise import LOOSE
from probmask.runtime.kernels.operation_table import (
    BEFORE,
    BIAS,
    BLOCKS,
    DEPTH,
    HEIGHT,
    IMAGE_WIDTH,
    LANES,
    LINES,
    MASK,
    OTHER,
    OTHER_PLANE,
    ROWS,
    SOURCE,
    SOURCE_LEAD,
    SOURCE_PLANE,
    SOURCE_STRIDE,
    SOURCE_WIDTH,
    STARTS,
    STEP_X,
    TABLE,
    TARGET,
    TARGET_LEAD,
    TARGET_PLANE,
    TARGET_STRIDE,
    TILES,
    VECTORS,
    WEIGHTS,
    WHOLE,
    WINDOW,
)
from probmask.runtime.kernels.tiles import FIRST_PART, LAST_PART, MIDDLE_PART, MOST, sparse_rows
from probmask.runtime.kernels.vectors import WIDTH, largest_of_three_by_three, largest_of_two_by_two


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
