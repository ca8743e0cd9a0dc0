"""The steps of a recurrent layer, for one image or for a group of interleaved images.

For one image, the input's part of the gates was computed before, for all steps at once, plane by
plane. It is transposed a few steps at a time, because a step reads all planes. For a group of
images, a step computes both parts of the gates: the images of a step are next to each other.
"""

import numpy as np
from numba import njit

from probmask.runtime.kernels.operation_table import (
    CELL,
    CHANNELS,
    FINAL_CELL,
    FINAL_HIDDEN,
    FINALS,
    FINALS_PLANE,
    GATES,
    LANES,
    OTHER,
    OTHER_PLANE,
    POSITION_BITS,
    SCRATCH,
    SCRATCH_SIZE,
    SOURCE,
    SOURCE_LEAD,
    SOURCE_PLANE,
    STATE,
    STEPS,
    TABLE,
    TARGET,
    TARGET_LEAD,
    TARGET_PLANE,
    UNITS,
    VALUES,
    Cell,
)
from probmask.runtime.kernels.recurrent_steps import (
    HAS_WINDOWS,
    cell_step,
    windowed_rows,
)
from probmask.runtime.kernels.rows import transpose
from probmask.runtime.kernels.tiles import LAST_PART, MAX_VECTORS, sparse_rows
from probmask.runtime.kernels.vectors import WIDTH

_GRU = int(Cell.GRU)
# Longs per direction in the table: see `recur`.
TABLE_LONGS = 5
_INFINITY = np.float32(np.inf)


def scratch_size(cell: Cell, inputs: int, units: int, lanes: int) -> int:
    """Return the number of floats that one thread needs."""
    gates = GATES[cell]
    if lanes > 1:
        parts = 2 if cell is Cell.GRU else 1
        return (1 + inputs + (2 + parts * gates) * units) * lanes
    padded = -(-units // WIDTH) * WIDTH
    rows = (WIDTH + 1) * (padded + WIDTH)  # the hidden states of a few steps, and the one before
    return rows + padded + gates * padded + WIDTH * (gates * padded + WIDTH)


@njit(error_model="numpy")
def recur(op, arena, longs, offsets, values, consts, position_bits, nonfinite, first, last, thread):
    """Compute all steps of the directions ``first`` to ``last``; the second one runs backwards.

    The table has five longs per direction: where the rows' weights start (in the longs), the first
    weight (in the offsets and values), the windows, or the order of the rows for groups (in the
    longs), the windows' values (in the constants), and the bias that is added to the hidden state's
    part (in the constants).
    """
    scratch = op[SCRATCH] + thread * op[SCRATCH_SIZE]
    for direction in range(first, last):
        if op[LANES] > 1:
            _recur_group(
                op, arena, longs, offsets, values, consts, position_bits, nonfinite, direction,
                scratch,
            )  # fmt: skip
        else:
            _recur_image(op, arena, longs, offsets, values, consts, nonfinite, direction, scratch)


@njit(error_model="numpy")
def _recur_image(op, arena, longs, offsets, values, consts, nonfinite, direction, scratch):
    """Compute the steps of one image, in blocks of as many steps as a vector has elements."""
    units, steps, gates = op[UNITS], op[STEPS], GATES[op[CELL]]
    padded = -(-units // WIDTH) * WIDTH
    row, gates_row = padded + WIDTH, gates * padded + WIDTH
    state = scratch + WIDTH * row
    cell = state + row
    sums = cell + padded
    by_step = sums + gates * padded
    at = arena.ctypes.data
    for i in range(state, sums):
        arena[i] = np.float32(0.0)
    _load_states(op, arena, direction, state, cell)
    blocks = -(-steps // WIDTH)
    for block in range(blocks):
        first = WIDTH * (blocks - 1 - block if direction else block)
        count = min(WIDTH, steps - first)
        _transpose_gates(op, arena, direction, first, count, by_step, gates_row)
        before = state
        for k in range(count):
            t = count - 1 - k if direction else k
            after = scratch + t * row
            _multiply(
                arena, longs, offsets, values, consts, op[TABLE] + TABLE_LONGS * direction,
                gates * padded, before, sums,
            )  # fmt: skip
            cell_step(
                op[CELL], padded // WIDTH, at + 4 * (by_step + t * gates_row), 4 * padded,
                4 * WIDTH, at + 4 * sums, 4 * padded, 4 * WIDTH, at + 4 * cell, at + 4 * before,
                at + 4 * after, at + 4 * after, 4 * WIDTH, nonfinite.ctypes.data,
            )  # fmt: skip
            before = after
        for i in range(padded):
            arena[state + i] = arena[before + i]
        if op[TARGET] >= 0:
            _transpose_hidden(op, arena, direction, first, count, scratch, row)
    _store_states(op, arena, direction, state, cell)


@njit(error_model="numpy")
def _transpose_gates(op, arena, direction, first, count, by_step, gates_row):
    """Copy a few steps of all gates from planes to one row per step; padding becomes zero."""
    units, gates, plane = op[UNITS], GATES[op[CELL]], op[SOURCE_PLANE]
    padded = -(-units // WIDTH) * WIDTH
    at = arena.ctypes.data
    start = op[SOURCE] + op[SOURCE_LEAD] + first + direction * gates * units * plane
    for gate in range(gates):
        for unit in range(0, padded, WIDTH):
            source = start + (gate * units + unit) * plane
            target = by_step + gate * padded + unit
            if unit + WIDTH <= units and op[STEPS] > 1:
                transpose(at + 4 * source, 4 * plane, at + 4 * target, 4 * gates_row)
                continue
            for k in range(count):
                for j in range(WIDTH):
                    value = np.float32(0.0)
                    if unit + j < units:
                        value = arena[source + j * plane + k]
                    arena[target + k * gates_row + j] = value


@njit(error_model="numpy")
def _transpose_hidden(op, arena, direction, first, count, rows, row):
    """Copy the hidden states of a few steps from one row per step to planes."""
    units, plane = op[UNITS], op[TARGET_PLANE]
    at = arena.ctypes.data
    start = op[TARGET] + op[TARGET_LEAD] + first + direction * units * plane
    for unit in range(0, units, WIDTH):
        target = start + unit * plane
        if unit + WIDTH <= units and count == WIDTH:
            transpose(at + 4 * (rows + unit), 4 * row, at + 4 * target, 4 * plane)
            continue
        for j in range(min(WIDTH, units - unit)):
            for k in range(count):
                arena[target + j * plane + k] = arena[rows + k * row + unit + j]


@njit(error_model="numpy")
def _load_states(op, arena, direction, hidden, cell):
    """Copy the initial states of one image, if there are any."""
    for unit in range(op[UNITS]):
        place = op[STATE] + direction + unit * op[OTHER_PLANE]
        if op[OTHER] >= 0:
            arena[hidden + unit] = arena[op[OTHER] + place]
        if op[VALUES] >= 0:
            arena[cell + unit] = arena[op[VALUES] + place]


@njit(error_model="numpy")
def _store_states(op, arena, direction, hidden, cell):
    """Copy the final states of one image to the tensor that takes them."""
    for unit in range(op[UNITS]):
        place = op[FINALS] + (direction * op[UNITS] + unit) * op[FINALS_PLANE]
        if op[FINAL_HIDDEN] >= 0:
            arena[place + op[FINAL_HIDDEN]] = arena[hidden + unit]
        if op[FINAL_CELL] >= 0:
            arena[place + op[FINAL_CELL]] = arena[cell + unit]


@njit(error_model="numpy")
def _multiply_windows(arena, longs, offsets, values, consts, table, rows, source, target):
    """Multiply the weights with the hidden state of one image, window by window."""
    at, constants = arena.ctypes.data, consts.ctypes.data
    windowed_rows(
        rows // WIDTH,
        longs.ctypes.data + 8 * longs[table],
        longs.ctypes.data + 8 * longs[table + 2],
        constants + 4 * longs[table + 3],
        at + 4 * source,
        constants + 4 * longs[table + 4],
        at + 4 * target,
    )


@njit(error_model="numpy")
def _multiply_weights(arena, longs, offsets, values, consts, table, rows, source, target):
    """Multiply the weights with the hidden state of one image, weight by weight."""
    starts, weights = longs[longs[table] :], longs[table + 1]
    for r in range(rows):
        a = consts[longs[table + 4] + r]
        b = c = d = np.float32(0.0)
        k, end = starts[r] + weights, starts[r + 1] + weights
        while k + 4 <= end:
            a += values[k] * arena[source + offsets[k]]
            b += values[k + 1] * arena[source + offsets[k + 1]]
            c += values[k + 2] * arena[source + offsets[k + 2]]
            d += values[k + 3] * arena[source + offsets[k + 3]]
            k += 4
        while k < end:
            a += values[k] * arena[source + offsets[k]]
            k += 1
        arena[target + r] = (a + b) + (c + d)


_multiply = _multiply_windows if HAS_WINDOWS else _multiply_weights


@njit(error_model="numpy")
def _recur_group(
    op, arena, longs, offsets, values, consts, position_bits, nonfinite, direction, scratch
):
    """Compute the steps of a group of interleaved images; a unit of all images is a few vectors.

    The inputs of a step and the hidden state are next to each other, so that one row of weights
    reads both. The two parts of a GRU's gates are separate rows; for the other cells, the cell adds
    zeros to the rows' sums.
    """
    units, steps, gates, lanes = op[UNITS], op[STEPS], GATES[op[CELL]], op[LANES]
    zeros = scratch
    inputs = zeros + lanes
    state = inputs + op[CHANNELS] * lanes
    cell = state + units * lanes
    sums = cell + units * lanes
    table = op[TABLE] + TABLE_LONGS * direction
    at, vectors = arena.ctypes.data, lanes // WIDTH
    of_input, of_state, unit = at + 4 * zeros, at + 4 * sums, 0
    rows = gates * units
    if op[CELL] == _GRU:
        of_input, of_state, unit = of_state, of_state + 4 * rows * lanes, 4 * lanes
        rows *= 2
    for i in range(zeros, inputs):
        arena[i] = np.float32(0.0)
    for i in range(state, sums):
        arena[i] = np.float32(0.0)
    _load_group(op, arena, direction, state, cell)
    for k in range(steps):
        t = steps - 1 - k if direction else k
        source = op[SOURCE] + op[SOURCE_LEAD] + t * lanes
        for channel in range(op[CHANNELS]):
            for lane in range(lanes):
                value = arena[source + channel * op[SOURCE_PLANE] + lane]
                arena[inputs + channel * lanes + lane] = value
        sparse_rows(
            MAX_VECTORS + 1 + vectors,
            at + 4 * inputs,
            offsets.ctypes.data + 4 * longs[table + 1],
            values.ctypes.data + 4 * longs[table + 1],
            longs.ctypes.data + 8 * longs[table],
            longs.ctypes.data + 8 * longs[table + 2],
            0,
            rows,
            at + 4 * sums,
            4 * lanes,
            consts.ctypes.data + 4 * longs[table + 4],
            0,
            0,
            position_bits.ctypes.data + 4 * op[POSITION_BITS],
            0,
            LAST_PART,
            -_INFINITY,
            _INFINITY,
            nonfinite.ctypes.data,
        )
        out, out_unit = at + 4 * state, 4 * lanes
        if op[TARGET] >= 0:
            place = op[TARGET] + op[TARGET_LEAD] + direction * units * op[TARGET_PLANE]
            out, out_unit = at + 4 * (place + t * lanes), 4 * op[TARGET_PLANE]
        for j in range(vectors):
            skipped = 4 * WIDTH * j
            here = at + 4 * state + skipped
            cell_step(
                op[CELL], units, of_input + skipped, unit * units, unit, of_state + skipped,
                4 * units * lanes, 4 * lanes, at + 4 * cell + skipped, here, here, out + skipped,
                out_unit, nonfinite.ctypes.data,
            )  # fmt: skip
    _store_group(op, arena, direction, state, cell)


@njit(error_model="numpy")
def _load_group(op, arena, direction, hidden, cell):
    """Copy the initial states of a group, if there are any."""
    lanes = op[LANES]
    for unit in range(op[UNITS]):
        place = op[STATE] + direction * lanes + unit * op[OTHER_PLANE]
        for lane in range(lanes):
            if op[OTHER] >= 0:
                arena[hidden + unit * lanes + lane] = arena[op[OTHER] + place + lane]
            if op[VALUES] >= 0:
                arena[cell + unit * lanes + lane] = arena[op[VALUES] + place + lane]


@njit(error_model="numpy")
def _store_group(op, arena, direction, hidden, cell):
    """Copy the final states of a group to the tensor that takes them."""
    lanes = op[LANES]
    for unit in range(op[UNITS]):
        place = op[FINALS] + (direction * op[UNITS] + unit) * op[FINALS_PLANE]
        for lane in range(lanes):
            if op[FINAL_HIDDEN] >= 0:
                arena[place + op[FINAL_HIDDEN] + lane] = arena[hidden + unit * lanes + lane]
            if op[FINAL_CELL] >= 0:
                arena[place + op[FINAL_CELL] + lane] = arena[cell + unit * lanes + lane]
