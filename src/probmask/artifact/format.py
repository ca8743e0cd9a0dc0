"""The layout of the file: its table, and the tensors, dense or as values and positions.

A safetensors file is the length of its header (8 bytes), the header (JSON) and the data. The
header's `__metadata__` names the format. Everything else about the network is in the table, which
is compressed JSON stored as a tensor of bytes: uncompressed, the names and shapes would be larger
than the weights of a very sparse network.

A tensor becomes one or two *parts* (`encode`, `decode`): all of its entries, or the values and the
positions of those that are not zero. Values are stored in a dtype, or as integers (`integers`).
Each part is stored under its own name, or packed with other small parts of its dtype (`pack`,
`locate`). -0.0 is stored as 0.0. All other entries keep every bit: an entry is zero only if none of
its bits is set.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from probmask.artifact.encodings import ENCODINGS, Bytes, Indices, require, smallest
from probmask.artifact.integers import INTEGERS, decode_integers, encode_integers
from probmask.errors import ArtifactError
from probmask.version import __version__

# Version 2 adds values stored as integers. A file without them has version 1.
FORMATS = ("1", "2")
FORMAT_KEY = "probmask"
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
# The narrower dtypes in which the values of a dtype may be stored.
ROUNDED_DTYPES = {"F64": ("F16",), "F32": ("F16",)}
# Names that start with this belong to the format, not to the network.
RESERVED = "probmask:"
TABLE = f"{RESERVED}table"
MAX_TABLE_BYTES = 10_000_000  # uncompressed: a small file must not decompress to gigabytes
# Smaller parts are packed: each name in a safetensors header costs about 80 bytes.
MIN_UNPACKED_BYTES = 4096
# A sparse entry needs this many more bytes in the table than a dense one.
_SPARSE_ENTRY_BYTES = 16

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bits: TypeAlias = NDArray[Any]
StoredShape: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and sizes


class Part(NamedTuple):
    """An array that the file stores for a tensor: its values or its positions."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


class Place(NamedTuple):
    """The location of a part: all of the stored tensor `key`, or, if packed, from `begin` on."""

    key: str
    begin: int | None


@dataclass(frozen=True)
class Entry:
    """The description of one tensor in the table."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str
    nnz: int  # the number of entries with a bit set
    values: str  # the dtype in which its values are stored, or a name of `INTEGERS`
    positions: int  # the number of bytes of its positions
    coded: int = 0  # the number of bytes of its values, if they are stored as integers

    @property
    def numel(self) -> int:
        """The number of entries of the dense tensor."""
        return math.prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        """The size of the dense tensor in bytes."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def stored_bytes(self) -> int:
        """The size of its parts in bytes."""
        return sum(part.numel * DTYPES[part.dtype].itemsize for part in self.parts)

    @property
    def parts(self) -> list[Part]:
        """The parts that the file stores for it."""
        positions = Part(f"{self.name}.positions", "U8", (self.positions,))
        if self.has_integers:
            values = Part(f"{self.name}.values", "U8", (self.coded,))
            return [values] if self.encoding == "dense" else [values, positions]
        if self.encoding == "dense":
            return [Part(self.name, self.values, self.shape)]
        return [Part(f"{self.name}.values", self.values, (self.nnz,)), positions]

    @property
    def has_integers(self) -> bool:
        """Whether its values are stored as integers."""
        return self.values in INTEGERS


@dataclass(frozen=True)
class Header:
    """The tensors of an artifact, in the model's order, and their origin."""

    entries: list[Entry]
    aliases: dict[str, str]  # a further name of a tensor -> the name under which it is stored
    crc32: dict[str, int]  # CRC-32 of each stored tensor
    metadata: dict[str, Any]
    rounding: dict[str, Any] | None = None  # the effect of storing values in fewer bits
    created_by: str = field(default=f"probmask {__version__}")


def bits(tensor: Tensor) -> Bits:
    """Return the entries in row-major order as integers of the same width."""
    return tensor.reshape(-1).view(_WORDS[tensor.dtype.itemsize]).numpy()


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    return bits(tensor).view(np.uint8).data


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a stored tensor."""
    return zlib.crc32(raw(tensor))


def is_name(value: Any) -> bool:
    """Return whether the value is text that UTF-8 can encode, as safetensors requires of names."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def encode(
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    sparse: bool = True,
    values: str | None = None,
) -> tuple[Entry, list[Tensor]]:
    """Return the table entry and the parts of a contiguous CPU tensor, in the fewest bytes.

    `dtype` is the dtype in the network, if the tensor has been rounded to another one.
    `sparse=False` forces the dense encoding. `values` names the integers to store the values as, if
    they are on a grid of that many bits.
    """
    tensor = _with_positive_zeros(tensor)
    stored, words = DTYPE_NAMES[tensor.dtype], bits(tensor)
    original, shape = DTYPE_NAMES[dtype or tensor.dtype], tuple(tensor.shape)
    if not sparse or stored not in SPARSE_DTYPES:
        nnz = int(np.count_nonzero(words))
        return Entry(name, original, shape, "dense", nnz, stored, 0), [tensor]
    indices = np.flatnonzero(words != 0)
    nnz = indices.size
    chosen, size = smallest(indices, words.size)
    stream = None if values is None else encode_integers(tensor, INTEGERS[values])
    if values is not None and stream is not None and stream.size < nnz * words.itemsize:
        parts = [torch.from_numpy(stream)]
        if nnz == words.size:
            return Entry(name, original, shape, "dense", nnz, values, 0, stream.size), parts
        positions = ENCODINGS[chosen].encode(indices, words.size)
        entry = Entry(name, original, shape, chosen, nnz, values, positions.size, stream.size)
        return entry, [*parts, torch.from_numpy(positions)]
    if size + _SPARSE_ENTRY_BYTES >= (words.size - nnz) * words.itemsize:
        return Entry(name, original, shape, "dense", nnz, stored, 0), [tensor]
    kept = torch.from_numpy(words[indices]).view(tensor.dtype)
    positions = ENCODINGS[chosen].encode(indices, words.size)
    entry = Entry(name, original, shape, chosen, nnz, stored, positions.size)
    return entry, [kept, torch.from_numpy(positions)]


def _with_positive_zeros(tensor: Tensor) -> Tensor:
    """Return the tensor with 0.0 for every -0.0, copied only if there is one.

    A negative weight times a mask of 0 is -0.0. Adding 0.0 would change the bits of some NaNs.
    """
    if tensor.is_complex():
        return torch.view_as_complex(_with_positive_zeros(torch.view_as_real(tensor)))
    if not tensor.is_floating_point():
        return tensor
    words = bits(tensor)
    negative = words == (1 << 7 if words.itemsize == 1 else np.iinfo(words.dtype).min)
    if not negative.any():
        return tensor
    positive = np.where(negative, words.dtype.type(0), words)
    return torch.from_numpy(positive).view(tensor.dtype).reshape(tensor.shape)


def decode(entry: Entry, parts: Sequence[Tensor]) -> Tensor:
    """Return the dense tensor that `entry` and its parts describe, after checking them."""
    dtype = DTYPES[entry.dtype]
    if entry.has_integers:
        # A sign takes one bit, so this bounds the memory that the next steps need.
        require(entry.nnz <= 8 * entry.coded, f"{entry.coded} bytes do not hold {entry.nnz} values")
        indices = _indices(entry, parts)
        stream: Bytes = parts[0].numpy()
        values = decode_integers(stream, indices, entry.shape, dtype, INTEGERS[entry.values])
        _check_values(entry, bits(values))
    else:
        _check_values(entry, bits(parts[0]))
        values = parts[0].to(dtype)
        if entry.encoding == "dense":
            return values
        indices = _indices(entry, parts)
    words = bits(values)
    dense = np.zeros(entry.numel, dtype=words.dtype)  # takes no memory until written
    dense[indices] = words
    return torch.from_numpy(dense).view(dtype).reshape(entry.shape)


def _indices(entry: Entry, parts: Sequence[Tensor]) -> Indices:
    if entry.encoding == "dense":
        return np.arange(entry.nnz)
    positions: Bytes = parts[1].numpy()
    return ENCODINGS[entry.encoding].decode(positions, entry.numel, entry.nnz)


def _check_values(entry: Entry, words: Bits) -> None:
    count = int(np.count_nonzero(words))
    if count != entry.nnz:
        raise ArtifactError(f"nnz is {entry.nnz}, but {count} of its values are not zero")
    if entry.dtype == "BOOL" and words.size and words.max() > 1:
        raise ArtifactError("a BOOL entry is neither 0 nor 1")


def pack(parts: Iterable[tuple[Part, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors to store, by name: large parts as they are, small ones concatenated.

    The small parts of each dtype follow each other in the order of the table.
    """
    stored: dict[str, Tensor] = {}
    small: dict[str, list[Tensor]] = {}
    for part, tensor in parts:
        if tensor.nbytes < MIN_UNPACKED_BYTES:
            small.setdefault(part.dtype, []).append(tensor)
        else:
            stored[part.name] = tensor
    for dtype, tensors in small.items():
        words = np.concatenate([bits(tensor) for tensor in tensors])
        stored[RESERVED + dtype] = torch.from_numpy(words).view(DTYPES[dtype])
    return stored


def locate(parts: Iterable[Part], stored: Mapping[str, StoredShape]) -> dict[str, Place]:
    """Return the place of each part by name.

    Raise `ArtifactError` unless the stored tensors are exactly those that the parts need.
    """
    places: dict[str, Place] = {}
    unused = dict(stored)
    filled: Counter[str] = Counter()
    for part in parts:
        if part.name in places:
            raise ArtifactError(f"two parts have the name {part.name!r:.90}")
        if part.name in unused:
            places[part.name] = Place(part.name, None)
            _require_same(part.name, unused.pop(part.name), (part.dtype, part.shape))
        else:
            pack_name = RESERVED + part.dtype
            places[part.name] = Place(pack_name, filled[pack_name])
            filled[pack_name] += part.numel
    for pack_name, count in filled.items():
        expected = (pack_name.removeprefix(RESERVED), (count,))
        _require_same(pack_name, unused.pop(pack_name, None), expected)
    if unused:
        raise ArtifactError(f"tensor {min(unused)!r:.90} is not in the table")
    return places


def _require_same(key: str, found: StoredShape | None, expected: StoredShape) -> None:
    if found != expected:
        dtype, shape = expected
        raise ArtifactError(
            f"tensor {key!r:.90} does not match the table: expected {dtype} of shape "
            f"{list(shape)!s:.60}"
        )


def shared_names(state: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of a state_dict in groups, one group for each distinct tensor.

    Tied weights have several names. The file stores them once and lists the others as aliases.
    """
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        key: Any = name
        if isinstance(value, Tensor) and value.layout == torch.strided and not is_lazy(value):
            if value.is_meta:
                key = id(value)
            elif value.data_ptr():  # an empty tensor has no memory to share
                memory = (value.device, value.data_ptr())
                key = (*memory, value.dtype, value.shape, value.stride())
        groups.setdefault(key, []).append(name)
    return list(groups.values())
