"""The operations of a lowered network, and the driver that runs them one after the other.

Everything works on one arena of floats; `fields` says what the columns of the table mean. Compiled
code has no types to check here: mypy is told so in pyproject.toml.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from probmask.runtime.fields import Curve, Field, Kind
from probmask.runtime.tiles import FIRST_PART, LAST_PART, MIDDLE_PART, MOST, sparse_rows
from probmask.runtime.vectors import WIDTH
from probmask.runtime.waiting import meet

# Sums may be reordered and contracted; that NaN or infinity do not occur may not be assumed.
_LOOSE = {"contract", "reassoc", "nsz"}

_PACK, _UNPACK, _SPREAD = int(Kind.PACK), int(Kind.UNPACK), int(Kind.SPREAD)
_CONVOLVE, _MULTIPLY, _PHASES = int(Kind.CONVOLVE), int(Kind.MULTIPLY), int(Kind.PHASES)
_MAX_POOL, _AVERAGE_POOL = int(Kind.MAX_POOL), int(Kind.AVERAGE_POOL)
_ADD, _SCALE, _ACTIVATE, _COPY = int(Kind.ADD), int(Kind.SCALE), int(Kind.ACTIVATE), int(Kind.COPY)
_SILU, _GELU, _GELU_TANH = int(Curve.SILU), int(Curve.GELU), int(Curve.GELU_TANH)
_HARDSWISH = int(Curve.HARDSWISH)

_F = {field.name: int(field) for field in Field}
KIND, SOURCE, OTHER, TARGET, ROWS = (_F[n] for n in ("KIND", "SOURCE", "OTHER", "TARGET", "ROWS"))
SOURCE_PLANE, TARGET_PLANE = _F["SOURCE_PLANE"], _F["TARGET_PLANE"]
OTHER_PLANE = _F["OTHER_PLANE"]
SOURCE_LEAD, TARGET_LEAD = _F["SOURCE_LEAD"], _F["TARGET_LEAD"]
SOURCE_STRIDE, TARGET_STRIDE = _F["SOURCE_STRIDE"], _F["TARGET_STRIDE"]
HEIGHT, WIDTH_, LANES, OUTSIDE = _F["HEIGHT"], _F["WIDTH"], _F["LANES"], _F["OUTSIDE"]
STARTS, WEIGHTS, BIAS, MASK = _F["STARTS"], _F["WEIGHTS"], _F["BIAS"], _F["MASK"]
VECTORS, TILES, SPLITS = _F["VECTORS"], _F["TILES"], _F["SPLITS"]
TABLE, ENTRIES, CURVE = _F["TABLE"], _F["ENTRIES"], _F["CURVE"]
STEP_Y, STEP_X = _F["STEP_Y"], _F["STEP_X"]
SCRATCH, SCRATCH_SIZE = _F["SCRATCH"], _F["SCRATCH_SIZE"]
TARGET_LANES, SOURCE_WIDTH = _F["TARGET_LANES"], _F["SOURCE_WIDTH"]
WINDOW, BEFORE = _F["WINDOW"], _F["BEFORE"]
LINES, BLOCKS = _F["LINES"], _F["BLOCKS"]


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to floats."""
    kind = types.CPointer(types.float32)

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64), generate


@intrinsic
def _two_to_the(typing_context: Any, exponent: Any) -> Any:
    """2 to a power between -126 and 127, by its bits."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        int32 = ir.IntType(32)
        biased = builder.add(arguments[0], ir.Constant(int32, 127))
        bits = builder.shl(biased, ir.Constant(int32, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always", error_model="numpy")
def _exp(x):
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1.0)) * _two_to_the(np.int32(n))


@njit(inline="always", error_model="numpy")
def _sigmoid(x):
    return np.float32(1.0) / (np.float32(1.0) + _exp(-x))


@njit(inline="always", error_model="numpy")
def _erf(x):
    """Abramowitz and Stegun 7.1.26: wrong by at most 1.5e-7."""
    a = abs(x)
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3275911) * a)
    p = np.float32(1.061405429)
    p = p * t - np.float32(1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t - np.float32(0.284496736)
    p = p * t + np.float32(0.254829592)
    y = np.float32(1.0) - p * t * _exp(-a * a)
    return y if x >= 0 else -y


@njit(error_model="numpy", fastmath=_LOOSE)
def _activate(x, y, curve, low, high, doubt):
    """y = curve(x), or x between low and high; each of them has 0 where x has."""
    n = len(x)
    total = np.float32(0.0)
    for i in range(n):
        total += x[i]
    doubt[0] += total * np.float32(0.0)
    if curve == _SILU:
        for i in range(n):
            y[i] = x[i] * _sigmoid(x[i])
    elif curve == _GELU:
        for i in range(n):
            v = x[i]
            y[i] = np.float32(0.5) * v * (np.float32(1.0) + _erf(v * np.float32(0.70710678)))
    elif curve == _GELU_TANH:
        for i in range(n):
            v = x[i]
            inner = np.float32(1.5957691216) * (v + np.float32(0.044715) * v * v * v)
            y[i] = v * _sigmoid(inner)
    elif curve == _HARDSWISH:
        for i in range(n):
            gate = min(max(x[i] + np.float32(3.0), np.float32(0.0)), np.float32(6.0))
            y[i] = x[i] * gate / np.float32(6.0)
    else:
        for i in range(n):
            y[i] = min(max(x[i], low), high)


@njit(error_model="numpy", fastmath=_LOOSE)
def _combine(x, z, y, scale, low, high, doubt):
    """y = x + z or x · z, between low and high."""
    total = np.float32(0.0)
    if scale:
        for i in range(len(x)):
            v = x[i] * z[i]
            total += v
            y[i] = min(max(v, low), high)
    else:
        for i in range(len(x)):
            v = x[i] + z[i]
            total += v
            y[i] = min(max(v, low), high)
    doubt[0] += total * np.float32(0.0)


@njit(error_model="numpy", fastmath=_LOOSE)
def _pack(op, arena, image, doubt, first, last):
    height, width = op[HEIGHT], op[WIDTH_]
    total = np.float32(0.0)
    for c in range(first, last):
        start = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
        for y in range(height):
            source = image[(c * height + y) * width : (c * height + y + 1) * width]
            target = arena[start + y * op[TARGET_STRIDE] : start + y * op[TARGET_STRIDE] + width]
            for x in range(width):
                total += source[x]
                target[x] = source[x]
    doubt[0] += total * np.float32(0.0)


@njit(error_model="numpy")
def _unpack(op, arena, outside, image, first, last):
    height, width, lanes = op[HEIGHT], op[WIDTH_], op[LANES]
    size = op[ROWS] * height * width
    whole = carray(_pointer(outside), (image + lanes) * size)
    for c in range(first, last):
        start = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        for y in range(height):
            source = start + y * op[SOURCE_STRIDE] * lanes
            target = image * size + (c * height + y) * width
            if lanes == 1:
                for x in range(width):
                    whole[target + x] = arena[source + x]
            else:
                for x in range(width):
                    for lane in range(lanes):
                        whole[target + lane * size + x] = arena[source + x * lanes + lane]


@njit(error_model="numpy")
def _spread(op, arena, lane, first, last):
    lanes = op[TARGET_LANES]
    for c in range(first, last):
        source = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD] + lane
        for y in range(op[HEIGHT]):
            for x in range(op[WIDTH_]):
                place = target + (y * op[TARGET_STRIDE] + x) * lanes
                arena[place] = arena[source + y * op[SOURCE_STRIDE] + x]


@njit(error_model="numpy")
def _phases(op, arena, longs, first, last):
    """Each entry of the table: a source plane's first position, a target's, rows and columns."""
    lanes, step_y, step_x = op[LANES], op[STEP_Y], op[STEP_X]
    for entry in range(first, last):
        place = op[TABLE] + 4 * entry
        rows, columns = longs[place + 2], longs[place + 3]
        for y in range(rows):
            source = op[SOURCE] + longs[place] + y * step_y * op[SOURCE_STRIDE] * lanes
            target = op[TARGET] + longs[place + 1] + y * op[TARGET_STRIDE] * lanes
            if lanes == 1:
                row, result = arena[source:], arena[target : target + columns]
                if step_x == 1:
                    for x in range(columns):
                        result[x] = row[x]
                elif step_x == 2:
                    for x in range(columns):
                        result[x] = row[2 * x]
                else:
                    for x in range(columns):
                        result[x] = row[x * step_x]
            else:
                for x in range(columns):
                    for lane in range(lanes):
                        value = arena[source + x * step_x * lanes + lane]
                        arena[target + x * lanes + lane] = value


@njit(error_model="numpy", fastmath=_LOOSE)
def _pool(op, arena, longs, consts, scratch, first, last, largest):
    """Windows are rows and columns: first over rows into the scratch row, then over columns.

    The table has first and last row of each output row, first and last column of each output
    column; the divisors of averages are constants, one per position.
    """
    lanes, height, width = op[LANES], op[HEIGHT], op[WIDTH_]
    columns = op[SOURCE_WIDTH] * lanes
    step = op[SOURCE_STRIDE] * lanes
    table = op[TABLE]
    windows = longs[table + 2 * height : table + 2 * height + 2 * width]
    outer = np.float32(-np.inf) if largest else np.float32(0.0)
    for i in range(len(scratch)):
        scratch[i] = outer
    middle = scratch[op[BEFORE] : op[BEFORE] + columns]
    squares = largest and op[WINDOW] == 2 and op[STEP_X] == 2 and op[BEFORE] == 0
    squares = squares and 2 * width <= columns
    for c in range(first, last):
        source = op[SOURCE] + c * op[SOURCE_PLANE] + op[SOURCE_LEAD]
        target = op[TARGET] + c * op[TARGET_PLANE] + op[TARGET_LEAD]
        for y in range(height):
            top, bottom = longs[table + 2 * y], longs[table + 2 * y + 1]
            out = target + y * op[TARGET_STRIDE] * lanes
            result = arena[out : out + width * lanes]
            row = arena[source + top * step : source + top * step + columns]
            if squares and bottom - top == 2:
                _largest_of_four(row, arena[source + (top + 1) * step :], result)
                continue
            for i in range(columns):
                middle[i] = row[i]
            for k in range(top + 1, bottom):
                row = arena[source + k * step : source + k * step + columns]
                if largest:
                    for i in range(columns):
                        middle[i] = row[i] if row[i] > middle[i] else middle[i]
                else:
                    for i in range(columns):
                        middle[i] += row[i]
            if op[WINDOW] > 0:
                _pool_regular(scratch, result, op[WINDOW], op[STEP_X], largest)
            else:
                _pool_lanes(middle, windows, result, lanes, largest)
            if not largest:
                divisors = consts[op[BIAS] + y * width : op[BIAS] + (y + 1) * width]
                for x in range(width):
                    for lane in range(lanes):
                        result[x * lanes + lane] *= divisors[x]


@njit(error_model="numpy")
def _largest_of_four(upper, lower, result):
    """The commonest pooling: squares of two by two, side by side."""
    for x in range(len(result)):
        a = upper[2 * x] if upper[2 * x] > upper[2 * x + 1] else upper[2 * x + 1]
        b = lower[2 * x] if lower[2 * x] > lower[2 * x + 1] else lower[2 * x + 1]
        result[x] = a if a > b else b


@njit(error_model="numpy", fastmath=_LOOSE)
def _pool_regular(scratch, result, window, step, largest):
    """Windows of one size at one distance, in a row with its padding."""
    for x in range(len(result)):
        result[x] = scratch[x * step]
    for k in range(1, window):
        shifted = scratch[k:]
        if largest and step == 2:  # the constant lets LLVM vectorize
            for x in range(len(result)):
                result[x] = shifted[2 * x] if shifted[2 * x] > result[x] else result[x]
        elif largest:
            for x in range(len(result)):
                result[x] = shifted[x * step] if shifted[x * step] > result[x] else result[x]
        else:
            for x in range(len(result)):
                result[x] += shifted[x * step]


@njit(error_model="numpy", fastmath=_LOOSE)
def _pool_lanes(scratch, windows, result, lanes, largest):
    """The columns of a row's windows, for all lanes at once."""
    for x in range(len(windows) // 2):
        here = result[x * lanes : (x + 1) * lanes]
        first = scratch[windows[2 * x] * lanes : (windows[2 * x] + 1) * lanes]
        for lane in range(lanes):
            here[lane] = first[lane]
        for k in range(windows[2 * x] + 1, windows[2 * x + 1]):
            more = scratch[k * lanes : (k + 1) * lanes]
            if largest:
                for lane in range(lanes):
                    here[lane] = max(here[lane], more[lane])
            else:
                for lane in range(lanes):
                    here[lane] += more[lane]


@njit(error_model="numpy", fastmath=_LOOSE)
def _multiply(op, arena, longs, offsets, values, consts, low, high, doubt, first, last):
    """Rows times a vector, four sums at a time."""
    starts = longs[op[STARTS] :]
    base = op[SOURCE]
    wrong = np.float32(0.0)
    for r in range(first, last):
        a = b = c = d = np.float32(0.0)
        k, end = starts[r] + op[WEIGHTS], starts[r + 1] + op[WEIGHTS]
        while k + 4 <= end:
            a += values[k] * arena[base + offsets[k]]
            b += values[k + 1] * arena[base + offsets[k + 1]]
            c += values[k + 2] * arena[base + offsets[k + 2]]
            d += values[k + 3] * arena[base + offsets[k + 3]]
            k += 4
        while k < end:
            a += values[k] * arena[base + offsets[k]]
            k += 1
        total = (a + b) + (c + d) + consts[op[BIAS] + r]
        if op[OTHER] >= 0:
            total += arena[op[OTHER] + r]
        wrong += total * np.float32(0.0)
        arena[op[TARGET] + r] = min(max(total, low), high)
    doubt[0] += wrong


@njit(error_model="numpy")
def _convolve(op, arena, longs, offsets, values, consts, masks, low, high, doubt, first, last):
    at = arena.ctypes.data
    source = at + 4 * (op[SOURCE] + op[SOURCE_LEAD])
    target = at + 4 * (op[TARGET] + op[TARGET_LEAD])
    other = at + 4 * (op[OTHER] + op[TARGET_LEAD]) if op[OTHER] >= 0 else 0
    mask = masks.ctypes.data + 4 * op[MASK]
    line = 4 * op[TARGET_STRIDE] * op[LANES]
    rows, blocks = op[ROWS], op[BLOCKS]
    done = 0
    for tile in range(op[TILES]):
        if op[LINES] > 0:
            shape = op[LINES] * (MOST + 1) + op[VECTORS]
            skipped = tile * op[LINES] * line
        else:
            vectors = op[VECTORS] * (tile + 1) // op[TILES] - done
            shape = MOST + 1 + vectors
            skipped = 4 * WIDTH * done
            done += vectors
        here = target + skipped
        for block in range(blocks):
            # What the blocks before have summed is in the target, and is added like a residual.
            before, plane = here, 4 * op[TARGET_PLANE]
            if block == 0:
                before, plane = other + skipped if other != 0 else 0, 4 * op[OTHER_PLANE]
            stage = FIRST_PART if block == 0 else MIDDLE_PART
            if block == blocks - 1:
                stage = LAST_PART
            sparse_rows(
                shape,
                source + skipped,
                offsets.ctypes.data + 4 * op[WEIGHTS],
                values.ctypes.data + 4 * op[WEIGHTS],
                longs.ctypes.data + 8 * (op[STARTS] + block * rows),
                first,
                last,
                here,
                4 * op[TARGET_PLANE],
                consts.ctypes.data + 4 * (op[BIAS] + block * rows),
                before,
                plane,
                mask + skipped,
                line,
                stage,
                low,
                high,
                doubt.ctypes.data,
            )


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
            _convolve(
                op, arena, longs, offsets, values, consts, masks, low, high, doubt, first, last
            )
        else:
            _multiply(op, arena, longs, offsets, values, consts, low, high, doubt, first, last)
    elif kind == _PHASES:
        _phases(op, arena, longs, first, last)
    elif kind in (_MAX_POOL, _AVERAGE_POOL):
        place = op[SCRATCH] + thread * op[SCRATCH_SIZE]
        scratch = arena[place : place + op[SCRATCH_SIZE]]
        _pool(op, arena, longs, consts, scratch, first, last, kind == _MAX_POOL)
    elif kind == _PACK:
        size = op[ROWS] * op[HEIGHT] * op[WIDTH_]
        there = carray(_pointer(outside[op[OUTSIDE]] + 4 * image * size), size)
        _pack(op, arena, there, doubt, first, last)
    elif kind == _UNPACK:
        _unpack(op, arena, outside[op[OUTSIDE]], image, first, last)
    elif kind == _SPREAD:
        _spread(op, arena, lane, first, last)
    else:
        start, size = first * op[SOURCE_PLANE], (last - first) * op[SOURCE_PLANE]
        x = arena[op[SOURCE] + start : op[SOURCE] + start + size]
        y = arena[op[TARGET] + start : op[TARGET] + start + size]
        if kind == _ACTIVATE:
            _activate(x, y, op[CURVE], low, high, doubt)
        elif kind == _COPY:
            for i in range(size):
                y[i] = x[i]
        else:
            z = arena[op[OTHER] + start : op[OTHER] + start + size]
            _combine(x, z, y, kind == _SCALE, low, high, doubt)


def _stamp() -> int:
    """A number that changes with the source of the compiled code, which is cached with it."""
    here = Path(__file__).parent
    names = ("fields.py", "kernels.py", "tiles.py", "vectors.py", "waiting.py")
    text = b"".join((here / name).read_bytes() for name in names)
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
