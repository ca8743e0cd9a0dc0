"""The vector code of a recurrent step: a sparse matrix times a vector, and the cell's functions.

For one image, each lane of a register computes one row of the matrix. Sixteen rows take a weight
each from a window of 32 neighboring inputs, which two registers hold. So one permutation fetches
the inputs of sixteen weights. Rows without a weight in the window multiply by zero.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from probmask.runtime.kernels.curves import inverse_sigmoid, number, tanh_ratio
from probmask.runtime.kernels.operation_table import Cell
from probmask.runtime.kernels.vectors import (
    BITS,
    BYTE,
    LONG,
    VECTOR,
    WIDTH,
    ZERO,
    item,
    load,
    loop,
    multiply_add,
    store,
    total,
)

# Whether the processor has the permutation of two registers.
HAS_WINDOWS = WIDTH == 16
# Inputs in a window, and where windows may start.
WINDOW, WINDOW_STEP = 2 * WIDTH, WIDTH
# Longs per window: where it starts in bytes, then one byte per row.
WINDOW_LONGS = 3
# Number of windows that are processed at once; each has its own sums.
WINDOWS_AT_ONCE = 2


@intrinsic
def windowed_rows(
    typing_context: Any,
    groups: Any,
    starts: Any,
    windows: Any,
    values: Any,
    source: Any,
    bias: Any,
    target: Any,
) -> Any:
    """target = bias + weights · source, for groups of sixteen rows.

    All arguments but the first are addresses. ``starts`` has the first window of each group.
    """
    signature = types.void(*[types.int64] * 7)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        groups, starts, windows, values, source, bias, target = given

        def group(row: ir.Value, _: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
            start = item(builder, starts, row, LONG)
            end = item(builder, starts, builder.add(row, ir.Constant(LONG, 1)), LONG)
            shift = builder.mul(row, ir.Constant(LONG, 4 * WIDTH))
            first = load(builder, builder.add(bias, shift), 0, VECTOR)
            sums: tuple[ir.Value, ...] = (first, *(ZERO,) * (WINDOWS_AT_ONCE - 1))

            def several(index: ir.Value, sums: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
                return tuple(
                    _window(builder, windows, values, source, index, k, summed)
                    for k, summed in enumerate(sums)
                )

            sums = loop(builder, start, end, WINDOWS_AT_ONCE, sums, several)
            store(builder, total(builder, sums), builder.add(target, shift), 0)
            return ()

        loop(builder, ir.Constant(LONG, 0), groups, 1, (), group)
        return ir.Constant(BYTE.as_pointer(), None)

    return signature, generate


def _window(
    builder: ir.IRBuilder,
    windows: ir.Value,
    values: ir.Value,
    source: ir.Value,
    index: ir.Value,
    k: int,
    summed: ir.Value,
) -> ir.Value:
    """Add the products of the window ``k`` after an index to the sums of its rows."""
    index = builder.add(index, ir.Constant(LONG, k))
    entry = builder.add(windows, builder.mul(index, ir.Constant(LONG, 8 * WINDOW_LONGS)))
    start = builder.add(source, item(builder, entry, ir.Constant(LONG, 0), LONG))
    places = builder.zext(
        load(builder, builder.add(entry, ir.Constant(LONG, 8)), 0, ir.VectorType(BYTE, WIDTH)), BITS
    )
    kind = ir.FunctionType(VECTOR, [VECTOR, BITS, VECTOR])
    name = "llvm.x86.avx512.vpermi2var.ps.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
    first, second = (load(builder, start, j, VECTOR) for j in range(2))
    inputs = builder.call(permute, [first, places, second])
    place = builder.add(values, builder.mul(index, ir.Constant(LONG, 4 * WIDTH)))
    return multiply_add(builder, inputs, load(builder, place, 0, VECTOR), summed)


# Arguments of a cell's function, in order. Addresses and steps are in bytes.
_ARGUMENTS = (
    "count",  # number of vectors
    "gates",  # address of the input's part of the first gate
    "gate_step",  # from one gate to the next
    "gate_unit",  # from one vector to the next
    "sums",  # address of the hidden state's part
    "sum_step",  # from one gate to the next
    "unit",  # from one vector to the next: of sums, cell, before and after
    "cell",  # address of the cell state, which is replaced
    "before",  # address of the hidden state
    "after",  # address of the new hidden state
    "out",  # address of another copy of it
    "out_unit",
    "nonfinite",
)


@intrinsic
def cell_step(
    typing_context: Any,
    kind: Any,
    count: Any,
    gates: Any,
    gate_step: Any,
    gate_unit: Any,
    sums: Any,
    sum_step: Any,
    unit: Any,
    cell: Any,
    before: Any,
    after: Any,
    out: Any,
    out_unit: Any,
    nonfinite: Any,
) -> Any:
    """Compute the new state of all units from the parts of their gates."""
    signature = types.void(*[types.int64] * 14)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        given = dict(zip(_ARGUMENTS, arguments[1:], strict=True))
        done = builder.append_basic_block("done")
        switch = builder.switch(arguments[0], done)
        for cell in Cell:
            block = builder.append_basic_block(f"cell_{cell.name.lower()}")
            switch.add_case(ir.Constant(LONG, int(cell)), block)
            builder.position_at_end(block)
            _emit_cell(builder, given, cell)
            builder.branch(done)
        builder.position_at_end(done)
        return ir.Constant(BYTE.as_pointer(), None)

    return signature, generate


def _emit_cell(builder: ir.IRBuilder, given: dict[str, ir.Value], cell: Cell) -> None:
    def place(name: str, index: ir.Value, step: str) -> ir.Value:
        return builder.add(given[name], builder.mul(index, given[step]))

    def parts(index: ir.Value, gate: int) -> tuple[ir.Value, ir.Value]:
        """Load the two parts of a gate: of the input, and of the hidden state."""
        number_ = ir.Constant(LONG, gate)
        of_input = builder.add(
            place("gates", index, "gate_unit"), builder.mul(given["gate_step"], number_)
        )
        of_state = builder.add(
            place("sums", index, "unit"), builder.mul(given["sum_step"], number_)
        )
        return load(builder, of_input, 0, VECTOR), load(builder, of_state, 0, VECTOR)

    def whole(index: ir.Value, gate: int) -> ir.Value:
        return builder.fadd(*parts(index, gate))

    def lstm(index: ir.Value) -> tuple[ir.Value, ir.Value]:
        enter, forget, new, leave = (whole(index, gate) for gate in range(4))
        noted = builder.fadd(builder.fadd(enter, forget), builder.fadd(new, leave))
        place_ = place("cell", index, "unit")
        kept = builder.fdiv(load(builder, place_, 0, VECTOR), inverse_sigmoid(builder, forget))
        above, below = tanh_ratio(builder, new)
        below = builder.fmul(below, inverse_sigmoid(builder, enter))
        state = builder.fadd(kept, builder.fdiv(above, below))
        store(builder, state, place_, 0)
        above, below = tanh_ratio(builder, state)
        below = builder.fmul(below, inverse_sigmoid(builder, leave))
        return builder.fdiv(above, below), builder.fadd(noted, state)

    def gru(index: ir.Value) -> tuple[ir.Value, ir.Value]:
        reset, update = (whole(index, gate) for gate in range(2))
        of_input, of_state = parts(index, 2)
        noted = builder.fadd(builder.fadd(reset, update), builder.fadd(of_input, of_state))
        reset = builder.fdiv(of_state, inverse_sigmoid(builder, reset))
        new = builder.fdiv(*tanh_ratio(builder, builder.fadd(of_input, reset)))
        before = load(builder, place("before", index, "unit"), 0, VECTOR)
        share = builder.fdiv(builder.fsub(before, new), inverse_sigmoid(builder, update))
        return builder.fadd(new, share), noted

    def simple(index: ir.Value) -> tuple[ir.Value, ir.Value]:
        x = whole(index, 0)
        if cell is Cell.TANH:
            return builder.fdiv(*tanh_ratio(builder, x)), x
        positive = builder.fcmp_ordered(">", x, number(0.0))
        return builder.select(positive, x, ZERO), x

    compute = {Cell.LSTM: lstm, Cell.GRU: gru, Cell.TANH: simple, Cell.RELU: simple}[cell]

    def body(index: ir.Value, carried: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        hidden, noted = compute(index)
        store(builder, hidden, place("after", index, "unit"), 0)
        store(builder, hidden, place("out", index, "out_unit"), 0)
        return (builder.fadd(carried[0], noted),)

    (summed,) = loop(builder, ir.Constant(LONG, 0), given["count"], 1, (ZERO,), body)
    noted = load(builder, given["nonfinite"], 0, VECTOR)
    store(builder, multiply_add(builder, summed, ZERO, noted), given["nonfinite"], 0)
