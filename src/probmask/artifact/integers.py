"""Kept weights as integers and one scale per channel: the stream of their bytes.

A channel is one index of the first dimension. `docs/format.md` specifies the bytes.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from probmask.artifact.encodings import Bytes, Indices, bit_planes, from_bit_planes, require
from probmask.artifact.entropy_coding import Cursor, decode_symbols, encode_symbols
from probmask.core.integer_grid import (
    from_grid,
    grid_of,
    kept_places,
    largest_integer,
    round_to_grid,
)

# The name of each way to store values as integers, and its number of bits.
INTEGERS = {f"int{bits}": bits for bits in range(2, 9)}
# The dtypes whose values may be stored as integers.
INTEGER_DTYPES = ("F64", "F32")
_MAX_CODE = 255
# Beyond the codes of all fp64 numbers, so that sums of codes are small.
_MAX_BASE = 5000


def encode_integers(tensor: Tensor, bits: int) -> Bytes | None:
    """Return the nonzero entries as a stream, or None if they are not on a grid of these bits."""
    places, counts = kept_places(tensor)
    weights = tensor.flatten()[places]
    if not weights.numel() or not bool(weights.isfinite().all()):
        return None
    codes, exact = grid_of(weights, counts, bits)
    base = int(codes.min())
    if not bool(exact.all()) or int(codes.max()) - base > _MAX_CODE:
        return None
    integers = round_to_grid(weights, codes, counts, bits).numpy()
    return np.concatenate(
        [
            np.frombuffer(np.array([base], dtype="<i2").tobytes(), dtype=np.uint8),
            encode_symbols((codes.numpy() - base).astype(np.uint8)),
            bit_planes((integers < 0).view(np.uint8), 1),
            encode_symbols((np.abs(integers) - 1).astype(np.uint8)),
        ]
    )


def decode_integers(
    stream: Bytes, indices: Indices, shape: tuple[int, ...], dtype: torch.dtype, bits: int
) -> Tensor:
    """Return the values of the entries at `indices`, or raise `ArtifactError`.

    The memory needed is proportional to the number of bytes and of indices.
    """
    counts = _counts(indices, shape)
    cursor = Cursor(stream)
    base = int.from_bytes(cursor.take(2).tobytes(), "little", signed=True)
    require(abs(base) <= _MAX_BASE, f"the code {base} is not that of a scale")
    codes = base + torch.from_numpy(decode_symbols(cursor, counts.numel()).astype(np.int64))
    negative = from_bit_planes(cursor.take(-(-indices.size // 8)), indices.size, 1)
    sizes = decode_symbols(cursor, indices.size).astype(np.int64) + 1
    cursor.finish()
    largest = int(sizes.max())
    require(largest <= largest_integer(bits), f"{largest} is not a magnitude of {bits} bits")
    integers = torch.from_numpy(np.where(negative == 1, -sizes, sizes))
    values = from_grid(integers, codes, counts, dtype)
    require(bool(values.isfinite().all()), "a scale is too large")
    return values


def _counts(indices: Indices, shape: tuple[int, ...]) -> Tensor:
    """Return the number of indices in each channel that has any."""
    size = int(np.prod(shape[1:], dtype=np.int64))
    channels: NDArray[np.int64] = indices // size
    first = np.flatnonzero(np.diff(channels, prepend=-1))
    return torch.from_numpy(np.diff(first, append=channels.size))
