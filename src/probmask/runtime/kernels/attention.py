"""Attention on planes: scores, softmax and the weighted sum of the values.

Queries, keys and values are planes of positions, one per feature. Scores are stored key by key,
with the queries of a block next to each other. So every step of all three parts works on vectors of
queries: a score is a sum over features of (key, broadcast) · (queries), the softmax runs over the
keys of each query, and an output is a sum over keys of (value, broadcast) · (probabilities).
"""

from itertools import product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from probmask.runtime.kernels.curves import exp_below_one, number
from probmask.runtime.kernels.operation_table import (
    CAUSAL,
    DEPTH,
    KEYS,
    MASK,
    MASK_HEADS,
    MASK_IS_CONSTANT,
    MASK_PLANE,
    OTHER,
    OTHER_PLANE,
    POSITION_BITS,
    SCRATCH,
    SCRATCH_SIZE,
    SOURCE,
    SOURCE_PLANE,
    TABLE,
    TARGET,
    TARGET_PLANE,
    TILES,
    VALUES,
    VALUES_PLANE,
    VECTORS,
)
from probmask.runtime.kernels.vectors import (
    BITS,
    BYTE,
    FLOAT,
    HALF,
    LONG,
    VECTOR,
    WIDTH,
    ZERO,
    followed_by_zeros,
    item,
    load,
    loop,
    lower_half,
    multiply_add,
    splat,
    store,
    total,
)

# Vectors of queries in a block, and rows that are summed at once: their sums stay in registers.
MAX_QUERY_VECTORS = 4 if WIDTH == 16 else 3
ROWS_AT_ONCE = 4
# The softmax takes no smaller number as the largest score, so that a query whose scores are all -∞
# gives zeros.
LEAST_SCORE = -float(np.finfo(np.float32).max)
# Arguments of a tile's function, in order. Addresses and strides are in bytes.
_ARGUMENTS = (
    "count",  # number of products per sum
    "scalars",  # address of the first broadcast number
    "scalar_step",  # from one product to the next
    "scalar_row",  # from one row to the next
    "vectors",  # address of the first vector
    "vector_step",  # from one product to the next
    "target",
    "target_row",
    "factors",  # address of the vectors that the sums are multiplied with
    "nonfinite",  # address of a vector that becomes NaN if a sum is not finite
)


@intrinsic
def _dense_tile(
    typing_context: Any,
    shape: Any,
    count: Any,
    scalars: Any,
    scalar_step: Any,
    scalar_row: Any,
    vectors: Any,
    vector_step: Any,
    target: Any,
    target_row: Any,
    factors: Any,
    nonfinite: Any,
) -> Any:
    """Compute a few rows of a few vectors.

    ``shape`` is 16 · rows + 2 · vectors, plus 1 if the last vector is half a vector.
    """
    signature = types.void(*[types.int64] * 11)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        done = builder.append_basic_block("done")
        switch = builder.switch(arguments[0], done)
        widths = range(1, MAX_QUERY_VECTORS + 1)
        for rows, width, half in product((1, ROWS_AT_ONCE), widths, (0, 1)):
            block = builder.append_basic_block(f"dense{rows}x{width}h{half}")
            switch.add_case(ir.Constant(LONG, 16 * rows + 2 * width + half), block)
            builder.position_at_end(block)
            builder.call(_tile_function(builder.module, rows, width, half), arguments[1:])
            builder.branch(done)
        builder.position_at_end(done)
        return ir.Constant(BYTE.as_pointer(), None)

    return signature, generate


def _tile_function(module: ir.Module, rows: int, width: int, half: int) -> ir.Function:
    """Return the function of a tile; in the last vector it computes ``half`` or the whole."""
    name = f"probmask_dense_{rows}x{width}h{half}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * len(_ARGUMENTS)), name)
    function.linkage = "internal"
    given = dict(zip(_ARGUMENTS, function.args, strict=True))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    zero = ir.Constant(LONG, 0)

    kinds = (VECTOR,) * (width - half) + (HALF,) * half

    def products(index: ir.Value, sums: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        at = builder.add(given["vectors"], builder.mul(index, given["vector_step"]))
        whole = [load(builder, at, j, VECTOR) for j in range(width - half)]
        # Half vectors are counted in halves.
        inputs = whole + [load(builder, at, 2 * (width - 1), HALF) for _ in range(half)]
        place = builder.add(given["scalars"], builder.mul(index, given["scalar_step"]))
        new = []
        for row in range(rows):
            scalar = splat(builder, item(builder, place, zero, FLOAT))
            factors = [scalar] * (width - half) + [lower_half(builder, scalar)] * half
            own = sums[row * width : (row + 1) * width]
            new += [
                multiply_add(builder, factor, x, summed)
                for factor, x, summed in zip(factors, inputs, own, strict=True)
            ]
            place = builder.add(place, given["scalar_row"])
        return tuple(new)

    start = tuple(ir.Constant(kind, [0.0] * kind.count) for kind in kinds) * rows
    found = loop(builder, zero, given["count"], 1, start, products)
    sums = tuple(x if x.type == VECTOR else followed_by_zeros(builder, x) for x in found)
    noted = load(builder, given["nonfinite"], 0, VECTOR)
    noted = multiply_add(builder, total(builder, sums), ZERO, noted)
    store(builder, noted, given["nonfinite"], 0)
    factors = [load(builder, given["factors"], j, VECTOR) for j in range(width)]
    target = given["target"]
    for row in range(rows):
        for j in range(width):
            store(builder, builder.fmul(sums[row * width + j], factors[j]), target, j)
        target = builder.add(target, given["target_row"])
    builder.ret_void()
    return function


@intrinsic
def softmax_column(
    typing_context: Any,
    scores: Any,
    row: Any,
    keys: Any,
    mask: Any,
    mask_row: Any,
    mask_is_vector: Any,
    bits: Any,
    reciprocal: Any,
    nonfinite: Any,
    least: Any,
) -> Any:
    """Replace a vector of scores per key by exp(score - largest), and store 1 / sum.

    The mask is added first, if its address is not 0. It has a vector or one number per key. The
    reciprocal of the sum is 0 in the padding, so that outputs are, too. If all scores are -∞, the
    result is not finite if ``least`` is -∞, and zeros if it is `LEAST_SCORE`.
    """
    signature = types.void(*[types.int64] * 9, types.float32)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        _emit_softmax(builder, given)
        return ir.Constant(BYTE.as_pointer(), None)

    return signature, generate


def _emit_softmax(builder: ir.IRBuilder, given: Any) -> None:
    scores, row, keys, mask, mask_row, mask_is_vector, bits, reciprocal, nonfinite, least = given
    zero = ir.Constant(LONG, 0)

    def place(index: ir.Value) -> ir.Value:
        return builder.add(scores, builder.mul(index, row))

    def add_mask(value: Any) -> None:
        def body(index: ir.Value, carried: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
            score = load(builder, place(index), 0, VECTOR)
            at = builder.add(mask, builder.mul(index, mask_row))
            masked = builder.fadd(score, value(at))
            store(builder, masked, place(index), 0)
            is_number = builder.fcmp_ordered("==", masked, masked)
            return (builder.select(is_number, carried[0], number(float("nan"))),)

        (alarm,) = loop(builder, zero, keys, 1, (load(builder, nonfinite, 0, VECTOR),), body)
        store(builder, alarm, nonfinite, 0)

    def largest(index: ir.Value, carried: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        score = load(builder, place(index), 0, VECTOR)
        above = builder.fcmp_ordered(">", score, carried[0])
        return (builder.select(above, score, carried[0]),)

    with builder.if_then(builder.icmp_signed("!=", mask, zero)):  # noqa: SIM117
        with builder.if_else(builder.icmp_signed("!=", mask_is_vector, zero)) as (many, one):
            with many:
                add_mask(lambda at: load(builder, at, 0, VECTOR))
            with one:
                add_mask(lambda at: splat(builder, item(builder, at, zero, FLOAT)))
    (top,) = loop(builder, zero, keys, 1, (splat(builder, least),), largest)

    def exponential(index: ir.Value, carried: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        score = load(builder, place(index), 0, VECTOR)
        value = exp_below_one(builder, builder.fsub(score, top))
        store(builder, value, place(index), 0)
        return (builder.fadd(carried[0], value),)

    (summed,) = loop(builder, zero, keys, 1, (ZERO,), exponential)
    # The largest score adds 1 to the sum, unless all are -∞.
    visible = builder.fcmp_ordered(">", summed, number(0.5))
    inverse = builder.select(visible, builder.fdiv(number(1.0), summed), ZERO)
    padded = load(builder, bits, 0, BITS)
    kept = builder.and_(builder.bitcast(inverse, BITS), padded)
    store(builder, builder.bitcast(kept, VECTOR), reciprocal, 0)
    alarm = builder.fmul(top, ZERO)  # NaN for ∞ and -∞
    store(builder, builder.fadd(load(builder, nonfinite, 0, VECTOR), alarm), nonfinite, 0)


@njit(error_model="numpy")
def _dense_rows(
    rows, width, half, count, scalars, scalar_step, scalar_row, vectors, vector_step, target,
    target_row, factors, nonfinite,
):  # fmt: skip
    """Compute all rows of a block of queries, a few at a time."""
    row = 0
    while row < rows:
        at_once = ROWS_AT_ONCE if row + ROWS_AT_ONCE <= rows else 1
        _dense_tile(
            16 * at_once + 2 * width + half,
            count,
            scalars + row * scalar_row,
            scalar_step,
            scalar_row,
            vectors,
            vector_step,
            target + row * target_row,
            target_row,
            factors,
            nonfinite,
        )
        row += at_once


@njit(error_model="numpy")
def attend(op, arena, longs, consts, position_bits, scale, least, nonfinite, first, last, thread):
    """Compute attention for the items ``first`` to ``last``: pairs of a head and a query block.

    The table holds, per head, the offsets of its queries, keys, values and outputs in their
    tensors. The scratch holds two vectors per query vector, then the scores.
    """
    at, blocks, keys, depth = arena.ctypes.data, op[TILES], op[KEYS], op[DEPTH]
    scratch = op[SCRATCH] + thread * op[SCRATCH_SIZE]
    factors = at + 4 * scratch
    for i in range(MAX_QUERY_VECTORS * WIDTH):
        arena[scratch + i] = scale
    reciprocals = factors + 4 * MAX_QUERY_VECTORS * WIDTH
    scores = reciprocals + 4 * MAX_QUERY_VECTORS * WIDTH
    for item_ in range(first, last):
        head, block = item_ // blocks, item_ % blocks
        begin, end = op[VECTORS] * block // blocks, op[VECTORS] * (block + 1) // blocks
        width, skipped = end - begin, 4 * WIDTH * begin
        last_half = op[POSITION_BITS] + WIDTH * end - WIDTH // 2
        half = 0 if position_bits[last_half : last_half + WIDTH // 2].any() else 1
        heads = op[TABLE] + 4 * head
        queries = at + 4 * (op[SOURCE] + longs[heads]) + skipped
        key = at + 4 * (op[OTHER] + longs[heads + 1])
        value = at + 4 * (op[VALUES] + longs[heads + 2])
        target = at + 4 * (op[TARGET] + longs[heads + 3]) + skipped
        row = 4 * WIDTH * width
        seen = min(keys, WIDTH * end) if op[CAUSAL] else keys
        _dense_rows(
            seen, width, half, depth, key, 4 * op[OTHER_PLANE], 4, queries, 4 * op[SOURCE_PLANE],
            scores, row, factors, nonfinite.ctypes.data,
        )  # fmt: skip
        mask, mask_row, is_vector = 0, 4 * op[MASK_PLANE], 1 if op[MASK_PLANE] > 1 else 0
        if op[MASK] >= 0:
            base = consts.ctypes.data if op[MASK_IS_CONSTANT] else at
            mask = base + 4 * op[MASK] + (head % op[MASK_HEADS]) * keys * mask_row
            mask += skipped * is_vector
        for j in range(width):
            softmax_column(
                scores + 4 * WIDTH * j, row, seen, mask + 4 * WIDTH * j * is_vector if mask else 0,
                mask_row, is_vector, position_bits.ctypes.data
                + 4 * op[POSITION_BITS] + skipped + 4 * WIDTH * j,
                reciprocals + 4 * WIDTH * j, nonfinite.ctypes.data, least,
            )  # fmt: skip
        _dense_rows(
            depth, width, half, seen, value, 4, 4 * op[VALUES_PLANE], scores, row, target,
            4 * op[TARGET_PLANE], reciprocals, nonfinite.ctypes.data,
        )  # fmt: skip


def scratch_size(keys: int) -> int:
    """Return the number of floats that one thread needs."""
    return (2 + keys) * MAX_QUERY_VECTORS * WIDTH
