"""The innermost loops as LLVM vector code: one tile of positions, all rows of a layer.

A tile is a few lines of a few vectors each, of one output channel. It is either a run of
neighboring positions (one line) or several image rows without the padding between them. The tile
stays in registers while the kernel iterates over the non-zero weights of the channel. Each weight
costs one load of its offset, one broadcast of its value, and one multiply-add per vector that reads
the input from memory.
"""

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
    ZERO,
    item,
    load,
    loop,
    multiply_add,
    splat,
    store,
    total,
)

# Largest number of vectors in a tile: AVX2 has sixteen registers, and the loop needs two more.
MAX_VECTORS = 12
# The tile shapes that have code: lines, and vectors per line.
SHAPES = tuple(
    (lines, vectors)
    for lines in (1, 2, 3, 4, 6, 8)
    for vectors in range(1, MAX_VECTORS + 1)
    if lines * vectors <= MAX_VECTORS
)
# With fewer accumulators, multiply-adds would wait for each other: small tiles process several
# weights at once.
_MIN_ACCUMULATORS = 8
# Arguments of a tile's function, in order. Addresses are in bytes.
_ARGUMENTS = (
    ("source", LONG),  # address of the input at the tile's first position, first channel
    ("offsets", LONG),  # per non-zero weight: offset of its input from source, in floats
    ("values", LONG),
    ("starts", LONG),  # per row: index of its first weight
    ("order", LONG),  # per row: its output channel
    ("first", LONG),  # first row
    ("last", LONG),  # one past the last row
    ("target", LONG),
    ("plane", LONG),  # bytes from one output channel to the next
    ("bias", LONG),
    ("residual", LONG),  # 0 if there is none
    ("residual_plane", LONG),
    ("position_bits", LONG),  # all ones at positions of the image, zeros in the padding
    ("line", LONG),  # bytes from one line of the tile to the next
    ("stage", LONG),  # which part of the rows' weights: FIRST_PART, MIDDLE_PART or LAST_PART
    ("low", FLOAT),
    ("high", FLOAT),
    ("nonfinite", LONG),  # address of a vector that becomes NaN if a result is not finite
)
# The weights of a row may come in several parts. Each part adds to the sums in the target.
FIRST_PART, MIDDLE_PART, LAST_PART = 0, 1, 2


def shape_number(lines: int, vectors: int) -> int:
    """Encode the shape of a tile as the integer that `sparse_rows` takes."""
    return lines * (MAX_VECTORS + 1) + vectors


@intrinsic
def sparse_rows(
    typing_context: Any,
    shape: Any,
    source: Any,
    offsets: Any,
    values: Any,
    starts: Any,
    order: Any,
    first: Any,
    last: Any,
    target: Any,
    plane: Any,
    bias: Any,
    residual: Any,
    residual_plane: Any,
    position_bits: Any,
    line: Any,
    stage: Any,
    low: Any,
    high: Any,
    nonfinite: Any,
) -> Any:
    """Compute one tile for the rows from ``first`` to ``last``."""
    longs, floats = [types.int64] * 16, [types.float32] * 2
    signature = types.void(*longs, *floats, types.int64)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        done = builder.append_basic_block("done")
        switch = builder.switch(arguments[0], done)
        for lines, vectors in SHAPES:
            block = builder.append_basic_block(f"tile{lines}x{vectors}")
            switch.add_case(ir.Constant(LONG, shape_number(lines, vectors)), block)
            builder.position_at_end(block)
            builder.call(_tile_function(builder.module, lines, vectors), arguments[1:])
            builder.branch(done)
        builder.position_at_end(done)
        return ir.Constant(BYTE.as_pointer(), None)

    return signature, generate


def _tile_function(module: ir.Module, lines: int, vectors: int) -> ir.Function:
    name = f"probmask_tile_{lines}x{vectors}"
    if name in module.globals:
        return module.globals[name]
    kind = ir.FunctionType(ir.VoidType(), [type_ for _, type_ in _ARGUMENTS])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    for argument, (label, _) in zip(function.args, _ARGUMENTS, strict=True):
        argument.name = label
    given = dict(zip((label for label, _ in _ARGUMENTS), function.args, strict=True))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    tile = _Tile(builder, given, lines, vectors)
    loop(builder, given["first"], given["last"], 1, (), lambda row, _: tile.row(row))
    builder.ret_void()
    return function


class _Tile:
    """Emits the code for one tile shape."""

    def __init__(
        self, builder: ir.IRBuilder, given: dict[str, ir.Value], lines: int, vectors: int
    ) -> None:
        self.builder, self.given = builder, given
        self.lines, self.vectors = lines, vectors
        self.count = lines * vectors

    def row(self, row: ir.Value) -> tuple[ir.Value, ...]:
        """Emit one row, an output channel: sum the products, add the residual, clamp, store."""
        builder, given = self.builder, self.given
        begin, after = (builder.append_basic_block(name) for name in ("begin", "after_row"))
        start = item(builder, given["starts"], row, LONG)
        end = item(builder, given["starts"], builder.add(row, ir.Constant(LONG, 1)), LONG)
        # A row without weights in a middle part does not change its sums.
        idle = builder.and_(
            builder.icmp_signed("==", start, end),
            builder.icmp_signed("==", given["stage"], ir.Constant(LONG, MIDDLE_PART)),
        )
        builder.cbranch(idle, after, begin)
        builder.position_at_end(begin)
        channel = item(builder, given["order"], row, LONG)
        sums = self._with_residual(self._sums(row, start, end), channel)
        target = builder.add(given["target"], builder.mul(channel, given["plane"]))
        whole, part = (builder.append_basic_block(name) for name in ("whole", "part"))
        finished = builder.icmp_signed("==", given["stage"], ir.Constant(LONG, LAST_PART))
        builder.cbranch(finished, whole, part)
        builder.position_at_end(part)
        for value, (address, j) in zip(sums, self._places(target), strict=True):
            store(builder, value, address, j)
        builder.branch(after)
        builder.position_at_end(whole)
        self._finish(sums, target)
        builder.branch(after)
        builder.position_at_end(after)
        return ()

    def _places(self, address: ir.Value) -> list[tuple[ir.Value, int]]:
        """Return, for each vector, the address of its line and its index in the line."""
        lines = [address]
        while len(lines) < self.lines:
            lines.append(self.builder.add(lines[-1], self.given["line"]))
        return [(line, j) for line in lines for j in range(self.vectors)]

    def _sums(self, row: ir.Value, start: ir.Value, end: ir.Value) -> tuple[ir.Value, ...]:
        builder, count = self.builder, self.count
        bias = splat(builder, item(builder, self.given["bias"], row, FLOAT))
        sums: tuple[ir.Value, ...] = (bias,) * count
        at_once = max(1, _MIN_ACCUMULATORS // count)
        if at_once > 1:
            rest = builder.srem(builder.sub(end, start), ir.Constant(LONG, at_once))
            middle = builder.sub(end, rest)
            partial = sums + (ZERO,) * (count * (at_once - 1))
            partial = loop(
                builder, start, middle, at_once, partial, lambda i, s: self._weights(i, s, at_once)
            )
            groups = [partial[k * count : (k + 1) * count] for k in range(at_once)]
            sums = tuple(total(builder, terms) for terms in zip(*groups, strict=True))
            start = middle
        return loop(builder, start, end, 1, sums, lambda i, s: self._weights(i, s, 1))

    def _weights(
        self, index: ir.Value, sums: tuple[ir.Value, ...], at_once: int
    ) -> tuple[ir.Value, ...]:
        """Multiply ``at_once`` weights with their inputs; each has its own accumulators."""
        builder, given = self.builder, self.given
        new = []
        for k in range(at_once):
            which = builder.add(index, ir.Constant(LONG, k))
            offset = builder.sext(item(builder, given["offsets"], which, INT), LONG)
            value = splat(builder, item(builder, given["values"], which, FLOAT))
            inputs = builder.add(given["source"], builder.shl(offset, ir.Constant(LONG, 2)))
            own = sums[k * self.count : (k + 1) * self.count]
            for summed, (address, j) in zip(own, self._places(inputs), strict=True):
                loaded = load(builder, address, j, VECTOR)
                new.append(multiply_add(builder, value, loaded, summed))
        return tuple(new)

    def _with_residual(self, sums: tuple[ir.Value, ...], channel: ir.Value) -> tuple[ir.Value, ...]:
        builder, given = self.builder, self.given
        some, after = builder.append_basic_block("residual"), builder.append_basic_block("summed")
        before = builder.block
        builder.cbranch(
            builder.icmp_signed("!=", given["residual"], ir.Constant(LONG, 0)), some, after
        )
        builder.position_at_end(some)
        address = builder.add(given["residual"], builder.mul(channel, given["residual_plane"]))
        added = [
            builder.fadd(value, load(builder, line, j, VECTOR))
            for value, (line, j) in zip(sums, self._places(address), strict=True)
        ]
        builder.branch(after)
        builder.position_at_end(after)
        results = []
        for without, with_it in zip(sums, added, strict=True):
            phi = builder.phi(VECTOR)
            phi.add_incoming(without, before)
            phi.add_incoming(with_it, some)
            results.append(phi)
        return tuple(results)

    def _finish(self, sums: tuple[ir.Value, ...], target: ir.Value) -> None:
        """Clamp and store the results; the padding stays zero."""
        builder, given = self.builder, self.given
        # 0 · (sum of the results) is NaN if a result, or the sum, is not finite.
        noted = multiply_add(
            builder, total(builder, sums), ZERO, load(builder, given["nonfinite"], 0, VECTOR)
        )
        store(builder, noted, given["nonfinite"], 0)
        low, high = splat(builder, given["low"]), splat(builder, given["high"])
        bits_at = self._places(given["position_bits"])
        for value, (bits_line, j), (line, _) in zip(
            sums, bits_at, self._places(target), strict=True
        ):
            value = builder.select(builder.fcmp_ordered(">", value, low), value, low)
            value = builder.select(builder.fcmp_ordered("<", value, high), value, high)
            if self.lines == 1:
                bits = builder.and_(builder.bitcast(value, BITS), load(builder, bits_line, j, BITS))
                value = builder.bitcast(bits, VECTOR)
            store(builder, value, line, j)
