"""Shuffles of image rows as LLVM vector code: transposing, splitting, interleaving, pooling.

Addresses and steps are in bytes.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from probmask.runtime.kernels.vectors import (
    BITS,
    BYTE,
    FLOAT,
    INT,
    LONG,
    VECTOR,
    WIDTH,
    load,
    loop,
    store,
)

# Emits code for the given number of results, starting at an index.
_Emit = Callable[[ir.IRBuilder, ir.Value, int], ir.Value]
# The steps that `split_row` has code for.
SPLIT_STEPS = (2, 4, 8, 16)


@intrinsic
def transpose(
    typing_context: Any, source: Any, source_step: Any, target: Any, target_step: Any
) -> Any:
    """Transpose a square of as many vectors as a vector has elements; steps are in bytes."""
    signature = types.void(*[types.int64] * 4)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        source, source_step, target, target_step = given
        rows = []
        for _row in range(WIDTH):
            rows.append(load(builder, source, 0, VECTOR))
            source = builder.add(source, source_step)
        size = 1
        while size < WIDTH:  # swap blocks of this size across the diagonal
            for i in (i for i in range(WIDTH) if not i & size):
                pair = rows[i], rows[i + size]
                upper = [j if not j & size else WIDTH + j - size for j in range(WIDTH)]
                lower = [j + size if not j & size else WIDTH + j for j in range(WIDTH)]
                rows[i] = builder.shuffle_vector(*pair, ir.Constant(BITS, upper))
                rows[i + size] = builder.shuffle_vector(*pair, ir.Constant(BITS, lower))
            size *= 2
        for row in rows:
            store(builder, row, target, 0)
            target = builder.add(target, target_step)
        return ir.Constant(BYTE.as_pointer(), None)

    return signature, generate


@intrinsic
def copy_every_second(typing_context: Any, source: Any, target: Any, count: Any) -> Any:
    """target[x] = source[2 x] for x < ``count``; source and target are addresses in bytes."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        def emit(builder: ir.IRBuilder, index: ir.Value, width: int) -> ir.Value:
            return _evens_and_odds(builder, given[0], index, width)[0]

        return _write_row(builder, given[1], given[2], emit)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def split_row(
    typing_context: Any, step: Any, source: Any, target: Any, plane: Any, count: Any
) -> Any:
    """target[k][x] = source[step · x + k] for k < ``step`` and x < ``count``.

    ``plane`` is the number of bytes from one row of the target to the next.
    """

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        step, source, target, plane, count = given
        done = builder.append_basic_block("done")
        switch = builder.switch(step, done)
        for size in SPLIT_STEPS:
            block = builder.append_basic_block(f"split{size}")
            switch.add_case(ir.Constant(LONG, size), block)
            builder.position_at_end(block)
            _split_row(builder, size, source, target, plane, count)
            builder.branch(done)
        builder.position_at_end(done)
        return ir.Constant(BYTE.as_pointer(), None)

    return types.void(*[types.int64] * 5), generate


def _split_row(
    builder: ir.IRBuilder,
    step: int,
    source: ir.Value,
    target: ir.Value,
    plane: ir.Value,
    count: ir.Value,
) -> None:
    def write(index: ir.Value, width: int) -> tuple[ir.Value, ...]:
        first = builder.add(source, builder.mul(index, ir.Constant(LONG, 4 * step)))
        place = builder.add(target, builder.shl(index, ir.Constant(LONG, 2)))
        loaded = [_load_few(builder, first, 4 * width * k, width) for k in range(step)]
        for row in _split(builder, loaded):
            builder.store(row, builder.inttoptr(place, row.type.as_pointer())).align = 4
            place = builder.add(place, plane)
        return ()

    _for_each(builder, count, write)


def _split(builder: ir.IRBuilder, row: list[ir.Value]) -> list[ir.Value]:
    """Split a row of n vectors into n vectors, of which the k-th has every n-th element from k."""
    if len(row) == 1:
        return row
    halves: tuple[list[ir.Value], list[ir.Value]] = ([], [])
    for i in range(0, len(row), 2):
        for half, part in zip(halves, _unzip(builder, row[i], row[i + 1]), strict=True):
            half.append(part)
    evens, odds = (_split(builder, half) for half in halves)
    return [part for pair in zip(evens, odds, strict=True) for part in pair]


@intrinsic
def interleave_two(typing_context: Any, even: Any, odd: Any, target: Any, count: Any) -> Any:
    """target[2 x] = even[x] and target[2 x + 1] = odd[x] for x < ``count``."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        whole = builder.and_(given[3], ir.Constant(LONG, -WIDTH))

        def write(index: ir.Value, width: int) -> tuple[ir.Value, ...]:
            kind = ir.VectorType(FLOAT, width)
            both = []
            for row in given[:2]:
                address = builder.add(row, builder.shl(index, ir.Constant(LONG, 2)))
                loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
                loaded.align = 4
                both.append(loaded)
            places = [place for x in range(width) for place in (x, width + x)]
            order = ir.Constant(ir.VectorType(INT, 2 * width), places)
            mixed = builder.shuffle_vector(*both, order)
            address = builder.add(given[2], builder.shl(index, ir.Constant(LONG, 3)))
            builder.store(mixed, builder.inttoptr(address, mixed.type.as_pointer())).align = 4
            return ()

        loop(builder, ir.Constant(LONG, 0), whole, WIDTH, (), lambda i, _: write(i, WIDTH))
        loop(builder, whole, given[3], 1, (), lambda i, _: write(i, 1))
        return ir.Constant(LONG, 0)

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def max_of_2x2(typing_context: Any, upper: Any, lower: Any, target: Any, count: Any) -> Any:
    """target[x] = max of columns 2 x and 2 x + 1 of two rows, for x < ``count``."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        def emit(builder: ir.IRBuilder, index: ir.Value, width: int) -> ir.Value:
            return _max(
                builder,
                *_evens_and_odds(builder, given[0], index, width),
                *_evens_and_odds(builder, given[1], index, width),
            )

        return _write_row(builder, given[2], given[3], emit)

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def max_of_3x3(
    typing_context: Any, upper: Any, middle: Any, lower: Any, target: Any, count: Any
) -> Any:
    """target[x] = max of columns 2 x to 2 x + 2 of three rows, for x < ``count``."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        def emit(builder: ir.IRBuilder, index: ir.Value, width: int) -> ir.Value:
            found: list[ir.Value] = []
            for row in given[:3]:
                third = builder.add(row, ir.Constant(LONG, 8))
                found += _evens_and_odds(builder, row, index, width)
                found.append(_evens_and_odds(builder, third, index, width)[0])
            return _max(builder, *found)

        return _write_row(builder, given[3], given[4], emit)

    return types.int64(*[types.int64] * 5), generate


def _write_row(builder: ir.IRBuilder, target: ir.Value, count: ir.Value, emit: _Emit) -> ir.Value:
    """Emit code that stores ``count`` results."""

    def write(index: ir.Value, width: int) -> tuple[ir.Value, ...]:
        value = emit(builder, index, width)
        address = builder.add(target, builder.shl(index, ir.Constant(LONG, 2)))
        builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4
        return ()

    _for_each(builder, count, write)
    return ir.Constant(LONG, 0)


def _for_each(
    builder: ir.IRBuilder,
    count: ir.Value,
    write: Callable[[ir.Value, int], tuple[ir.Value, ...]],
) -> None:
    """Emit code that writes ``count`` results in vectors of the largest width that they fill.

    ``write`` takes an index and a width. The last vector ends at the last result and may overlap
    the one before. Fewer than four results are written singly.
    """
    zero = ir.Constant(LONG, 0)

    def write_all(width: int) -> None:
        if width < 4:
            loop(builder, zero, count, 1, (), lambda i, _: write(i, 1))
            return
        wide = ir.Constant(LONG, width)
        with builder.if_else(builder.icmp_signed("<", count, wide)) as (too_few, enough):
            with too_few:
                write_all(width // 2)
            with enough:
                last = builder.sub(count, wide)
                loop(builder, zero, last, width, (), lambda i, _: write(i, width))
                write(last, width)

    write_all(WIDTH)


def _evens_and_odds(
    builder: ir.IRBuilder, row: ir.Value, index: ir.Value, width: int
) -> tuple[ir.Value, ir.Value]:
    """Load elements 2 i and 2 i + 1 of a row, for ``width`` values of i from ``index`` on."""
    first = builder.add(row, builder.shl(index, ir.Constant(LONG, 3)))
    both = (_load_few(builder, first, shift, width) for shift in (0, 4 * width))
    return _unzip(builder, *both)


def _load_few(builder: ir.IRBuilder, address: ir.Value, shift: int, width: int) -> ir.Value:
    """Load a vector of ``width`` numbers, or one number, ``shift`` bytes behind an address."""
    kind = FLOAT if width == 1 else ir.VectorType(FLOAT, width)
    place = builder.add(address, ir.Constant(LONG, shift))
    loaded = builder.load(builder.inttoptr(place, kind.as_pointer()))
    loaded.align = 4
    return loaded


def _unzip(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Emit the even and the odd elements of two vectors, or of two numbers."""
    if first.type == FLOAT:
        return first, second
    width = first.type.count
    places = ir.VectorType(INT, width)
    evens, odds = (
        builder.shuffle_vector(first, second, ir.Constant(places, list(range(start, 2 * width, 2))))
        for start in (0, 1)
    )
    return evens, odds


def _max(builder: ir.IRBuilder, *values: ir.Value) -> ir.Value:
    result = values[0]
    for value in values[1:]:
        result = builder.select(builder.fcmp_ordered(">", value, result), value, result)
    return result
