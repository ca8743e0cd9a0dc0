"""Tensors from one place or layout to another."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from probmask.runtime.columns import (
    HEIGHT,
    IMAGE_WIDTH,
    LANES,
    ROWS,
    SOURCE,
    SOURCE_LEAD,
    SOURCE_PLANE,
    SOURCE_STRIDE,
    STEP_X,
    STEP_Y,
    TABLE,
    TARGET,
    TARGET_LANES,
    TARGET_LEAD,
    TARGET_PLANE,
    TARGET_STRIDE,
)
from probmask.runtime.curves import LOOSE
from probmask.runtime.pairs import every_second


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to floats."""
    kind = types.CPointer(types.float32)

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64), generate


@njit(error_model="numpy", fastmath=LOOSE)
def pack(op, arena, image, doubt, first, last):
    """Copy an image from outside into its planes."""
    height, width = op[HEIGHT], op[IMAGE_WIDTH]
    total = np.float32(0.0)
    for c in range(first, last):
        start = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
        for y in range(height):
            source = image[(c * height + y) * width : (c * height + y + 1) * width]
            target = arena[start + y * op[TARGET_STRIDE] : start + y * op[TARGET_STRIDE] + width]
            for x in range(width):
                total += source[x]
                target[x] = source[x]
    doubt[0] += total * np.float32(0.0)


@njit(error_model="numpy")
def unpack(op, arena, outside, image, first, last):
    """Copy planes to where PyTorch finds them."""
    height, width, lanes = op[HEIGHT], op[IMAGE_WIDTH], op[LANES]
    size = op[ROWS] * height * width
    whole = carray(pointer(outside), (image + lanes) * size)
    for c in range(first, last):
        start = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        for y in range(height):
            source = start + y * op[SOURCE_STRIDE] * lanes
            target = image * size + (c * height + y) * width
            if lanes == 1:
                for x in range(width):
                    whole[target + x] = arena[source + x]
            else:
                for x in range(width):
                    for lane in range(lanes):
                        whole[target + lane * size + x] = arena[source + x * lanes + lane]


@njit(error_model="numpy")
def spread(op, arena, lane, first, last):
    """Copy the planes of an image into its lane of a group's planes."""
    lanes = op[TARGET_LANES]
    for c in range(first, last):
        source = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD] + lane
        for y in range(op[HEIGHT]):
            for x in range(op[IMAGE_WIDTH]):
                place = target + (y * op[TARGET_STRIDE] + x) * lanes
                arena[place] = arena[source + y * op[SOURCE_STRIDE] + x]


@njit(error_model="numpy")
def phases(op, arena, longs, first, last):
    """Copy the numbers of a phase; each entry of the table is a plane of it.

    It says where in the source the plane begins and where in the target, its rows and columns.
    """
    lanes, step_y, step_x = op[LANES], op[STEP_Y], op[STEP_X]
    at = arena.ctypes.data
    for entry in range(first, last):
        place = op[TABLE] + 4 * entry
        rows, columns = longs[place + 2], longs[place + 3]
        for y in range(rows):
            source = op[SOURCE] + longs[place] + y * step_y * op[SOURCE_STRIDE] * lanes
            target = op[TARGET] + longs[place + 1] + y * op[TARGET_STRIDE] * lanes
            if lanes == 1 and step_x == 2:
                every_second(at + 4 * source, at + 4 * target, columns)
            elif step_x == 1:
                row, result = arena[source:], arena[target : target + columns * lanes]
                for x in range(columns * lanes):
                    result[x] = row[x]
            else:
                for x in range(columns):
                    for lane in range(lanes):
                        value = arena[source + x * step_x * lanes + lane]
                        arena[target + x * lanes + lane] = value
