"""Copies between tensors of any strides: transposition, slices, expansion, concatenation."""

import numpy as np
from numba import carray, njit

from probmask.runtime.kernels.elementwise import FAST_SUMS, pointer
from probmask.runtime.kernels.operation_table import (
    EXTERNAL,
    IMAGE_SIZE,
    SOURCE,
    SOURCE_IS,
    TABLE,
    TARGET,
    TARGET_IS,
    UNCHECKED,
    Place,
)

_CONSTANT, _EXTERNAL = int(Place.CONSTANT), int(Place.EXTERNAL)
# Elements of the third loop that are copied before the fourth advances: one cache line of each of
# two tensors that are transposed.
_BLOCK = 16


@njit(error_model="numpy")
def rearrange(op, arena, longs, consts, external, image, nonfinite, first, last):
    """Copy the elements of four nested loops; ``first`` to ``last`` are those of the outermost.

    The table holds the size of each loop, then its steps in the source, then its steps in the
    target. External tensors have one part of ``IMAGE_SIZE`` floats per image.
    """
    size, loops, total = op[IMAGE_SIZE], longs[op[TABLE] :], np.float32(0.0)
    if op[SOURCE_IS] == _EXTERNAL:
        part = carray(pointer(external[op[EXTERNAL]] + 4 * image * size), size)
        total = _copy(part, arena, loops, op[SOURCE], op[TARGET], first, last)
    elif op[TARGET_IS] == _EXTERNAL:
        part = carray(pointer(external[op[EXTERNAL]] + 4 * image * size), size)
        total = _copy(arena, part, loops, op[SOURCE], op[TARGET], first, last)
    elif op[SOURCE_IS] == _CONSTANT:
        total = _copy(consts, arena, loops, op[SOURCE], op[TARGET], first, last)
    else:
        total = _copy(arena, arena, loops, op[SOURCE], op[TARGET], first, last)
    if not op[UNCHECKED]:
        nonfinite[0] += total * np.float32(0.0)


@njit(error_model="numpy", fastmath=FAST_SUMS)
def _copy(source, target, loops, source_base, target_base, first, last):
    """Copy elements and return their sum."""
    columns, rows = loops[2], loops[3]
    step, row_step = loops[6], loops[7]
    target_step, target_row_step = loops[10], loops[11]
    total = np.float32(0.0)
    for a in range(first, last):
        for b in range(loops[1]):
            start = source_base + a * loops[4] + b * loops[5]
            place = target_base + a * loops[8] + b * loops[9]
            for block in range(0, columns, _BLOCK):
                count = min(_BLOCK, columns - block)
                for row in range(rows):
                    at = start + block * step + row * row_step
                    to = place + block * target_step + row * target_row_step
                    for i in range(count):
                        value = source[at + i * step]
                        total += value
                        target[to + i * target_step] = value
    return total
