"""Kernels of layers: sparse convolution, sparse linear layer, pooling."""

import numpy as np
from numba import njit

from probmask.runtime.kernels.elementwise import FAST_SUMS
from probmask.runtime.kernels.operation_table import (
    BIAS,
    BLOCKS,
    DEPTH,
    ENTRIES,
    FETCHED,
    FURTHEST,
    HEIGHT,
    IMAGE_WIDTH,
    LANES,
    LINES,
    ORDER,
    OTHER,
    OTHER_PLANE,
    PADDING_LEFT,
    POSITION_BITS,
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
    WHOLE_RUN,
    WINDOW_HEIGHT,
    WINDOW_WIDTH,
)
from probmask.runtime.kernels.rows import max_of_2x2, max_of_3x3
from probmask.runtime.kernels.tiles import (
    FIRST_PART,
    LAST_PART,
    MAX_VECTORS,
    MIDDLE_PART,
    sparse_rows,
)
from probmask.runtime.kernels.vectors import WIDTH, fetch_ahead

_LINE = 64  # bytes of a cache line
# Parts of the rows of a tile, between which the inputs of the next tile are fetched.
_PARTS = 4


@njit(error_model="numpy")
def convolve(
    op, arena, longs, offsets, values, consts, position_bits, low, high, nonfinite, first, last
):
    """Compute rows ``first`` to ``last`` of a convolution: output channels in some order.

    The loops run over tiles, then over blocks of input channels, then over rows. If the input does
    not fit into the cache, that of the next tile is fetched while this one is computed, a few
    planes at a time.
    """
    at = arena.ctypes.data
    source = at + 4 * (op[SOURCE] + op[SOURCE_LEAD])
    target = at + 4 * (op[TARGET] + op[TARGET_LEAD])
    other = at + 4 * (op[OTHER] + op[TARGET_LEAD]) if op[OTHER] >= 0 else 0
    bits = position_bits.ctypes.data + 4 * op[POSITION_BITS]
    line = 4 * op[TARGET_STRIDE] * op[LANES]
    rows, blocks, source_plane = op[ROWS], op[BLOCKS], 4 * op[SOURCE_PLANE]
    done = 0
    for tile in range(op[TILES]):
        if op[LINES] > 0:
            shape = op[LINES] * (MAX_VECTORS + 1) + op[VECTORS]
            skipped = tile * op[LINES] * line
        else:
            vectors = op[VECTORS] * (tile + 1) // op[TILES] - done
            shape = MAX_VECTORS + 1 + vectors
            skipped = 4 * WIDTH * done
            done += vectors
        here = target + skipped
        size = op[LINES] * line if op[LINES] > 0 else 4 * WIDTH * vectors
        fetches = op[FETCHED] > 0 and tile + 1 < op[TILES]
        parts = _PARTS if fetches else 1
        for block in range(blocks):
            # The sums of earlier blocks are in the target; they are added like a residual.
            before, plane = here, 4 * op[TARGET_PLANE]
            if block == 0:
                before, plane = other + skipped if other != 0 else 0, 4 * op[OTHER_PLANE]
            stage = FIRST_PART if block == 0 else MIDDLE_PART
            if block == blocks - 1:
                stage = LAST_PART
            for part in range(parts):
                if fetches:
                    done_parts, all_parts = block * parts + part, blocks * parts
                    begin = op[FETCHED] * done_parts // all_parts
                    end = op[FETCHED] * (done_parts + 1) // all_parts
                    following = source + skipped + size + 4 * op[FURTHEST]
                    lines = -(-size // _LINE)
                    fetch_ahead(following + begin * source_plane, end - begin, source_plane, lines)
                sparse_rows(
                    shape,
                    source + skipped,
                    offsets.ctypes.data + 4 * op[WEIGHTS],
                    values.ctypes.data + 4 * op[WEIGHTS],
                    longs.ctypes.data + 8 * (op[STARTS] + block * rows),
                    longs.ctypes.data + 8 * (op[ORDER] + block * rows),
                    first + (last - first) * part // parts,
                    first + (last - first) * (part + 1) // parts,
                    here,
                    4 * op[TARGET_PLANE],
                    consts.ctypes.data + 4 * (op[BIAS] + block * rows),
                    before,
                    plane,
                    bits + skipped,
                    line,
                    stage,
                    low,
                    high,
                    nonfinite.ctypes.data,
                )


@njit(error_model="numpy", fastmath=FAST_SUMS)
def linear(op, arena, longs, offsets, values, consts, low, high, nonfinite, first, last):
    """Multiply rows ``first`` to ``last`` with a vector, with four accumulators."""
    starts = longs[op[STARTS] :]
    base, plane, other_plane = op[SOURCE], op[TARGET_PLANE], op[OTHER_PLANE]
    checked = np.float32(0.0)
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
        channel = longs[op[ORDER] + r]
        if op[OTHER] >= 0:
            total += arena[op[OTHER] + channel * other_plane]
        checked += total * np.float32(0.0)
        arena[op[TARGET] + channel * plane] = min(max(total, low), high)
    nonfinite[0] += checked


@njit(error_model="numpy", fastmath=FAST_SUMS)
def pool(op, arena, longs, consts, scratch, nonfinite, first, last, is_max):
    """Pool channels ``first`` to ``last``.

    The table holds the start and end row of each output row's windows, then the start and end
    column of each output column's. The constants hold one factor per position for averages.
    """
    lanes, height, width, table = op[LANES], op[HEIGHT], op[IMAGE_WIDTH], op[TABLE]
    columns, step = op[SOURCE_WIDTH] * lanes, op[SOURCE_STRIDE] * lanes
    if (
        is_max
        and lanes == 1
        and op[STEP_X] == 2
        and 2 <= op[WINDOW_WIDTH] <= 3
        and op[WINDOW_HEIGHT] <= op[WINDOW_WIDTH]
    ):
        _max_pool_stride_two(op, arena, longs, first, last)
        return
    windows = longs[table + 2 * height : table + 2 * height + 2 * width]
    middle = scratch[:columns]
    whole = not is_max and lanes == 1 and op[WHOLE_RUN] > 0
    for c in range(first, last):
        source = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
        if whole:
            total = _sum(arena[source : source + op[WHOLE_RUN]])
            nonfinite[0] += total * np.float32(0.0)  # detects overflow of the sum
            arena[target] = total * consts[op[BIAS]]
            continue
        for y in range(height):
            top, bottom = longs[table + 2 * y], longs[table + 2 * y + 1]
            out = target + y * op[TARGET_STRIDE] * lanes
            result = arena[out : out + width * lanes]
            _reduce_rows(arena[source + top * step :], middle, step, bottom - top, is_max)
            _reduce_columns(middle, windows, result, lanes, is_max)
            if not is_max:
                divisors = consts[op[BIAS] + y * width : op[BIAS] + (y + 1) * width]
                for x in range(width):
                    for lane in range(lanes):
                        nonfinite[0] += result[x * lanes + lane] * np.float32(0.0)
                        result[x * lanes + lane] *= divisors[x]


@njit(error_model="numpy", fastmath=FAST_SUMS)
def pool_slices(op, arena, longs, consts, nonfinite, first, last, is_max):
    """Pool the slices of volumes to output planes ``first`` to ``last``.

    The table holds the start and end of each output slice's window. Padding is zero in all planes,
    so it stays zero. The constants hold one factor per output slice for averages.
    """
    table, slices, plane = op[TABLE], op[ENTRIES], op[TARGET_PLANE]
    for p in range(first, last):
        channel, index = p // slices, p % slices
        begin, end = longs[table + 2 * index], longs[table + 2 * index + 1]
        source = op[SOURCE] + (channel * op[DEPTH] + begin) * op[SOURCE_PLANE]
        target = arena[op[TARGET] + p * plane : op[TARGET] + (p + 1) * plane]
        _reduce_rows(arena[source:], target, op[SOURCE_PLANE], end - begin, is_max)
        if not is_max:
            factor, checked = consts[op[BIAS] + index], np.float32(0.0)
            for i in range(plane):
                checked += target[i] * np.float32(0.0)
                target[i] *= factor
            nonfinite[0] += checked


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _sum(numbers):
    total = np.float32(0.0)
    for i in range(len(numbers)):
        total += numbers[i]
    return total


@njit(error_model="numpy")
def _max_pool_stride_two(op, arena, longs, first, last):
    """Max-pool windows of 2 × 2 or 3 × 3 with stride two in vectors.

    Windows that the border cuts are pooled one by one. The code works on addresses, because
    creating an array view per row would take longer than the row itself.
    """
    window, before = op[WINDOW_WIDTH], op[PADDING_LEFT]
    width, step = op[IMAGE_WIDTH], op[SOURCE_STRIDE]
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
                max_of_2x2(upper, middle, at + 4 * (out + begin), end - begin)
            else:
                max_of_3x3(upper, middle, lower, at + 4 * (out + begin), end - begin)
            for x in range(width - (end - begin)):
                cut = x if x < begin else x + end - begin
                left, right = longs[windows + 2 * cut], longs[windows + 2 * cut + 1]
                arena[out + cut] = _max_of_window(arena, source, step, rows, left, right)


@njit(error_model="numpy")
def _max_of_window(arena, source, step, rows, left, right):
    """Return the maximum of one window."""
    best = np.float32(-np.inf)
    for k in range(rows):
        for column in range(left, right):
            best = max(best, arena[source + k * step + column])
    return best


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _reduce_rows(source, middle, step, rows, is_max):
    """Reduce the rows of an output row's windows, column by column."""
    for i in range(len(middle)):
        middle[i] = source[i]
    for k in range(1, rows):
        row = source[k * step : k * step + len(middle)]
        if is_max:
            for i in range(len(middle)):
                middle[i] = row[i] if row[i] > middle[i] else middle[i]
        else:
            for i in range(len(middle)):
                middle[i] += row[i]


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _reduce_columns(middle, windows, result, lanes, is_max):
    """Reduce the columns of an output row's windows, for all lanes."""
    for x in range(len(windows) // 2):
        here = result[x * lanes : (x + 1) * lanes]
        first = middle[windows[2 * x] * lanes : (windows[2 * x] + 1) * lanes]
        for lane in range(lanes):
            here[lane] = first[lane]
        for k in range(windows[2 * x] + 1, windows[2 * x + 1]):
            more = middle[k * lanes : (k + 1) * lanes]
            if is_max:
                for lane in range(lanes):
                    here[lane] = max(here[lane], more[lane])
            else:
                for lane in range(lanes):
                    here[lane] += more[lane]
