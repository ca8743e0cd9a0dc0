"""Kept weights as integers and one scale per channel: the stream of their bytes.

A channel is one index of the first dimension. `docs/format.md` specifies the bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from probmask.storage.encodings import Bytes, Indices, from_bit_planes, require
from probmask.storage.entropy_coding import Cursor, decode_symbols

# The name of each way to store values as integers, and its number of bits.
INTEGERS = {f"int{bits}": bits for bits in range(2, 9)}
# The dtypes whose values may be stored as integers.
INTEGER_DTYPES = ("F64", "F32")
# Beyond the codes of all fp64 numbers, so that sums of codes are small.
_MAX_BASE = 5000


def decode_integers(
    stream: Bytes, indices: Indices, shape: tuple[int, ...], floats: Any, bits: int
) -> NDArray[Any]:
    """Return the values of the entries at `indices`, as `floats`, or raise `ArtifactError`.

    The memory needed is proportional to the number of bytes and of indices.
    """
    counts = _counts(indices, shape)
    cursor = Cursor(stream)
    base = int.from_bytes(cursor.take(2).tobytes(), "little", signed=True)
    require(abs(base) <= _MAX_BASE, f"the code {base} is not that of a scale")
    codes = base + decode_symbols(cursor, counts.size).astype(np.int64)
    negative = from_bit_planes(cursor.take(-(-indices.size // 8)), indices.size, 1)
    sizes = decode_symbols(cursor, indices.size).astype(np.int64) + 1
    cursor.finish()
    largest = int(sizes.max())
    require(largest < 1 << (bits - 1), f"{largest} is not a magnitude of {bits} bits")
    integers = np.where(negative == 1, -sizes, sizes)
    with np.errstate(over="ignore"):
        scales = np.ldexp(4.0 + codes % 4, (codes // 4).astype(np.int32))
        values: NDArray[Any] = (integers * np.repeat(scales, counts)).astype(floats)
    require(bool(np.isfinite(values).all()), "a scale is too large")
    return values


def _counts(indices: Indices, shape: tuple[int, ...]) -> Indices:
    """Return the number of indices in each channel that has any."""
    size = int(np.prod(shape[1:], dtype=np.int64))
    channels: NDArray[np.int64] = indices // size
    first = np.flatnonzero(np.diff(channels, prepend=-1))
    return np.diff(first, append=channels.size)
