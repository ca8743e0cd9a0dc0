"""Copies between tensors of any strides: transposition, slices, expansion, concatenation.

Also copies between tokens in PyTorch's order and groups of interleaved images.
"""

import numpy as np
from numba import carray, njit

from probmask.runtime.kernels.elementwise import FAST_SUMS, pointer
from probmask.runtime.kernels.operation_table import (
    EXTERNAL,
    HEIGHT,
    IMAGE_SIZE,
    IMAGE_WIDTH,
    LANES,
    ROWS,
    SOURCE,
    SOURCE_IS,
    SOURCE_LEAD,
    SOURCE_PLANE,
    SOURCE_STRIDE,
    TABLE,
    TARGET,
    TARGET_IS,
    TARGET_LEAD,
    TARGET_PLANE,
    TARGET_STRIDE,
    UNCHECKED,
    Place,
)
from probmask.runtime.kernels.rows import transpose
from probmask.runtime.kernels.vectors import WIDTH

_CONSTANT, _EXTERNAL = int(Place.CONSTANT), int(Place.EXTERNAL)
# Elements of the third loop that are copied before the fourth advances: one cache line of each of
# two tensors that are transposed.
_BLOCK = 16


@njit(error_model="numpy")
def rearrange(op, arena, longs, consts, external, image, nonfinite, first, last):
    """Copy the elements of four nested loops; ``first`` to ``last`` are those of the outermost.

    The table holds the size of each loop, then its steps in the source, then its steps in the
    target. External tensors have one part of ``IMAGE_SIZE`` floats per image. Between tensors of
    groups, each element is that of all images of the group.
    """
    size, loops, total = op[IMAGE_SIZE], longs[op[TABLE] :], np.float32(0.0)
    if op[LANES] > 1:
        from_constant = op[SOURCE_IS] == _CONSTANT
        source, step = (consts, 0) if from_constant else (arena, 1)
        total = _copy_lanes(
            source, arena, loops, op[SOURCE], op[TARGET], first, last, op[LANES], step
        )
    elif op[SOURCE_IS] == _EXTERNAL:
        part = carray(pointer(external[op[EXTERNAL]] + 4 * image * size), size)
        total = _copy(part, arena, loops, op[SOURCE], op[TARGET], first, last)
    elif op[TARGET_IS] == _EXTERNAL:
        part = carray(pointer(external[op[EXTERNAL]] + 4 * image * size), size)
        total = _copy(arena, part, loops, op[SOURCE], op[TARGET], first, last)
    elif op[SOURCE_IS] == _CONSTANT:
        total = _copy(consts, arena, loops, op[SOURCE], op[TARGET], first, last)
    else:
        total = _copy(arena, arena, loops, op[SOURCE], op[TARGET], first, last)
    if not op[UNCHECKED]:
        nonfinite[0] += total * np.float32(0.0)


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _copy(source, target, loops, source_base, target_base, first, last):
    """Copy elements and return their sum."""
    columns, rows = loops[2], loops[3]
    step, row_step = loops[6], loops[7]
    target_step, target_row_step = loops[10], loops[11]
    total = np.float32(0.0)
    in_order = step == 1 and target_step == 1
    for a in range(first, last):
        for b in range(loops[1]):
            start = source_base + a * loops[4] + b * loops[5]
            place = target_base + a * loops[8] + b * loops[9]
            if in_order:
                for row in range(rows):
                    at, to = start + row * row_step, place + row * target_row_step
                    total += _copy_run(source[at : at + columns], target[to : to + columns])
                continue
            for block in range(0, columns, _BLOCK):
                count = min(_BLOCK, columns - block)
                for row in range(rows):
                    at = start + block * step + row * row_step
                    to = place + block * target_step + row * target_row_step
                    for i in range(count):
                        value = source[at + i * step]
                        total += value
                        target[to + i * target_step] = value
    return total


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _copy_run(source, target):
    """Copy neighbors and return their sum."""
    total = np.float32(0.0)
    for i in range(len(target)):
        total += source[i]
        target[i] = source[i]
    return total


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _copy_lanes(source, target, loops, source_base, target_base, first, last, lanes, step):
    """Copy the elements of all images of a group and return their sum.

    ``step`` is 0 if all images share the element of the source.
    """
    total = np.float32(0.0)
    for a in range(first, last):
        for b in range(loops[1]):
            for column in range(loops[2]):
                for row in range(loops[3]):
                    at = source_base + a * loops[4] + b * loops[5]
                    at += column * loops[6] + row * loops[7]
                    to = target_base + a * loops[8] + b * loops[9]
                    to += column * loops[10] + row * loops[11]
                    for lane in range(lanes):
                        value = source[at + lane * step]
                        total += value
                        target[to + lane] = value
    return total


@njit(error_model="numpy")
def pack_tokens(op, arena, external, image, nonfinite, first, last):
    """Copy channels ``first`` to ``last`` of the tokens of a group's images into their lanes."""
    channels, width, lanes = op[ROWS], op[IMAGE_WIDTH], op[LANES]
    size, plane = channels * op[HEIGHT] * width, op[TARGET_PLANE]
    tokens = carray(pointer(external + 4 * image * size), lanes * size)
    at, total = arena.ctypes.data, np.float32(0.0)
    for position in range(op[HEIGHT] * width):
        y, x = position // width, position % width
        place = op[TARGET] + op[TARGET_LEAD] + (y * op[TARGET_STRIDE] + x) * lanes
        source = position * channels
        for c in range(first, last, WIDTH):
            if c + WIDTH <= last:
                for lane in range(0, lanes, WIDTH):
                    transpose(
                        tokens.ctypes.data + 4 * (lane * size + source + c), 4 * size,
                        at + 4 * (place + c * plane + lane), 4 * plane,
                    )  # fmt: skip
            else:
                for channel in range(c, last):
                    for lane in range(lanes):
                        value = tokens[lane * size + source + channel]
                        arena[place + channel * plane + lane] = value
            total += _sum_of_lanes(arena, place, plane, lanes, c, min(c + WIDTH, last))
    nonfinite[0] += total * np.float32(0.0)


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _sum_of_lanes(arena, place, plane, lanes, first, last):
    """Return the sum of one position of several channels, for all images of a group."""
    total = np.float32(0.0)
    for channel in range(first, last):
        for lane in range(lanes):
            total += arena[place + channel * plane + lane]
    return total


@njit(error_model="numpy")
def unpack_tokens(op, arena, external, image, first, last):
    """Copy channels ``first`` to ``last`` of a group's images to tokens in PyTorch's order."""
    channels, width, lanes = op[ROWS], op[IMAGE_WIDTH], op[LANES]
    size, plane = channels * op[HEIGHT] * width, op[SOURCE_PLANE]
    tokens = carray(pointer(external + 4 * image * size), lanes * size)
    at = arena.ctypes.data
    for position in range(op[HEIGHT] * width):
        y, x = position // width, position % width
        place = op[SOURCE] + op[SOURCE_LEAD] + (y * op[SOURCE_STRIDE] + x) * lanes
        target = position * channels
        for c in range(first, last, WIDTH):
            if c + WIDTH <= last:
                for lane in range(0, lanes, WIDTH):
                    transpose(
                        at + 4 * (place + c * plane + lane), 4 * plane,
                        tokens.ctypes.data + 4 * (lane * size + target + c), 4 * size,
                    )  # fmt: skip
            else:
                for channel in range(c, last):
                    for lane in range(lanes):
                        value = arena[place + channel * plane + lane]
                        tokens[lane * size + target + channel] = value
