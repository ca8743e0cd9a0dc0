"""Elementwise kernels: activations, sums, products, and copies between layouts."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from probmask.runtime.kernels.curves import curve_of_vectors
from probmask.runtime.kernels.operation_table import (
    BIAS,
    HEIGHT,
    IMAGE_WIDTH,
    LANES,
    OTHER,
    OTHER_LEAD,
    OTHER_PLANE,
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
    TOGETHER,
    Curve,
)
from probmask.runtime.kernels.rows import copy_every_second, split_row
from probmask.runtime.kernels.vectors import WIDTH

# LLVM may reorder and contract sums, but may not assume that NaN and infinity do not occur.
FAST_SUMS = {"contract", "reassoc", "nsz"}
_NONE = int(Curve.NONE)


@njit(error_model="numpy", fastmath=FAST_SUMS)
def activate(x, y, curve, low, high, nonfinite):
    """y = curve(x), with the factors ``low`` and ``high``, or x clamped to [low, high]."""
    n = len(x)
    if curve != _NONE:
        vectors = n // WIDTH
        curve_of_vectors(
            curve, x.ctypes.data, y.ctypes.data, vectors, nonfinite.ctypes.data, low, high
        )
        if vectors * WIDTH < n:
            rest = vectors * WIDTH
            _activate_rest(x[rest:], y[rest:], curve, low, high, nonfinite)
        return
    total = np.float32(0.0)
    for i in range(n):
        total += x[i]
        y[i] = min(max(x[i], low), high)
    nonfinite[0] += total * np.float32(0.0)


@njit(error_model="numpy")
def _activate_rest(x, y, curve, low, high, nonfinite):
    """y = curve(x) for less than a vector."""
    rest = np.zeros(WIDTH, np.float32)
    for i in range(len(x)):
        rest[i] = x[i]
    at = rest.ctypes.data
    curve_of_vectors(curve, at, at, 1, nonfinite.ctypes.data, low, high)
    for i in range(len(x)):
        y[i] = rest[i]


@njit(error_model="numpy")
def clear_padding(op, arena, first, last):
    """Set everything but the positions of planes ``first`` to ``last`` to zero.

    Activations that do not map 0 to 0 have changed it.
    """
    lanes, stride, width = op[LANES], op[TARGET_STRIDE], op[IMAGE_WIDTH]
    for c in range(first, last):
        plane = op[TARGET] + c * op[TARGET_PLANE]
        arena[plane : plane + op[TARGET_LEAD]] = 0
        for y in range(op[HEIGHT]):
            row = plane + op[TARGET_LEAD] + y * stride * lanes
            end = row + stride * lanes if y + 1 < op[HEIGHT] else plane + op[TARGET_PLANE]
            arena[row + width * lanes : end] = 0


@njit(error_model="numpy", fastmath=FAST_SUMS)
def combine_channels(op, arena, product, low, high, nonfinite, first, last):
    """Add or multiply each of the planes ``first`` to ``last`` by one number per lane.

    The second tensor has a single position.
    """
    lanes, width = op[LANES], op[IMAGE_WIDTH]
    total = np.float32(0.0)
    for c in range(first, last):
        numbers = op[OTHER] + c * op[OTHER_PLANE] + op[OTHER_LEAD]
        source = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
        for y in range(op[HEIGHT]):
            start = source + y * op[SOURCE_STRIDE] * lanes
            x = arena[start : start + width * lanes]
            start = target + y * op[TARGET_STRIDE] * lanes
            out = arena[start : start + width * lanes]
            if lanes == 1:
                number = arena[numbers]
                for i in range(width):
                    v = x[i] * number if product else x[i] + number
                    total += v
                    out[i] = min(max(v, low), high)
            else:
                own = arena[numbers : numbers + lanes]
                for i in range(width):
                    for lane in range(lanes):
                        v = x[i * lanes + lane]
                        v = v * own[lane] if product else v + own[lane]
                        total += v
                        out[i * lanes + lane] = min(max(v, low), high)
    nonfinite[0] += total * np.float32(0.0)


@njit(error_model="numpy", fastmath=FAST_SUMS)
def leaky_channels(op, arena, consts, nonfinite, first, last):
    """Multiply the negative numbers of each plane by one constant per channel."""
    total = np.float32(0.0)
    for c in range(first, last):
        slope = consts[op[BIAS] + c]
        source, target = op[SOURCE] + c * op[SOURCE_PLANE], op[TARGET] + c * op[TARGET_PLANE]
        x = arena[source : source + op[SOURCE_PLANE]]
        y = arena[target : target + op[SOURCE_PLANE]]
        for i in range(len(x)):
            v = x[i] * slope if x[i] < 0 else x[i]
            total += v
            y[i] = v
    nonfinite[0] += total * np.float32(0.0)


@njit(error_model="numpy", fastmath=FAST_SUMS)
def combine(x, z, y, product, low, high, nonfinite):
    """y = x + z or x · z, clamped to [low, high]."""
    total = np.float32(0.0)
    if product:
        for i in range(len(x)):
            v = x[i] * z[i]
            total += v
            y[i] = min(max(v, low), high)
    else:
        for i in range(len(x)):
            v = x[i] + z[i]
            total += v
            y[i] = min(max(v, low), high)
    nonfinite[0] += total * np.float32(0.0)


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address to a pointer to floats."""
    kind = types.CPointer(types.float32)

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64), generate


@njit(error_model="numpy", fastmath=FAST_SUMS)
def pack(op, arena, image, nonfinite, first, last):
    """Copy an image from an external tensor into planes."""
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
    nonfinite[0] += total * np.float32(0.0)


@njit(error_model="numpy")
def unpack(op, arena, external, image, first, last):
    """Copy planes into an external tensor."""
    height, width, lanes = op[HEIGHT], op[IMAGE_WIDTH], op[LANES]
    size = op[ROWS] * height * width
    whole = carray(pointer(external), (image + lanes) * size)
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
def interleave(op, arena, lane, first, last):
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
def split_phases(op, arena, longs, first, last):
    """Copy every ``step``-th row and column into the planes of their phases.

    Each entry of the table describes one plane: its offset in the source, its offset in the target,
    its number of rows and its number of columns. Runs of ``TOGETHER`` entries have all phases of
    the same rows, so that each row is read once. ``first`` to ``last`` count runs.
    """
    lanes, step_y, step_x = op[LANES], op[STEP_Y], op[STEP_X]
    together, plane = op[TOGETHER], 4 * op[TARGET_PLANE]
    at = arena.ctypes.data
    for run in range(first, last):
        place = op[TABLE] + 4 * run * together
        rows, columns = longs[place + 2], longs[place + 3]
        for y in range(rows):
            source = op[SOURCE] + longs[place] + y * step_y * op[SOURCE_STRIDE] * lanes
            target = op[TARGET] + longs[place + 1] + y * op[TARGET_STRIDE] * lanes
            if together > 1:
                split_row(step_x, at + 4 * source, at + 4 * target, plane, columns)
            elif lanes == 1 and step_x == 2:
                copy_every_second(at + 4 * source, at + 4 * target, columns)
            elif step_x == 1:
                row, result = arena[source:], arena[target : target + columns * lanes]
                for x in range(columns * lanes):
                    result[x] = row[x]
            elif lanes == 1:
                row, result = arena[source:], arena[target : target + columns]
                for x in range(columns):
                    result[x] = row[x * step_x]
            else:
                for x in range(columns):
                    for lane in range(lanes):
                        value = arena[source + x * step_x * lanes + lane]
                        arena[target + x * lanes + lane] = value
