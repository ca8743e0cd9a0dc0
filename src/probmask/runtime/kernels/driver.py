"""What threads inside compiled code need to wait for each other."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from probmask.runtime.kernels.elementwise import (
    activate,
    combine,
    pack,
    phases,
    pointer,
    spread,
    unpack,
)
from probmask.runtime.kernels.layer_kernels import convolve, multiply, pool
from probmask.runtime.kernels.operation_table import (
    CURVE,
    ENTRIES,
    HEIGHT,
    IMAGE_WIDTH,
    KIND,
    OTHER,
    OUTSIDE,
    ROWS,
    SCRATCH,
    SCRATCH_SIZE,
    SOURCE,
    SOURCE_PLANE,
    SPLITS,
    TARGET,
    Kind,
)
from probmask.runtime.kernels.vectors import WIDTH

_LONG = ir.IntType(64)


# Rounds of looking before the processor is offered to others.
_PATIENCE = 4000


@intrinsic
def _arrive(typing_context: Any, address: Any) -> Any:
    """Add one to the counter at the address."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_LONG, 1), "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def _look(typing_context: Any, address: Any) -> Any:
    """Read the counter at the address."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.load_atomic(counter, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _offer_processor(typing_context: Any) -> Any:
    """Let another thread run, where the system knows how."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, ___: Any) -> Any:
        if sys.platform != "win32":
            kind = ir.FunctionType(ir.IntType(32), [])
            function = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
            builder.call(function, [])
        return ir.Constant(_LONG, 0)

    return types.int64(), generate


@njit(nogil=True)
def meet(address, threads, meeting):  # type: ignore[no-untyped-def]
    """Wait until all ``threads`` have come to the ``meeting``, counted from 1."""
    _arrive(address)
    rounds = 0
    while _look(address) < threads * meeting:
        rounds += 1
        if rounds > _PATIENCE:
            _offer_processor()


_PACK, _UNPACK, _SPREAD = int(Kind.PACK), int(Kind.UNPACK), int(Kind.SPREAD)


_CONVOLVE, _MULTIPLY, _PHASES = int(Kind.CONVOLVE), int(Kind.MULTIPLY), int(Kind.PHASES)


_MAX_POOL, _AVERAGE_POOL = int(Kind.MAX_POOL), int(Kind.AVERAGE_POOL)


_ADD, _SCALE, _ACTIVATE, _COPY = int(Kind.ADD), int(Kind.SCALE), int(Kind.ACTIVATE), int(Kind.COPY)


# The files whose code is compiled into the driver.
_COMPILED = (
    "driver", "elementwise", "layer_kernels", "operation_table", "tiles", "vectors",
)  # fmt: skip


@njit(error_model="numpy")
def _execute(
    op,
    limits,
    arena,
    longs,
    offsets,
    values,
    consts,
    masks,
    outside,
    image,
    lane,
    thread,
    threads,
    doubt,
):
    kind, low, high = op[KIND], limits[0], limits[1]
    count = op[ENTRIES] if kind == _PHASES else op[ROWS]
    first, last = count * thread // threads, count * (thread + 1) // threads
    if kind in (_CONVOLVE, _MULTIPLY):
        if threads > 1:
            first, last = longs[op[SPLITS] + thread], longs[op[SPLITS] + thread + 1]
        if kind == _CONVOLVE:
            convolve(
                op, arena, longs, offsets, values, consts, masks, low, high, doubt, first, last
            )
        else:
            multiply(op, arena, longs, offsets, values, consts, low, high, doubt, first, last)
    elif kind == _PHASES:
        phases(op, arena, longs, first, last)
    elif kind in (_MAX_POOL, _AVERAGE_POOL):
        place = op[SCRATCH] + thread * op[SCRATCH_SIZE]
        scratch = arena[place : place + op[SCRATCH_SIZE]]
        pool(op, arena, longs, consts, scratch, doubt, first, last, kind == _MAX_POOL)
    elif kind == _PACK:
        size = op[ROWS] * op[HEIGHT] * op[IMAGE_WIDTH]
        there = carray(pointer(outside[op[OUTSIDE]] + 4 * image * size), size)
        pack(op, arena, there, doubt, first, last)
    elif kind == _UNPACK:
        unpack(op, arena, outside[op[OUTSIDE]], image, first, last)
    elif kind == _SPREAD:
        spread(op, arena, lane, first, last)
    else:
        start, size = first * op[SOURCE_PLANE], (last - first) * op[SOURCE_PLANE]
        x = arena[op[SOURCE] + start : op[SOURCE] + start + size]
        y = arena[op[TARGET] + start : op[TARGET] + start + size]
        if kind == _ACTIVATE:
            activate(x, y, op[CURVE], low, high, doubt)
        elif kind == _COPY:
            for i in range(size):
                y[i] = x[i]
        else:
            z = arena[op[OTHER] + start : op[OTHER] + start + size]
            combine(x, z, y, kind == _SCALE, low, high, doubt)


def _stamp() -> int:
    """A number that changes with the source of the compiled code, which is cached with it."""
    here = Path(__file__).parent
    text = b"".join((here / f"{name}.py").read_bytes() for name in _COMPILED)
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest())


def _make_driver(stamp: int) -> Any:
    # Numba caches by this file's time and by what the function closes over; hence the stamp.
    @njit(nogil=True, error_model="numpy", cache=True)
    def run(
        table,
        limits,
        lone,
        arena,
        longs,
        offsets,
        values,
        consts,
        masks,
        outside,
        begin,
        end,
        group,
        thread,
        threads,
        meetings,
    ):
        """Run the operations for the images from ``begin`` to ``end``; False: do not trust it.

        The first ``lone`` operations run for each image by itself, the others for a ``group`` of
        images at once. With several ``threads`` each computes its share of every operation, and
        all meet after each.
        """
        if stamp == 0:
            return False
        doubt = np.zeros(WIDTH, np.float32)
        met = 0
        for image in range(begin, end, group):
            for lane in range(group + 1):  # the last round is that of all together
                first = 0 if lane < group else lone
                last = lone if lane < group else len(table)
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
                        masks,
                        outside,
                        at,
                        lane,
                        thread,
                        threads,
                        doubt,
                    )
                    if threads > 1:
                        met += 1
                        meet(meetings.ctypes.data, threads, met)
        total = np.float32(0.0)
        for i in range(WIDTH):
            total += doubt[i]
        return total == 0

    return run


run = _make_driver(_stamp() | 1)
