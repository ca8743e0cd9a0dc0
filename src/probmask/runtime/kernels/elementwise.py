"""Elementwise kernels: activations, sums, products, and copies between layouts."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from probmask.runtime.kernels.operation_table import (
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
    Curve,
)
from probmask.runtime.kernels.vectors import copy_every_second

# LLVM may reorder and contract sums, but may not assume that NaN and infinity do not occur.
FAST_SUMS = {"contract", "reassoc", "nsz"}
_SILU, _GELU, _GELU_TANH = int(Curve.SILU), int(Curve.GELU), int(Curve.GELU_TANH)
_HARDSWISH = int(Curve.HARDSWISH)


@intrinsic
def _two_to_the(typing_context: Any, exponent: Any) -> Any:
    """Compute 2 ** exponent for an exponent in [-126, 127] from its bit pattern."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        int32 = ir.IntType(32)
        biased = builder.add(arguments[0], ir.Constant(int32, 127))
        bits = builder.shl(biased, ir.Constant(int32, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always", error_model="numpy")
def _exp(x):
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1.0)) * _two_to_the(np.int32(n))


@njit(inline="always", error_model="numpy")
def _sigmoid(x):
    # Below -87, where `_exp` is clamped, the result is not 0; times a large x the error would show.
    value = np.float32(1.0) / (np.float32(1.0) + _exp(-x))
    return value if x > np.float32(-87.0) else np.float32(0.0)


@njit(inline="always", error_model="numpy")
def _erf(x):
    """Approximate erf by Abramowitz and Stegun 7.1.26, with an error of at most 1.5e-7."""
    a = abs(x)
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3275911) * a)
    p = np.float32(1.061405429)
    p = p * t - np.float32(1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t - np.float32(0.284496736)
    p = p * t + np.float32(0.254829592)
    y = np.float32(1.0) - p * t * _exp(-a * a)
    return y if x >= 0 else -y


@njit(error_model="numpy", fastmath=FAST_SUMS)
def activate(x, y, curve, low, high, nonfinite):
    """y = curve(x), or x clamped to [low, high]; either maps 0 to 0, so padding stays zero."""
    n = len(x)
    total = np.float32(0.0)
    for i in range(n):
        total += x[i]
    nonfinite[0] += total * np.float32(0.0)
    if curve == _SILU:
        for i in range(n):
            y[i] = x[i] * _sigmoid(x[i])
    elif curve == _GELU:
        for i in range(n):
            v = x[i]
            y[i] = np.float32(0.5) * v * (np.float32(1.0) + _erf(v * np.float32(0.70710678)))
    elif curve == _GELU_TANH:
        for i in range(n):
            v = x[i]
            inner = np.float32(1.5957691216) * (v + np.float32(0.044715) * v * v * v)
            y[i] = v * _sigmoid(inner)
    elif curve == _HARDSWISH:
        for i in range(n):
            gate = min(max(x[i] + np.float32(3.0), np.float32(0.0)), np.float32(6.0))
            y[i] = x[i] * gate / np.float32(6.0)
    else:
        for i in range(n):
            y[i] = min(max(x[i], low), high)


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
    its number of rows and its number of columns.
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
                copy_every_second(at + 4 * source, at + 4 * target, columns)
            elif step_x == 1:
                row, result = arena[source:], arena[target : target + columns * lanes]
                for x in range(columns * lanes):
                    result[x] = row[x]
            else:
                for x in range(columns):
                    for lane in range(lanes):
                        value = arena[source + x * step_x * lanes + lane]
                        arena[target + x * lanes + lane] = value
