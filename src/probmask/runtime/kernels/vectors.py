"""Building blocks of LLVM vector code: loops, loads, stores, multiply-adds, prefetching."""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Floats in a vector register. LLVM splits the vectors where registers are smaller (NEON).
WIDTH = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR, BITS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)
HALF = ir.VectorType(FLOAT, WIDTH // 2)
ZERO = ir.Constant(VECTOR, [0.0] * WIDTH)


def loop(
    builder: ir.IRBuilder,
    start: ir.Value,
    end: ir.Value,
    step: int,
    carried: tuple[ir.Value, ...],
    body: Callable[[ir.Value, tuple[ir.Value, ...]], tuple[ir.Value, ...]],
) -> tuple[ir.Value, ...]:
    """Emit a loop and return its carried values.

    ``body`` gets the index and the carried values, and returns their new values.
    """
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    before = builder.block
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(LONG)
    index.add_incoming(start, before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    results = body(index, tuple(phis))
    index.add_incoming(builder.add(index, ir.Constant(LONG, step)), builder.block)
    for phi, result in zip(phis, results, strict=True):
        phi.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return tuple(phis)


@intrinsic
def fetch_ahead(typing_context: Any, address: Any, planes: Any, plane: Any, lines: Any) -> Any:
    """Prefetch ``lines`` cache lines of each plane into the second-level cache.

    ``plane`` is the number of bytes from one plane to the next. The addresses may be invalid.
    """

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        address, planes, plane, lines = given
        place = BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [place, INT, INT, INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        # It will be read; keep it in the second-level cache; it is data.
        hints = [ir.Constant(INT, value) for value in (0, 2, 1)]
        zero = ir.Constant(LONG, 0)

        def of_plane(index: ir.Value, _: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
            first = builder.add(address, builder.mul(index, plane))

            def of_line(index: ir.Value, _: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
                line = builder.add(first, builder.shl(index, ir.Constant(LONG, 6)))
                builder.call(function, [builder.inttoptr(line, place), *hints])
                return ()

            return loop(builder, zero, lines, 1, (), of_line)

        loop(builder, zero, planes, 1, (), of_plane)
        return ir.Constant(BYTE.as_pointer(), None)

    return types.void(*[types.int64] * 4), generate


def total(builder: ir.IRBuilder, terms: tuple[ir.Value, ...]) -> ir.Value:
    """Emit a pairwise sum."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        rest = terms[len(terms) // 2 * 2 :]
        terms = (*(builder.fadd(a, b) for a, b in pairs), *rest)
    return terms[0]


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Emit a · b + c, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    name = f"llvm.fma.v{a.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
    return builder.call(function, [a, b, c])


def lower_half(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Emit the first half of a vector."""
    places = ir.Constant(ir.VectorType(INT, WIDTH // 2), list(range(WIDTH // 2)))
    return builder.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), places)


def followed_by_zeros(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """Emit a vector whose first half is given and whose second half is zero."""
    zeros = ir.Constant(HALF, [0.0] * (WIDTH // 2))
    return builder.shuffle_vector(half, zeros, ir.Constant(BITS, list(range(WIDTH))))


def item(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Load one number of the array at an address."""
    return builder.load(builder.gep(builder.inttoptr(address, kind.as_pointer()), [index]))


def load(builder: ir.IRBuilder, address: ir.Value, j: int, kind: ir.Type) -> ir.Value:
    """Load the vector that is ``j`` vectors after an address."""
    loaded = builder.load(_place(builder, address, j, kind))
    loaded.align = 4
    return loaded


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, j: int) -> None:
    """Store a vector ``j`` vectors after an address."""
    builder.store(value, _place(builder, address, j, VECTOR)).align = 4


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Broadcast a number to a vector."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(BITS, [0] * WIDTH))


def _place(builder: ir.IRBuilder, address: ir.Value, j: int, kind: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [ir.Constant(LONG, j)])
