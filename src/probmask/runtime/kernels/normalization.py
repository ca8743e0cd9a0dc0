"""Normalization: LayerNorm, RMSNorm and softmax over channels, GroupNorm and InstanceNorm."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from probmask.runtime.kernels.attention import softmax_column
from probmask.runtime.kernels.curves import number
from probmask.runtime.kernels.elementwise import FAST_SUMS
from probmask.runtime.kernels.operation_table import (
    BIAS,
    CENTERED,
    CHANNELS,
    HEIGHT,
    IMAGE_WIDTH,
    POSITION_BITS,
    SOURCE,
    SOURCE_LEAD,
    SOURCE_PLANE,
    SOURCE_STRIDE,
    SPLITS,
    TARGET,
    TARGET_LEAD,
    TARGET_PLANE,
    TARGET_STRIDE,
)
from probmask.runtime.kernels.vectors import (
    BITS,
    BYTE,
    FLOAT,
    LONG,
    VECTOR,
    WIDTH,
    ZERO,
    item,
    load,
    loop,
    multiply_add,
    splat,
    store,
    total,
)

# Channels that are summed at once, each with its own sums, because additions wait for each other.
_AT_ONCE = 4


@intrinsic
def _normalize_column(
    typing_context: Any,
    source: Any,
    source_plane: Any,
    target: Any,
    target_plane: Any,
    channels: Any,
    scale: Any,
    bits: Any,
    centered: Any,
    epsilon: Any,
    nonfinite: Any,
) -> Any:
    """Normalize a vector of positions; the biases of all channels follow their scales."""
    signature = types.void(*[types.int64] * 8, types.float32, types.int64)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        _Column(builder, given).emit()
        return ir.Constant(BYTE.as_pointer(), None)

    return signature, generate


class _Column:
    """Emits the code for one vector of positions."""

    def __init__(self, builder: ir.IRBuilder, given: Any) -> None:
        self.builder = builder
        (self.source, self.source_plane, self.target, self.target_plane, self.channels, self.scale,
         self.bits, self.centered, self.epsilon, self.nonfinite) = given  # fmt: skip

    def emit(self) -> None:
        builder, zero = self.builder, ir.Constant(LONG, 0)
        count = splat(builder, builder.sitofp(self.channels, FLOAT))
        before = builder.block
        some, after = builder.append_basic_block("centered"), builder.append_basic_block("mean")
        builder.cbranch(builder.icmp_signed("!=", self.centered, zero), some, after)
        builder.position_at_end(some)
        mean = builder.fdiv(self._sum(lambda x: x, None), count)
        inside = builder.block
        builder.branch(after)
        builder.position_at_end(after)
        center = builder.phi(VECTOR)
        center.add_incoming(ZERO, before)
        center.add_incoming(mean, inside)
        squares = builder.fdiv(self._sum(lambda x: builder.fsub(x, center), "squares"), count)
        root = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.sqrt.v{WIDTH}f32"
        )
        deviation = builder.call(root, [builder.fadd(squares, splat(builder, self.epsilon))])
        self._write(center, builder.fdiv(number(1.0), deviation))

    def _sum(self, term: Any, kind: str | None) -> ir.Value:
        """Emit the sum of a term over all channels, or of its square."""
        builder = self.builder
        rest = builder.srem(self.channels, ir.Constant(LONG, _AT_ONCE))
        middle = builder.sub(self.channels, rest)

        def body(index: ir.Value, sums: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
            new = []
            for k, summed in enumerate(sums):
                channel = builder.add(index, ir.Constant(LONG, k))
                at = builder.add(self.source, builder.mul(channel, self.source_plane))
                x = term(load(builder, at, 0, VECTOR))
                squared = multiply_add(builder, x, x, summed)
                new.append(squared if kind else builder.fadd(summed, x))
            return tuple(new)

        sums = loop(builder, ir.Constant(LONG, 0), middle, _AT_ONCE, (ZERO,) * _AT_ONCE, body)
        first = (total(builder, sums),)
        return loop(builder, middle, self.channels, 1, first, body)[0]

    def _write(self, center: ir.Value, factor: ir.Value) -> None:
        """Emit scale · (x - center) · factor + bias, and zeros in the padding."""
        builder = self.builder
        bits = load(builder, self.bits, 0, BITS)

        def body(index: ir.Value, carried: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
            at = builder.add(self.source, builder.mul(index, self.source_plane))
            x = builder.fmul(builder.fsub(load(builder, at, 0, VECTOR), center), factor)
            scale = splat(builder, item(builder, self.scale, index, FLOAT))
            bias_index = builder.add(index, self.channels)
            bias = splat(builder, item(builder, self.scale, bias_index, FLOAT))
            y = multiply_add(builder, x, scale, bias)
            kept = builder.bitcast(builder.and_(builder.bitcast(y, BITS), bits), VECTOR)
            place = builder.add(self.target, builder.mul(index, self.target_plane))
            store(builder, kept, place, 0)
            return (builder.fadd(carried[0], kept),)

        (summed,) = loop(builder, ir.Constant(LONG, 0), self.channels, 1, (ZERO,), body)
        noted = multiply_add(builder, summed, ZERO, load(builder, self.nonfinite, 0, VECTOR))
        store(builder, noted, self.nonfinite, 0)


@njit(error_model="numpy")
def normalize(op, arena, consts, position_bits, epsilon, nonfinite, first, last):
    """Normalize vectors ``first`` to ``last`` of the positions over all channels."""
    at = arena.ctypes.data
    if op[SOURCE_PLANE] == 1:  # one position: its channels are next to each other
        if first < last:
            _normalize_single(op, arena, consts, epsilon, nonfinite)
        return
    for vector in range(first, last):
        skipped = 4 * WIDTH * vector
        _normalize_column(
            at + 4 * (op[SOURCE] + op[SOURCE_LEAD]) + skipped,
            4 * op[SOURCE_PLANE],
            at + 4 * (op[TARGET] + op[TARGET_LEAD]) + skipped,
            4 * op[TARGET_PLANE],
            op[CHANNELS],
            consts.ctypes.data + 4 * op[BIAS],
            position_bits.ctypes.data + 4 * op[POSITION_BITS] + skipped,
            op[CENTERED],
            epsilon,
            nonfinite.ctypes.data,
        )


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _normalize_single(op, arena, consts, epsilon, nonfinite):
    """Normalize the channels of a single position."""
    channels = op[CHANNELS]
    x = arena[op[SOURCE] : op[SOURCE] + channels]
    y = arena[op[TARGET] : op[TARGET] + channels]
    scale = consts[op[BIAS] : op[BIAS] + channels]
    bias = consts[op[BIAS] + channels : op[BIAS] + 2 * channels]
    center = np.float32(0.0)
    if op[CENTERED]:
        for i in range(channels):
            center += x[i]
        center /= np.float32(channels)
    squares = np.float32(0.0)
    for i in range(channels):
        squares += (x[i] - center) * (x[i] - center)
    factor = np.float32(1.0) / np.sqrt(squares / np.float32(channels) + epsilon)
    total = np.float32(0.0)
    for i in range(channels):
        value = (x[i] - center) * factor * scale[i] + bias[i]
        total += value
        y[i] = value
    nonfinite[0] += total * np.float32(0.0)


@njit(error_model="numpy", fastmath=FAST_SUMS)
def normalize_groups(op, arena, consts, epsilon, nonfinite, first, last):
    """Normalize the groups ``first`` to ``last`` over their channels and positions."""
    channels, rows = op[CHANNELS], op[HEIGHT]
    count = np.float32(channels * rows * op[IMAGE_WIDTH])
    for group in range(first, last):
        begin = group * channels
        total = np.float32(0.0)
        for c in range(begin, begin + channels):
            for y in range(rows):
                total += _row_sum(_row(op, arena, c, y), np.float32(0.0), False)
        center = total / count
        squares = np.float32(0.0)
        for c in range(begin, begin + channels):
            for y in range(rows):
                squares += _row_sum(_row(op, arena, c, y), center, True)
        factor = np.float32(1.0) / np.sqrt(squares / count + epsilon)
        checked = np.float32(0.0)
        for c in range(begin, begin + channels):
            scale = factor * consts[op[BIAS] + c]
            shift = consts[op[BIAS] + op[SPLITS] + c] - center * scale
            for y in range(rows):
                start = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
                start += y * op[TARGET_STRIDE]
                out = arena[start : start + op[IMAGE_WIDTH]]
                x = _row(op, arena, c, y)
                for i in range(len(x)):
                    value = x[i] * scale + shift
                    checked += value
                    out[i] = value
        nonfinite[0] += checked * np.float32(0.0)


@njit(error_model="numpy")
def _row(op, arena, channel, y):
    start = op[SOURCE] + channel * op[SOURCE_PLANE] + op[SOURCE_LEAD] + y * op[SOURCE_STRIDE]
    return arena[start : start + op[IMAGE_WIDTH]]


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _row_sum(x, center, squared):
    total = np.float32(0.0)
    if squared:
        for i in range(len(x)):
            total += (x[i] - center) * (x[i] - center)
    else:
        for i in range(len(x)):
            total += x[i]
    return total


@njit(error_model="numpy", fastmath=FAST_SUMS)
def softmax(op, arena, position_bits, scratch, nonfinite, first, last):
    """Compute the softmax over channels of the vectors ``first`` to ``last`` of the positions.

    The target first holds a copy of the source, then the exponentials, then the result.
    """
    channels = op[CHANNELS]
    if op[SOURCE_PLANE] == 1:  # one position: its channels are next to each other
        if first < last:
            _softmax_single(
                arena[op[SOURCE] : op[SOURCE] + channels],
                arena[op[TARGET] : op[TARGET] + channels],
                nonfinite,
            )
        return
    for vector in range(first, last):
        skipped = WIDTH * vector
        source = op[SOURCE] + op[SOURCE_LEAD] + skipped
        target = op[TARGET] + op[TARGET_LEAD] + skipped
        for c in range(channels):
            place, start = target + c * op[TARGET_PLANE], source + c * op[SOURCE_PLANE]
            arena[place : place + WIDTH] = arena[start : start + WIDTH]
        softmax_column(
            arena.ctypes.data + 4 * target, 4 * op[TARGET_PLANE], channels, 0, 0, 0,
            position_bits.ctypes.data + 4 * (op[POSITION_BITS] + skipped),
            scratch.ctypes.data, nonfinite.ctypes.data, np.float32(-np.inf),
        )  # fmt: skip
        for c in range(channels):
            place = target + c * op[TARGET_PLANE]
            for i in range(WIDTH):
                arena[place + i] *= scratch[i]


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _softmax_single(x, y, nonfinite):
    """Compute the softmax of a vector."""
    top = x[0]
    for i in range(len(x)):
        top = max(top, x[i])
    total = np.float32(0.0)
    for i in range(len(x)):
        y[i] = np.exp(x[i] - top)
        total += y[i]
    for i in range(len(x)):
        y[i] /= total
    nonfinite[0] += total * np.float32(0.0)
