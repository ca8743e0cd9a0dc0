"""The compiled driver: it runs the operations of a program one after the other.

All operations work on one arena of floats. `operation_table` defines the columns of the table.
Numba infers the types of compiled code, so pyproject.toml exempts this file from mypy.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from probmask.core.kernel_cache import cached_njit
from probmask.runtime.kernels.attention import attend
from probmask.runtime.kernels.elementwise import (
    activate,
    clear_padding,
    combine,
    combine_channels,
    interleave,
    leaky_channels,
    pack,
    pointer,
    split_phases,
    unpack,
)
from probmask.runtime.kernels.layer_kernels import convolve, linear, pool, pool_slices
from probmask.runtime.kernels.normalization import normalize, normalize_groups, softmax
from probmask.runtime.kernels.operation_table import (
    BIAS,
    CURVE,
    ENTRIES,
    EXTERNAL,
    HEIGHT,
    IMAGE_WIDTH,
    KIND,
    OTHER,
    ROWS,
    SCRATCH,
    SCRATCH_SIZE,
    SOURCE,
    SOURCE_PLANE,
    SPLITS,
    TARGET,
    TOGETHER,
    TOKENS,
    Curve,
    Kind,
)
from probmask.runtime.kernels.rearrangement import pack_tokens, rearrange, unpack_tokens
from probmask.runtime.kernels.recurrence import recur
from probmask.runtime.kernels.resizing import merge_phases, resize
from probmask.runtime.kernels.vectors import WIDTH

_PACK, _UNPACK, _INTERLEAVE = int(Kind.PACK), int(Kind.UNPACK), int(Kind.INTERLEAVE)
_CONVOLVE, _LINEAR, _SPLIT_PHASES = (
    int(kind) for kind in (Kind.CONVOLVE, Kind.LINEAR, Kind.SPLIT_PHASES)
)
_MAX_POOL, _AVERAGE_POOL = int(Kind.MAX_POOL), int(Kind.AVERAGE_POOL)
_MAX_SLICES, _AVERAGE_SLICES = int(Kind.MAX_SLICES), int(Kind.AVERAGE_SLICES)
_MULTIPLY, _ACTIVATE, _COPY = int(Kind.MULTIPLY), int(Kind.ACTIVATE), int(Kind.COPY)
_ADD_CONSTANT, _MULTIPLY_CONSTANT = int(Kind.ADD_CONSTANT), int(Kind.MULTIPLY_CONSTANT)
_ADD_CHANNELS, _MULTIPLY_CHANNELS = int(Kind.ADD_CHANNELS), int(Kind.MULTIPLY_CHANNELS)
_LEAKY_CHANNELS, _NORMALIZE_GROUPS = int(Kind.LEAKY_CHANNELS), int(Kind.NORMALIZE_GROUPS)
_SOFTMAX, _SIGMOID = int(Kind.SOFTMAX), int(Curve.SIGMOID)
_MERGE_PHASES, _RESIZE = int(Kind.MERGE_PHASES), int(Kind.RESIZE)
_REARRANGE, _NORMALIZE, _ATTEND = int(Kind.REARRANGE), int(Kind.NORMALIZE), int(Kind.ATTEND)
_RECUR, _PACK_TOKENS = int(Kind.RECUR), int(Kind.PACK_TOKENS)
# The files whose code is compiled into the driver.
_COMPILED = (
    "attention", "curves", "driver", "elementwise", "layer_kernels", "normalization",
    "operation_table", "rearrangement", "recurrence", "recurrent_steps", "resizing", "rows",
    "tiles", "vectors",
)  # fmt: skip
_LONG = ir.IntType(64)
# Number of times that a waiting thread reads the counter before it yields the processor.
_SPINS = 4000


@intrinsic
def _increment(typing_context: Any, address: Any) -> Any:
    """Add one to the counter at an address, atomically."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_LONG, 1), "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def _read(typing_context: Any, address: Any) -> Any:
    """Read the counter at an address, atomically."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.load_atomic(counter, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _yield_processor(typing_context: Any) -> Any:
    """Let another thread run, on systems that have `sched_yield`."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, ___: Any) -> Any:
        if sys.platform != "win32":
            kind = ir.FunctionType(ir.IntType(32), [])
            function = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
            builder.call(function, [])
        return ir.Constant(_LONG, 0)

    return types.int64(), generate


@njit(nogil=True)
def _wait_for_all(address, threads, barrier):
    """Wait until all ``threads`` have reached the barrier of this number, counted from 1."""
    _increment(address)
    rounds = 0
    while _read(address) < threads * barrier:
        rounds += 1
        if rounds > _SPINS:
            _yield_processor()


@njit(error_model="numpy")
def _execute(
    op,
    limits,
    arena,
    longs,
    offsets,
    values,
    consts,
    position_bits,
    external,
    image,
    lane,
    thread,
    threads,
    nonfinite,
):
    kind, low, high = op[KIND], limits[0], limits[1]
    count = op[ENTRIES] // op[TOGETHER] if kind == _SPLIT_PHASES else op[ROWS]
    first, last = count * thread // threads, count * (thread + 1) // threads
    if kind in (_CONVOLVE, _LINEAR):
        if threads > 1:
            first, last = longs[op[SPLITS] + thread], longs[op[SPLITS] + thread + 1]
        if kind == _CONVOLVE:
            convolve(
                op, arena, longs, offsets, values, consts, position_bits, low, high, nonfinite,
                first, last,
            )  # fmt: skip
        else:
            linear(op, arena, longs, offsets, values, consts, low, high, nonfinite, first, last)
    elif kind == _SPLIT_PHASES:
        split_phases(op, arena, longs, first, last)
    elif kind in (_MAX_POOL, _AVERAGE_POOL):
        place = op[SCRATCH] + thread * op[SCRATCH_SIZE]
        scratch = arena[place : place + op[SCRATCH_SIZE]]
        pool(op, arena, longs, consts, scratch, nonfinite, first, last, kind == _MAX_POOL)
    elif kind in (_MAX_SLICES, _AVERAGE_SLICES):
        pool_slices(op, arena, longs, consts, nonfinite, first, last, kind == _MAX_SLICES)
    elif kind == _PACK:
        size = op[ROWS] * op[HEIGHT] * op[IMAGE_WIDTH]
        source = carray(pointer(external[op[EXTERNAL]] + 4 * image * size), size)
        pack(op, arena, source, nonfinite, first, last)
    elif kind == _UNPACK and op[TOKENS]:
        unpack_tokens(op, arena, external[op[EXTERNAL]], image, first, last)
    elif kind == _UNPACK:
        unpack(op, arena, external[op[EXTERNAL]], image, first, last)
    elif kind == _PACK_TOKENS:
        pack_tokens(op, arena, external[op[EXTERNAL]], image, nonfinite, first, last)
    elif kind == _INTERLEAVE:
        interleave(op, arena, lane, first, last)
    elif kind == _REARRANGE:
        rearrange(op, arena, longs, consts, external, image, nonfinite, first, last)
    elif kind == _NORMALIZE:
        normalize(op, arena, consts, position_bits, low, nonfinite, first, last)
    elif kind in (_ADD_CHANNELS, _MULTIPLY_CHANNELS):
        product = kind == _MULTIPLY_CHANNELS
        combine_channels(op, arena, product, low, high, nonfinite, first, last)
    elif kind == _LEAKY_CHANNELS:
        leaky_channels(op, arena, consts, nonfinite, first, last)
    elif kind == _NORMALIZE_GROUPS:
        normalize_groups(op, arena, consts, low, nonfinite, first, last)
    elif kind == _SOFTMAX:
        place = op[SCRATCH] + thread * op[SCRATCH_SIZE]
        scratch = arena[place : place + op[SCRATCH_SIZE]]
        softmax(op, arena, position_bits, scratch, nonfinite, first, last)
    elif kind == _MERGE_PHASES:
        merge_phases(op, arena, first, last)
    elif kind == _RESIZE:
        place = op[SCRATCH] + thread * op[SCRATCH_SIZE]
        resize(op, arena, longs, consts, arena[place:], first, last)
    elif kind == _ATTEND:
        attend(op, arena, longs, consts, position_bits, low, high, nonfinite, first, last, thread)
    elif kind == _RECUR:
        recur(
            op, arena, longs, offsets, values, consts, position_bits, nonfinite, first, last, thread
        )
    else:
        start, size = first * op[SOURCE_PLANE], (last - first) * op[SOURCE_PLANE]
        x = arena[op[SOURCE] + start : op[SOURCE] + start + size]
        y = arena[op[TARGET] + start : op[TARGET] + start + size]
        if kind == _ACTIVATE:
            activate(x, y, op[CURVE], low, high, nonfinite)
            if op[CURVE] >= _SIGMOID:
                clear_padding(op, arena, first, last)
        elif kind == _COPY:
            for i in range(size):
                y[i] = x[i]
        elif kind in (_ADD_CONSTANT, _MULTIPLY_CONSTANT):
            z = consts[op[BIAS] + start : op[BIAS] + start + size]
            combine(x, z, y, kind == _MULTIPLY_CONSTANT, low, high, nonfinite)
        else:
            z = arena[op[OTHER] + start : op[OTHER] + start + size]
            combine(x, z, y, kind == _MULTIPLY, low, high, nonfinite)


def _stamp() -> int:
    """Return a number that changes with the source of the compiled code."""
    here = Path(__file__).parent
    text = b"".join((here / f"{name}.py").read_bytes() for name in _COMPILED)
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest())


def _make_driver(stamp: int) -> Any:
    # Numba's cache depends on this file's time and on the values that the function closes over,
    # but not on the other files. The stamp makes it depend on their content.
    @cached_njit(nogil=True, error_model="numpy")
    def run(
        table,
        limits,
        ungrouped,
        arena,
        longs,
        offsets,
        values,
        consts,
        position_bits,
        external,
        begin,
        end,
        group,
        thread,
        threads,
        barriers,
    ):
        """Run the operations for images ``begin`` to ``end``; return whether results are finite.

        The first ``ungrouped`` operations run for one image at a time, the others for a ``group``
        of images at once. Each of several ``threads`` computes a part of every operation, and
        waits for the others after it. ``barriers`` holds the counter that the threads share.
        """
        if stamp == 0:
            return False
        nonfinite = np.zeros(WIDTH, np.float32)
        passed = 0
        for image in range(begin, end, group):
            for lane in range(group + 1):  # the last pass is for the whole group
                first = 0 if lane < group else ungrouped
                last = ungrouped if lane < group else len(table)
                at = image + lane if lane < group else image
                for i in range(first, last):
                    _execute(
                        table[i],
                        limits[i],
                        arena,
                        longs,
                        offsets,
                        values,
                        consts,
                        position_bits,
                        external,
                        at,
                        lane,
                        thread,
                        threads,
                        nonfinite,
                    )
                    if threads > 1:
                        passed += 1
                        _wait_for_all(barriers.ctypes.data, threads, passed)
        total = np.float32(0.0)
        for i in range(WIDTH):
            total += nonfinite[i]
        return total == 0

    return run


run = _make_driver(_stamp() | 1)
