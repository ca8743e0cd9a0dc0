"""LLVM vector code piece by piece: loops, loads, stores and multiply-adds."""

from collections.abc import Callable

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

# Floats in a vector register; LLVM splits a vector where registers are smaller (NEON).
WIDTH = 16 if llvm.get_host_cpu_features().get("avx512f") else 8

BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR, BITS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)
ZERO = ir.Constant(VECTOR, [0.0] * WIDTH)


def loop(
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


def total(builder: ir.IRBuilder, terms: tuple[ir.Value, ...]) -> ir.Value:
    """The sum, in pairs."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        rest = terms[len(terms) // 2 * 2 :]
        terms = (*(builder.fadd(a, b) for a, b in pairs), *rest)
    return terms[0]


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a · b + c, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDTH}f32")  # type: ignore[no-untyped-call]
    return builder.call(function, [a, b, c])


def item(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """One number of an array at an address."""
    return builder.load(builder.gep(builder.inttoptr(address, kind.as_pointer()), [index]))


def load(builder: ir.IRBuilder, address: ir.Value, j: int, kind: ir.Type) -> ir.Value:
    """The vector ``j`` vectors after an address."""
    loaded = builder.load(_place(builder, address, j, kind))
    loaded.align = 4
    return loaded


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, j: int) -> None:
    """Write the vector ``j`` vectors after an address."""
    builder.store(value, _place(builder, address, j, VECTOR)).align = 4


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """A vector of one number."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(BITS, [0] * WIDTH))


def _place(builder: ir.IRBuilder, address: ir.Value, j: int, kind: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [ir.Constant(LONG, j)])
