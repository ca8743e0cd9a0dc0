"""The innermost loops, written as LLVM vector code: one run of positions, all rows of a layer.

A tile is a run of up to `MOST` vectors of neighbouring positions of one output channel. It stays in
registers while the non-zero weights of the channel go by: each costs one load of its offset, one
broadcast of its value, and one multiply-add per vector straight from the input.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Floats in a vector register; LLVM splits a vector where registers are smaller (NEON).
WIDTH = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
# Vectors in a tile: with AVX2 there are sixteen registers, and two more are needed.
MOST = 12
# Fewer accumulators than this would wait for each other: several weights then go by at once.
_LEAST_ACCUMULATORS = 8

_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _BITS = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)
_ZERO = ir.Constant(_VECTOR, [0.0] * WIDTH)

# What a tile's function takes, in this order. Addresses are in bytes.
_ARGUMENTS = (
    ("source", _LONG),  # the input at the tile's first position, first channel
    ("offsets", _LONG),  # of each non-zero weight: where its input lies, in floats from source
    ("values", _LONG),
    ("starts", _LONG),  # of each row: where its weights begin
    ("first", _LONG),  # rows
    ("last", _LONG),
    ("target", _LONG),
    ("plane", _LONG),  # bytes between the channels of the output
    ("bias", _LONG),
    ("residual", _LONG),  # 0: there is none
    ("residual_plane", _LONG),
    ("mask", _LONG),  # all ones where a position is one, zeros in the padding
    ("low", _FLOAT),
    ("high", _FLOAT),
    ("doubt", _LONG),  # a vector that becomes NaN if any result is not finite
)


@intrinsic
def sparse_rows(
    typing_context: Any,
    vectors: Any,
    source: Any,
    offsets: Any,
    values: Any,
    starts: Any,
    first: Any,
    last: Any,
    target: Any,
    plane: Any,
    bias: Any,
    residual: Any,
    residual_plane: Any,
    mask: Any,
    low: Any,
    high: Any,
    doubt: Any,
) -> Any:
    """Compute a tile of ``vectors`` vectors for the rows from ``first`` to ``last``."""
    longs, floats = [types.int64] * 13, [types.float32] * 2
    signature = types.void(*longs, *floats, types.int64)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        done = builder.append_basic_block("done")
        switch = builder.switch(arguments[0], done)
        for count in range(1, MOST + 1):
            block = builder.append_basic_block(f"vectors{count}")
            switch.add_case(ir.Constant(_LONG, count), block)
            builder.position_at_end(block)
            builder.call(_tile_function(builder.module, count), arguments[1:])
            builder.branch(done)
        builder.position_at_end(done)
        return ir.Constant(_BYTE.as_pointer(), None)

    return signature, generate


def _tile_function(module: ir.Module, count: int) -> ir.Function:
    name = f"probmask_tile_{count}"
    if name in module.globals:
        return module.globals[name]
    kind = ir.FunctionType(ir.VoidType(), [type_ for _, type_ in _ARGUMENTS])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    for argument, (label, _) in zip(function.args, _ARGUMENTS, strict=True):
        argument.name = label
    given = dict(zip((label for label, _ in _ARGUMENTS), function.args, strict=True))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _loop(
        builder,
        given["first"],
        given["last"],
        1,
        (),
        lambda row, _: _row(builder, row, given, count),
    )
    builder.ret_void()
    return function


def _loop(
    builder: ir.IRBuilder,
    start: ir.Value,
    end: ir.Value,
    step: int,
    carried: tuple[ir.Value, ...],
    body: Callable[[ir.Value, tuple[ir.Value, ...]], tuple[ir.Value, ...]],
) -> tuple[ir.Value, ...]:
    """Emit a loop; what ``body`` returns is carried to its next round, and in the end returned."""
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    before = builder.block
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_LONG)
    index.add_incoming(start, before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    results = body(index, tuple(phis))
    index.add_incoming(builder.add(index, ir.Constant(_LONG, step)), builder.block)
    for phi, result in zip(phis, results, strict=True):
        phi.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return tuple(phis)


def _row(
    builder: ir.IRBuilder, row: ir.Value, given: dict[str, ir.Value], count: int
) -> tuple[ir.Value, ...]:
    """One output channel of a tile: its weights go by, then what follows the layer is applied."""
    start = _item(builder, given["starts"], row, _LONG)
    end = _item(builder, given["starts"], builder.add(row, ir.Constant(_LONG, 1)), _LONG)
    bias = _splat(builder, _item(builder, given["bias"], row, _FLOAT))

    def multiply_add(at_once: int) -> Any:
        def body(index: ir.Value, sums: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
            new = []
            for k in range(at_once):
                which = builder.add(index, ir.Constant(_LONG, k))
                offset = builder.sext(_item(builder, given["offsets"], which, _INT), _LONG)
                value = _splat(builder, _item(builder, given["values"], which, _FLOAT))
                inputs = builder.add(given["source"], builder.shl(offset, ir.Constant(_LONG, 2)))
                for j in range(count):
                    loaded = _load(builder, inputs, j, _VECTOR)
                    new.append(_fma(builder, value, loaded, sums[k * count + j]))
            return tuple(new)

        return body

    sums: tuple[ir.Value, ...] = (bias,) * count
    at_once = max(1, _LEAST_ACCUMULATORS // count)
    if at_once > 1:
        whole = builder.sub(end, start)
        rest = builder.srem(whole, ir.Constant(_LONG, at_once))
        middle = builder.sub(end, rest)
        partial = sums + (_ZERO,) * (count * (at_once - 1))
        partial = _loop(builder, start, middle, at_once, partial, multiply_add(at_once))
        groups = [partial[k * count : (k + 1) * count] for k in range(at_once)]
        sums = tuple(_total(builder, terms) for terms in zip(*groups, strict=True))
        start = middle
    sums = _loop(builder, start, end, 1, sums, multiply_add(1))
    sums = _with_residual(builder, sums, row, given)
    _note_doubt(builder, sums, given["doubt"])
    low, high = _splat(builder, given["low"]), _splat(builder, given["high"])
    target = builder.add(given["target"], builder.mul(row, given["plane"]))
    for j, value in enumerate(sums):
        value = builder.select(builder.fcmp_ordered(">", value, low), value, low)
        value = builder.select(builder.fcmp_ordered("<", value, high), value, high)
        bits = builder.and_(builder.bitcast(value, _BITS), _load(builder, given["mask"], j, _BITS))
        _store(builder, builder.bitcast(bits, _VECTOR), target, j)
    return ()


def _with_residual(
    builder: ir.IRBuilder, sums: tuple[ir.Value, ...], row: ir.Value, given: dict[str, ir.Value]
) -> tuple[ir.Value, ...]:
    some, after = builder.append_basic_block("residual"), builder.append_basic_block("summed")
    before = builder.block
    builder.cbranch(
        builder.icmp_signed("!=", given["residual"], ir.Constant(_LONG, 0)), some, after
    )
    builder.position_at_end(some)
    address = builder.add(given["residual"], builder.mul(row, given["residual_plane"]))
    added = [builder.fadd(v, _load(builder, address, j, _VECTOR)) for j, v in enumerate(sums)]
    builder.branch(after)
    builder.position_at_end(after)
    results = []
    for without, with_it in zip(sums, added, strict=True):
        phi = builder.phi(_VECTOR)
        phi.add_incoming(without, before)
        phi.add_incoming(with_it, some)
        results.append(phi)
    return tuple(results)


def _note_doubt(builder: ir.IRBuilder, sums: tuple[ir.Value, ...], doubt: ir.Value) -> None:
    """Add 0 · (sum of all results): NaN if one of them, or their sum, is not finite."""
    noted = _fma(builder, _total(builder, sums), _ZERO, _load(builder, doubt, 0, _VECTOR))
    _store(builder, noted, doubt, 0)


def _total(builder: ir.IRBuilder, terms: tuple[ir.Value, ...]) -> ir.Value:
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        rest = terms[len(terms) // 2 * 2 :]
        terms = (*(builder.fadd(a, b) for a, b in pairs), *rest)
    return terms[0]


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDTH}f32")  # type: ignore[no-untyped-call]
    return builder.call(function, [a, b, c])


def _item(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.gep(builder.inttoptr(address, kind.as_pointer()), [index]))


def _place(builder: ir.IRBuilder, address: ir.Value, j: int, kind: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [ir.Constant(_LONG, j)])


def _load(builder: ir.IRBuilder, address: ir.Value, j: int, kind: ir.Type) -> ir.Value:
    loaded = builder.load(_place(builder, address, j, kind))
    loaded.align = 4
    return loaded


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, j: int) -> None:
    builder.store(value, _place(builder, address, j, _VECTOR)).align = 4


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_BITS, [0] * WIDTH))
