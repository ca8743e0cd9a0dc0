"""How a tensor becomes the parts that are stored, and comes back: dense, or values and positions.

Bits, not numbers, are compared with zero throughout: -0.0 is a value like any other, so that
what comes back is bit for bit what went in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from probmask.artifact.encodings import ENCODINGS, Bytes, smallest
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
# What may be stored as another dtype than it has in the network.
ROUNDED = {"F64": ("F16",), "F32": ("F16",)}
# What a sparse entry takes in the table beyond a dense one; a saving below it does not pay.
TABLE_COST = 16

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bits: TypeAlias = NDArray[Any]


class Part(NamedTuple):
    """A run of numbers that the file holds for a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """What the table says of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str
    nnz: int  # entries whose bits are not all zero
    values: str  # the dtype that its values are stored in
    positions: int  # bytes of positions

    @property
    def numel(self) -> int:
        """The number of entries of the dense tensor."""
        return math.prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        """The bytes of the dense tensor."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def stored_bytes(self) -> int:
        """The bytes that the file holds for it."""
        return sum(part.numel * DTYPES[part.dtype].itemsize for part in self.parts)

    @property
    def parts(self) -> list[Part]:
        """What the file holds for it."""
        if self.encoding == "dense":
            return [Part(self.name, self.values, self.shape)]
        return [
            Part(f"{self.name}.values", self.values, (self.nnz,)),
            Part(f"{self.name}.positions", "U8", (self.positions,)),
        ]


def bits(tensor: Tensor) -> Bits:
    """Return the entries in row-major order as integers of the same width."""
    return tensor.reshape(-1).view(_WORDS[tensor.dtype.itemsize]).numpy()


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, not copied."""
    return bits(tensor).view(np.uint8).data


def encode(
    name: str, tensor: Tensor, *, dtype: torch.dtype | None = None, sparse: bool = True
) -> tuple[Entry, list[Tensor]]:
    """Return the entry of a contiguous CPU tensor and its stored parts, in the fewest bytes.

    `dtype` is what it has in the network, if that is another; `sparse=False` leaves it dense.
    """
    stored, words = DTYPE_NAMES[tensor.dtype], bits(tensor)
    encoding, parts = "dense", [tensor]
    if sparse and stored in SPARSE_DTYPES:
        indices = np.flatnonzero(words != 0)
        nnz = indices.size
        chosen, size = smallest(indices, words.size)
        if size + TABLE_COST < (words.size - nnz) * words.itemsize:
            encoding = chosen
            values = torch.from_numpy(words[indices]).view(tensor.dtype)
            positions = ENCODINGS[encoding].encode(indices, words.size)
            parts = [values, torch.from_numpy(positions)]
    else:
        nnz = int(np.count_nonzero(words))
    of = DTYPE_NAMES[dtype or tensor.dtype]
    length = 0 if encoding == "dense" else parts[1].numel()
    return Entry(name, of, tuple(tensor.shape), encoding, nnz, stored, length), parts


def decode(entry: Entry, parts: Sequence[Tensor]) -> Tensor:
    """Return the dense tensor that `entry` and its stored parts describe, all of it checked."""
    values, dtype = parts[0], DTYPES[entry.dtype]
    _check_values(entry, bits(values))
    values = values.to(dtype)
    if entry.encoding == "dense":
        return values
    positions: Bytes = parts[1].numpy()
    indices = ENCODINGS[entry.encoding].decode(positions, entry.numel, entry.nnz)
    words = bits(values)
    dense = np.zeros(entry.numel, dtype=words.dtype)  # costs no memory until written
    dense[indices] = words
    return torch.from_numpy(dense).view(dtype).reshape(entry.shape)


def _check_values(entry: Entry, words: Bits) -> None:
    count = int(np.count_nonzero(words))
    if count != entry.nnz:
        raise ArtifactError(f"nnz is {entry.nnz} but {count} of its values are not zero")
    if entry.dtype == "BOOL" and words.size and words.max() > 1:
        raise ArtifactError("a BOOL entry is neither 0 nor 1")
