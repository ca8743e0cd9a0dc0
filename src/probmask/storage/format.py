"""The layout of the file: its table, and the tensors, dense or as values and positions.

A safetensors file is the length of its header (8 bytes), the header (JSON) and the data. The
header's `__metadata__` names the format. Everything else about the network is in the table, which
is compressed JSON stored as a tensor of bytes: uncompressed, the names and shapes would be larger
than the weights of a very sparse network.

A tensor becomes one or two *parts* (`decode`): all of its entries, or the values and the
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
from numpy.typing import NDArray

from probmask.errors import ArtifactError
from probmask.storage.encodings import ENCODINGS, Bytes, Indices, require
from probmask.storage.integers import INTEGERS, decode_integers
from probmask.version import __version__

# Version 2 adds values stored as integers, version 3 the graph of the network. A file is written in
# the lowest version that it needs.
FORMATS = ("1", "2", "3")
FORMAT_KEY = "probmask"
# The dtypes and their widths in bytes.
WIDTHS = {
    **dict.fromkeys(("F64", "C64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
SPARSE_DTYPES = ("F64", "F32", "F16", "BF16")
# The narrower dtypes in which the values of a dtype may be stored.
ROUNDED_DTYPES = {"F64": ("F16",), "F32": ("F16",)}
# Names that start with this belong to the format, not to the network.
RESERVED = "probmask:"
TABLE = f"{RESERVED}table"
# Names of the tensors that only the graph needs start with this.
GRAPH_TENSOR = f"{RESERVED}graph."
MAX_TABLE_BYTES = 10_000_000  # uncompressed: a small file must not decompress to gigabytes
# Smaller parts are packed: each name in a safetensors header costs about 80 bytes.
MIN_UNPACKED_BYTES = 4096
# The integers that hold the bits of an entry, by their width in bytes.
WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
# The floating-point numbers that values are decoded to.
_FLOATS = {"F64": np.float64, "F32": np.float32}

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
        return self.numel * WIDTHS[self.dtype]

    @property
    def stored_bytes(self) -> int:
        """The size of its parts in bytes."""
        return sum(part.numel * WIDTHS[part.dtype] for part in self.parts)

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
class StoredGraph:
    """The graph of a network as JSON, and the tensors that it needs beyond those of the model."""

    network: dict[str, Any]
    entries: list[Entry]


@dataclass(frozen=True)
class Header:
    """The tensors of an artifact, in the model's order, and their origin."""

    entries: list[Entry]
    aliases: dict[str, str]  # a further name of a tensor -> the name under which it is stored
    crc32: dict[str, int]  # CRC-32 of each stored tensor
    metadata: dict[str, Any]
    rounding: dict[str, Any] | None = None  # the effect of storing values in fewer bits
    graph: StoredGraph | None = None
    created_by: str = field(default=f"probmask {__version__}")

    @property
    def all_entries(self) -> list[Entry]:
        """The tensors of the model, and those that only the graph needs."""
        return [*self.entries, *(self.graph.entries if self.graph is not None else ())]

    @property
    def version(self) -> str:
        """The lowest version of the format that has all it needs."""
        if self.graph is not None:
            return FORMATS[2]
        return FORMATS[any(entry.has_integers for entry in self.entries)]


def raw(words: Bits) -> memoryview:
    """Return the bytes of an array without copying them."""
    return words.reshape(-1).view(np.uint8).data


def checksum(words: Bits) -> int:
    """Return the CRC-32 of the bytes of a stored tensor."""
    return zlib.crc32(raw(words))


def is_name(value: Any) -> bool:
    """Return whether the value is text that UTF-8 can encode, as safetensors requires of names."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def decode(entry: Entry, parts: Sequence[Bits]) -> Bits:
    """Return the bits of the dense tensor that an entry and its parts describe, after checks."""
    if entry.has_integers:
        # A sign takes one bit, so this bounds the memory that the next steps need.
        require(entry.nnz <= 8 * entry.coded, f"{entry.coded} bytes do not hold {entry.nnz} values")
        indices = _indices(entry, parts)
        floats = _FLOATS[entry.dtype]
        values = decode_integers(parts[0], indices, entry.shape, floats, INTEGERS[entry.values])
        words = values.view(WORDS[values.itemsize])
        _check_values(entry, words)
    else:
        _check_values(entry, parts[0])
        words = parts[0]
        if entry.values != entry.dtype:  # fp16, for wider numbers
            wide = words.view(np.float16).astype(_FLOATS[entry.dtype])
            words = wide.view(WORDS[wide.itemsize])
        if entry.encoding == "dense":
            return words.reshape(entry.shape)
        indices = _indices(entry, parts)
    dense = np.zeros(entry.numel, dtype=words.dtype)  # takes no memory until written
    dense[indices] = words.reshape(-1)
    return dense.reshape(entry.shape)


def _indices(entry: Entry, parts: Sequence[Bits]) -> Indices:
    if entry.encoding == "dense":
        return np.arange(entry.nnz)
    positions: Bytes = parts[1]
    return ENCODINGS[entry.encoding].decode(positions, entry.numel, entry.nnz)


def _check_values(entry: Entry, words: Bits) -> None:
    count = int(np.count_nonzero(words))
    if count != entry.nnz:
        raise ArtifactError(f"nnz is {entry.nnz}, but {count} of its values are not zero")
    if entry.dtype == "BOOL" and words.size and words.max() > 1:
        raise ArtifactError("a BOOL entry is neither 0 nor 1")


class Stored(NamedTuple):
    """A tensor that a file stores, as the bits of its entries."""

    dtype: str
    shape: tuple[int, ...]
    words: Bits


def pack(parts: Iterable[tuple[Part, Bits]]) -> dict[str, Stored]:
    """Return the tensors to store, by name: large parts as they are, small ones concatenated.

    The small parts of each dtype follow each other in the order of the table.
    """
    stored: dict[str, Stored] = {}
    small: dict[str, list[Bits]] = {}
    for part, words in parts:
        if words.nbytes < MIN_UNPACKED_BYTES:
            small.setdefault(part.dtype, []).append(words.reshape(-1))
        else:
            stored[part.name] = Stored(part.dtype, part.shape, words)
    for dtype, arrays in small.items():
        words = np.concatenate(arrays)
        stored[RESERVED + dtype] = Stored(dtype, words.shape, words)
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
