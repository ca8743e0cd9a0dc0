"""The driver: it runs the operations of a lowered network one after the other.

Everything works on one arena of floats; `fields` says what the columns of the table mean. Compiled
code has no types to check here: mypy is told so in pyproject.toml.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit

from probmask.runtime.columns import (
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
)
from probmask.runtime.copies import pack, phases, pointer, spread, unpack
from probmask.runtime.curves import activate, combine
from probmask.runtime.fields import Kind
from probmask.runtime.layers import convolve, multiply
from probmask.runtime.pooling import pool
from probmask.runtime.vectors import WIDTH
from probmask.runtime.waiting import meet

_PACK, _UNPACK, _SPREAD = int(Kind.PACK), int(Kind.UNPACK), int(Kind.SPREAD)
_CONVOLVE, _MULTIPLY, _PHASES = int(Kind.CONVOLVE), int(Kind.MULTIPLY), int(Kind.PHASES)
_MAX_POOL, _AVERAGE_POOL = int(Kind.MAX_POOL), int(Kind.AVERAGE_POOL)
_ADD, _SCALE, _ACTIVATE, _COPY = int(Kind.ADD), int(Kind.SCALE), int(Kind.ACTIVATE), int(Kind.COPY)

# The files whose code is compiled into the driver.
_COMPILED = (
    "columns", "copies", "curves", "fields", "kernels", "layers", "pairs", "pooling", "tiles",
    "vectors", "waiting",
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
