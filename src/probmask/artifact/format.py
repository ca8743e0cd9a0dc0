"""How a tensor becomes bytes and comes back: dense, or its values and their positions.

Bits, not numbers, are compared with zero throughout: -0.0 is a value like any other, so that
what comes back is bit for bit what went in.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from probmask.errors import ArtifactError

FORMAT = 1
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SPARSE_DTYPES = ("F64", "F32", "F16", "BF16")
ENCODINGS = ("dense", "bitmap", "delta")
ESCAPE = 255
# What one more tensor takes in a safetensors header; a saving below it does not pay.
HEADER_COST = 128

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bits: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class Entry:
    """What the header says of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    encoding: str
    nnz: int  # entries whose bits are not all zero
    crc32: int  # over the stored bytes: values, then positions

    @property
    def numel(self) -> int:
        """The number of entries of the dense tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of one entry."""
        return DTYPES[self.dtype].itemsize


def bits(tensor: Tensor) -> Bits:
    """Return the entries in row-major order as integers of the same width."""
    return tensor.reshape(-1).view(_WORDS[tensor.dtype.itemsize]).numpy()


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, not copied."""
    return bits(tensor).view(np.uint8).data


def encode(tensor: Tensor, *, sparse: bool = True) -> tuple[Entry, dict[str, Tensor]]:
    """Return the entry and the stored parts of a contiguous CPU tensor, by suffix of their names.

    The smallest encoding wins; `sparse=False` allows only the dense one.
    """
    dtype, words = DTYPE_NAMES[tensor.dtype], bits(tensor)
    encoding, positions = "dense", None
    nnz = int(np.count_nonzero(words))
    if sparse and dtype in SPARSE_DTYPES:
        encoding, positions = _smallest(words, nnz)
    if positions is None:
        parts = {"": tensor}
    else:
        values = torch.from_numpy(words[words != 0]).view(tensor.dtype)
        parts = {".values": values, ".positions": torch.from_numpy(positions)}
    return Entry(tuple(tensor.shape), dtype, encoding, nnz, checksum(parts)), parts


def _smallest(words: Bits, nnz: int) -> tuple[str, Bytes | None]:
    """Return the encoding with the fewest bytes, and its positions unless that is dense."""
    occupied = words != 0
    bitmap_bytes = -(-words.size // 8)
    limit = (words.size - nnz) * words.itemsize - HEADER_COST  # positions beyond it do not pay
    if nnz + 1 < min(bitmap_bytes, limit):  # a delta stream has no fewer bytes
        gaps = _gaps(occupied)
        if nnz + 1 + int((gaps // ESCAPE).sum()) < min(bitmap_bytes, limit):
            return "delta", _delta(gaps)
    if bitmap_bytes < limit:
        return "bitmap", np.packbits(occupied, bitorder="little")
    return "dense", None


def _gaps(occupied: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the zeros before each non-zero, and those after the last."""
    edges = np.concatenate(([-1], np.flatnonzero(occupied), [occupied.size]))
    return np.diff(edges) - 1


def _delta(gaps: NDArray[np.int64]) -> Bytes:
    """Return every gap as gap // 255 escapes and one byte, gap % 255."""
    ends = np.cumsum(gaps // ESCAPE + 1) - 1
    stream = np.full(int(ends[-1]) + 1, ESCAPE, dtype=np.uint8)
    stream[ends] = gaps % ESCAPE
    return stream


def decode(entry: Entry, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the dense tensor that `entry` and its stored parts describe, all of it checked."""
    if checksum(parts) != entry.crc32:
        raise ArtifactError("the checksum does not match: the data is damaged")
    if entry.encoding == "dense":
        return _checked_dense(entry, parts[""])
    positions: Bytes = parts[".positions"].numpy()
    where = _bitmap_mask if entry.encoding == "bitmap" else _delta_indices
    index = where(positions, entry)
    values = bits(parts[".values"])
    # Only now is the size known to be backed by the file; zeros cost no memory until written.
    dense = np.zeros(entry.numel, dtype=values.dtype)
    dense[index] = values
    return torch.from_numpy(dense).view(DTYPES[entry.dtype]).reshape(entry.shape)


def _checked_dense(entry: Entry, tensor: Tensor) -> Tensor:
    words = bits(tensor)
    if np.count_nonzero(words) != entry.nnz:
        raise ArtifactError(f"nnz is {entry.nnz} but the data has {np.count_nonzero(words)}")
    if entry.dtype == "BOOL" and words.size and words.max() > 1:
        raise ArtifactError("a BOOL entry is neither 0 nor 1")
    return tensor


def _bitmap_mask(positions: Bytes, entry: Entry) -> NDArray[np.bool_]:
    """Return the mask that a bitmap spells out."""
    occupied = np.unpackbits(positions, bitorder="little").view(np.bool_)
    if occupied[entry.numel :].any():
        raise ArtifactError(f"the bitmap has bits set past its {entry.numel} entries")
    if np.count_nonzero(occupied) != entry.nnz:
        count = np.count_nonzero(occupied)
        raise ArtifactError(f"nnz is {entry.nnz} but the bitmap has {count} bits set")
    return occupied[: entry.numel]


def _delta_indices(positions: Bytes, entry: Entry) -> NDArray[np.int64]:
    """Return the indices that a delta stream spells out.

    The two checks make every index valid: all zeros and non-zeros together are `numel`.
    """
    stops = np.flatnonzero(positions != ESCAPE)
    if stops.size != entry.nnz + 1 or stops[-1] != positions.size - 1:
        raise ArtifactError(f"the delta stream does not hold nnz + 1 = {entry.nnz + 1} gaps")
    zeros = np.cumsum(positions, dtype=np.int64)[stops]
    if int(zeros[-1]) + entry.nnz != entry.numel:
        covered = int(zeros[-1]) + entry.nnz
        raise ArtifactError(f"the delta stream covers {covered} of {entry.numel} entries")
    return zeros[:-1] + np.arange(entry.nnz)


def check_backed(name: str, entry: Entry, position_bytes: int) -> None:
    """Refuse an entry whose shape its positions cannot account for, before any allocation."""
    reach = (
        8 * position_bytes if entry.encoding == "bitmap" else ESCAPE * position_bytes + entry.nnz
    )
    if entry.numel > reach or (entry.encoding == "bitmap" and entry.numel <= reach - 8):
        raise ArtifactError(
            f"tensor {name!r:.80}: {position_bytes} bytes of positions do not fit "
            f"{entry.numel} entries as {entry.encoding}"
        )


def checksum(parts: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 of the bytes of all parts in their order."""
    crc = 0
    for part in parts.values():
        crc = zlib.crc32(raw(part), crc)
    return crc
