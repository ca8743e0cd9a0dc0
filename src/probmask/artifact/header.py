"""The header and the table of an artifact: writing them, and reading them with every value checked.

A safetensors file is the length of its header (8 bytes), the header (JSON) and the data. The
header's `__metadata__` names the format. Everything else about the network is in the table, which
is compressed JSON stored as a tensor of bytes: uncompressed, the names and shapes would be larger
than the weights of a very sparse network.
"""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.artifact.encodings import ENCODINGS, require
from probmask.artifact.format import (
    DTYPE_NAMES,
    DTYPES,
    FORMAT,
    RESERVED,
    ROUNDED_DTYPES,
    SPARSE_DTYPES,
    Entry,
    raw,
)
from probmask.errors import ArtifactError, InputError
from probmask.version import __version__

FORMAT_KEY = "probmask"
TABLE = f"{RESERVED}table"
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors readers
_MAX_TABLE_BYTES = 10_000_000  # of JSON: a small file must not decompress to gigabytes
_MAX_COUNT = 2**62


@dataclass(frozen=True)
class Header:
    """The tensors of an artifact, in the model's order, and their origin."""

    entries: list[Entry]
    aliases: dict[str, str]  # a further name of a tensor -> the name under which it is stored
    crc32: dict[str, int]  # of the bytes of each stored tensor
    metadata: dict[str, Any]
    rounding: dict[str, Any] | None = None  # the effect of storing values in fewer bits
    created_by: str = field(default=f"probmask {__version__}")


def serialize(header: Header, stored: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """Return the safetensors header as bytes, and the tensors in the order in which they follow."""
    table = torch.from_numpy(np.frombuffer(_compressed(header), dtype=np.uint8).copy())
    # Wide dtypes first: each tensor then starts at a multiple of the width of its dtype.
    ordered = sorted({**stored, TABLE: table}.items(), key=lambda kv: (-kv[1].itemsize, kv[0]))
    fields: dict[str, Any] = {"__metadata__": {FORMAT_KEY: str(FORMAT)}}
    offset = 0
    for name, tensor in ordered:
        dtype, shape, end = DTYPE_NAMES[tensor.dtype], list(tensor.shape), offset + tensor.nbytes
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = _to_json(fields).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    _check_length("safetensors header", len(text), _MAX_HEADER_BYTES)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]


def _compressed(header: Header) -> bytes:
    fields: dict[str, Any] = {
        "created_by": header.created_by,
        "tensors": [_to_fields(entry) for entry in header.entries],
        "aliases": header.aliases,
        "crc32": header.crc32,
        "metadata": header.metadata,
    }
    if header.rounding is not None:
        fields["rounding"] = header.rounding
    text = _to_json(fields).encode()
    _check_length("table", len(text), _MAX_TABLE_BYTES)
    return zlib.compress(text, 9)


def _check_length(what: str, length: int, limit: int) -> None:
    if length > limit:
        raise InputError(
            f"save(model): the {what} has {length} bytes, and the limit is {limit}; "
            "put less into metadata."
        )


def _to_fields(entry: Entry) -> dict[str, Any]:
    """Return the fields of an entry without those that follow from others."""
    fields = dict(vars(entry))
    if entry.values == entry.dtype:
        del fields["values"]
    if entry.encoding == "dense":
        del fields["positions"]
    return fields


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a stored tensor."""
    return zlib.crc32(raw(tensor))


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with sorted keys, equal to what reading the file returns.

    Raise `InputError` if JSON cannot represent it.
    """
    try:
        copy = json.loads(json.dumps(dict(metadata), allow_nan=False, sort_keys=True))
        _require_text_keys(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"save(metadata=...): not plain JSON ({error}); use text keys, and text, finite "
            "numbers, booleans, None, lists and dicts as values."
        ) from error
    assert isinstance(copy, dict)
    return copy


def _require_text_keys(value: Any) -> None:
    """Raise for keys that are not text: `json.dumps` would convert them without a warning."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            _require_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_text_keys(inner)


def check_format(metadata: Mapping[str, str] | None) -> None:
    """Raise unless the `__metadata__` of a safetensors header names the format read here."""
    if not metadata or FORMAT_KEY not in metadata:
        raise ArtifactError("a safetensors file, but not a probmask artifact")
    if metadata[FORMAT_KEY] != str(FORMAT):
        raise ArtifactError(
            f"format {metadata[FORMAT_KEY]!r:.40} is not supported: probmask {__version__} reads "
            f"format {FORMAT}; install a version that reads this file."
        )


def parse_table(table: memoryview) -> Header:
    """Return the contents of the compressed table, with every value checked."""
    try:
        fields = json.loads(_decompressed(table).decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the table is not JSON ({error})") from error
    require(isinstance(fields, dict), "the table is not an object")
    tensors, aliases, crc32 = (
        _typed(fields, "tensors", list),
        _typed(fields, "aliases", dict),
        _typed(fields, "crc32", dict),
    )
    entries = [_entry(tensor) for tensor in tensors]
    names = {entry.name for entry in entries}
    require(len(names) == len(entries), "the table names a tensor twice")
    for alias, target in aliases.items():
        known = isinstance(target, str) and target in names
        new = is_name(alias) and alias not in names
        require(known and new, f"the alias {alias!r:.80} is not a new name of a tensor")
    for key, crc in crc32.items():
        require(_is_count(crc), f"the crc32 of {key!r:.80} is not a number")
    rounding = _typed(fields, "rounding", dict) if "rounding" in fields else None
    metadata, created_by = _typed(fields, "metadata", dict), _typed(fields, "created_by", str)
    return Header(entries, aliases, crc32, metadata, rounding, created_by)


def _decompressed(table: memoryview) -> bytes:
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(table, _MAX_TABLE_BYTES + 1)
    except zlib.error as error:
        raise ArtifactError(f"the table is damaged ({error})") from error
    require(len(text) <= _MAX_TABLE_BYTES, f"the table is longer than {_MAX_TABLE_BYTES} bytes")
    require(stream.eof and not stream.unused_data, "the table is damaged (its end is missing)")
    return text


def _typed(fields: dict[str, Any], key: str, kind: type) -> Any:
    require(isinstance(fields.get(key), kind), f"the table has no valid {key!r}")
    return fields[key]


def _entry(fields: Any) -> Entry:
    """Return the entry of one tensor."""
    named = isinstance(fields, dict) and is_name(fields.get("name"))
    require(named, "an entry of the table has no name")
    name, dtype, shape, encoding, nnz = (
        fields.get(key) for key in ("name", "dtype", "shape", "encoding", "nnz")
    )
    values, positions = fields.get("values", dtype), fields.get("positions", 0)
    where = f"tensor {name!r:.80}"
    require(not name.startswith(RESERVED), f"{where}: the name is reserved")
    sizes = isinstance(shape, list) and len(shape) <= 64 and all(map(_is_count, shape))
    require(sizes, f"{where}: its shape is not a list of up to 64 sizes")
    # Checked for empty tensors too: PyTorch multiplies the sizes to compute the strides.
    product = math.prod(max(size, 1) for size in shape)
    require(product <= _MAX_COUNT, f"{where}: the product of its shape exceeds 2**62")
    require(isinstance(dtype, str) and dtype in DTYPES, f"{where}: unknown dtype {dtype!r:.40}")
    require(
        values == dtype or values in ROUNDED_DTYPES.get(dtype, ()),
        f"{where}: {dtype} values cannot be stored as {values!r:.40}",
    )
    known = _is_encoding(encoding, dtype)
    require(known, f"{where}: unknown encoding {encoding!r:.40} for {dtype}")
    counted = _is_count(nnz) and nnz <= math.prod(shape)
    require(counted, f"{where}: nnz {nnz!r:.40} is not a number of its entries")
    require(_is_count(positions), f"{where}: positions {positions!r:.40} is not a number of bytes")
    return Entry(name, dtype, tuple(shape), encoding, nnz, values, positions)


def _is_encoding(encoding: Any, dtype: str) -> bool:
    sparse = isinstance(encoding, str) and encoding in ENCODINGS and dtype in SPARSE_DTYPES
    return encoding == "dense" or sparse


def is_name(value: Any) -> bool:
    """Return whether the value is text that UTF-8 can encode, as safetensors requires of names."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
