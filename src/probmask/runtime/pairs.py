"""Rows read two numbers at a time, as LLVM vector code: what strides of two need."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from probmask.runtime.vectors import FLOAT, INT, LONG, WIDTH, loop

# Makes the results from ``index`` on: so many of them.
_Make = Callable[[ir.IRBuilder, ir.Value, int], ir.Value]


@intrinsic
def every_second(typing_context: Any, source: Any, target: Any, count: Any) -> Any:
    """target[x] = source[2 x], for ``count`` numbers; addresses are in bytes."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        def make(builder: ir.IRBuilder, index: ir.Value, width: int) -> ir.Value:
            return _evens_and_odds(builder, given[0], index, width)[0]

        return _write_row(builder, given[1], given[2], make)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def largest_of_two_by_two(
    typing_context: Any, upper: Any, lower: Any, target: Any, count: Any
) -> Any:
    """target[x] is the largest of columns 2 x and 2 x + 1 of two rows."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        def make(builder: ir.IRBuilder, index: ir.Value, width: int) -> ir.Value:
            return _largest(
                builder,
                *_evens_and_odds(builder, given[0], index, width),
                *_evens_and_odds(builder, given[1], index, width),
            )

        return _write_row(builder, given[2], given[3], make)

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def largest_of_three_by_three(
    typing_context: Any, upper: Any, middle: Any, lower: Any, target: Any, count: Any
) -> Any:
    """target[x] is the largest of columns 2 x to 2 x + 2 of three rows."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        def make(builder: ir.IRBuilder, index: ir.Value, width: int) -> ir.Value:
            found: list[ir.Value] = []
            for row in given[:3]:
                third = builder.add(row, ir.Constant(LONG, 8))
                found += _evens_and_odds(builder, row, index, width)
                found.append(_evens_and_odds(builder, third, index, width)[0])
            return _largest(builder, *found)

        return _write_row(builder, given[3], given[4], make)

    return types.int64(*[types.int64] * 5), generate


def _write_row(builder: ir.IRBuilder, target: ir.Value, count: ir.Value, make: _Make) -> ir.Value:
    """Store ``count`` results in vectors, the last of which overlaps; few of them one by one."""
    wide = ir.Constant(LONG, WIDTH)
    zero = ir.Constant(LONG, 0)

    def write(index: ir.Value, width: int) -> tuple[ir.Value, ...]:
        value = make(builder, index, width)
        address = builder.add(target, builder.shl(index, ir.Constant(LONG, 2)))
        place = builder.inttoptr(address, value.type.as_pointer())
        builder.store(value, place).align = 4
        return ()

    with builder.if_else(builder.icmp_signed("<", count, wide)) as (few, many):
        with few:
            loop(builder, zero, count, 1, (), lambda i, _: write(i, 1))
        with many:
            last = builder.sub(count, wide)
            loop(builder, zero, last, WIDTH, (), lambda i, _: write(i, WIDTH))
            write(last, WIDTH)
    return zero


def _evens_and_odds(
    builder: ir.IRBuilder, row: ir.Value, index: ir.Value, width: int
) -> tuple[ir.Value, ir.Value]:
    """The numbers 2 i and 2 i + 1 of a row, for ``width`` values of i from ``index`` on."""
    first = builder.add(row, builder.shl(index, ir.Constant(LONG, 3)))
    kind = FLOAT if width == 1 else ir.VectorType(FLOAT, width)
    step = ir.Constant(LONG, 4 * width)
    both = []
    for address in (first, builder.add(first, step)):
        loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
        loaded.align = 4
        both.append(loaded)
    if width == 1:
        return both[0], both[1]
    places = ir.VectorType(INT, width)
    evens, odds = (
        builder.shuffle_vector(*both, ir.Constant(places, list(range(start, 2 * width, 2))))
        for start in (0, 1)
    )
    return evens, odds


def _largest(builder: ir.IRBuilder, *values: ir.Value) -> ir.Value:
    largest = values[0]
    for value in values[1:]:
        largest = builder.select(builder.fcmp_ordered(">", value, largest), value, largest)
    return largest
