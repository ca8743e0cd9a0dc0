"""The table of an artifact: its bytes when written, its meaning when read, nothing taken on trust.

A safetensors file is the length of its header (8 bytes), the header (JSON) and the data. The
header's `__metadata__` names our format; all else that we say is in the table, compressed JSON
that is stored as a tensor of bytes, because names and shapes would outweigh a very sparse network.
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

from probmask.artifact.encodings import ENCODINGS
from probmask.artifact.format import (
    DTYPE_NAMES,
    DTYPES,
    FORMAT,
    ROUNDED,
    SPARSE_DTYPES,
    Entry,
    raw,
)
from probmask.artifact.packing import RESERVED
from probmask.errors import ArtifactError, InputError
from probmask.version import __version__

KEY = "probmask"
TABLE = f"{RESERVED}table"
LONGEST_HEADER = 100_000_000  # bytes that safetensors readers accept
LONGEST_TABLE = 10_000_000  # bytes of JSON: a small file must not unfold into gigabytes
_LARGEST = 2**62


@dataclass(frozen=True)
class Header:
    """What an artifact says of its tensors, in the model's order, and of its origin."""

    entries: list[Entry]
    aliases: dict[str, str]  # a second name of a tensor -> the name it is stored under
    crc32: dict[str, int]  # of each stored tensor's bytes
    metadata: dict[str, Any]
    rounding: dict[str, Any] | None = None  # what storing values in fewer bits changed
    created_by: str = field(default=f"probmask {__version__}")


def container(header: Header, stored: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """Return the safetensors header and, in the order in which they follow it, the tensors."""
    table = torch.from_numpy(np.frombuffer(_compressed(header), dtype=np.uint8).copy())
    # Wide entries first: then each tensor starts at a multiple of its entries' width.
    ordered = sorted({**stored, TABLE: table}.items(), key=lambda kv: (-kv[1].itemsize, kv[0]))
    fields: dict[str, Any] = {"__metadata__": {KEY: str(FORMAT)}}
    offset = 0
    for name, tensor in ordered:
        dtype, shape, end = DTYPE_NAMES[tensor.dtype], list(tensor.shape), offset + tensor.nbytes
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = _to_json(fields).encode()
    text += b" " * (-len(text) % 8)  # so that all data is aligned
    _refuse_longer("safetensors header", len(text), LONGEST_HEADER)
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
    _refuse_longer("table", len(text), LONGEST_TABLE)
    return zlib.compress(text, 9)


def _refuse_longer(what: str, length: int, longest: int) -> None:
    if length > longest:
        raise InputError(
            f"save(model): the {what} is {length} bytes long, more than {longest}; "
            "put less into metadata"
        )


def _to_fields(entry: Entry) -> dict[str, Any]:
    """Return the entry's fields, without those that follow from others."""
    fields = dict(vars(entry))
    if entry.values == entry.dtype:
        del fields["values"]
    if entry.encoding == "dense":
        del fields["positions"]
    return fields


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a stored tensor's bytes."""
    return zlib.crc32(raw(tensor))


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with sorted keys, as reading the file will give it back."""
    try:
        copy = json.loads(json.dumps(dict(metadata), allow_nan=False, sort_keys=True))
        _require_text_keys(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"save(metadata=...): not plain JSON ({error}); use text keys, and text, finite "
            "numbers, booleans, None, lists and dicts as values"
        ) from error
    assert isinstance(copy, dict)
    return copy


def _require_text_keys(value: Any) -> None:
    """Refuse keys that JSON would quietly turn into text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            _require_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_text_keys(inner)


def check_format(outer: Mapping[str, str] | None) -> None:
    """Refuse a file whose `__metadata__` does not name the format that this module reads."""
    if not outer or KEY not in outer:
        raise ArtifactError("a safetensors file, but not one of probmask")
    if outer[KEY] != str(FORMAT):
        raise ArtifactError(
            f"format {outer[KEY]!r:.40}, where this probmask ({__version__}) reads "
            f"format {FORMAT}; use a version that reads it"
        )


def parse(table: memoryview) -> Header:
    """Return what the compressed table says, each number in its range."""
    try:
        ours = json.loads(_decompressed(table).decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the table is not JSON ({error})") from error
    _require(isinstance(ours, dict), "the table is not an object")
    tensors, aliases, crc32 = (
        _typed(ours, "tensors", list),
        _typed(ours, "aliases", dict),
        _typed(ours, "crc32", dict),
    )
    entries = [_entry(fields) for fields in tensors]
    names = {entry.name for entry in entries}
    _require(len(names) == len(entries), "the table names a tensor twice")
    for alias, target in aliases.items():
        known = isinstance(target, str) and target in names
        new = is_name(alias) and alias not in names
        _require(known and new, f"the alias {alias!r:.80} leads nowhere")
    for key, crc in crc32.items():
        _require(_is_count(crc), f"the crc32 of {key!r:.80} is not a number")
    rounding = _typed(ours, "rounding", dict) if "rounding" in ours else None
    metadata, created_by = _typed(ours, "metadata", dict), _typed(ours, "created_by", str)
    return Header(entries, aliases, crc32, metadata, rounding, created_by)


def _decompressed(table: memoryview) -> bytes:
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(table, LONGEST_TABLE + 1)
    except zlib.error as error:
        raise ArtifactError(f"the table is damaged ({error})") from error
    _require(len(text) <= LONGEST_TABLE, f"the table is longer than {LONGEST_TABLE} bytes")
    _require(stream.eof and not stream.unused_data, "the table is damaged (its end is missing)")
    return text


def _typed(fields: dict[str, Any], key: str, kind: type) -> Any:
    _require(isinstance(fields.get(key), kind), f"the table has no proper {key!r}")
    return fields[key]


def _entry(fields: Any) -> Entry:
    """Return one tensor's entry."""
    named = isinstance(fields, dict) and is_name(fields.get("name"))
    _require(named, "an entry of the table has no name")
    name, dtype, shape, encoding, nnz = (
        fields.get(key) for key in ("name", "dtype", "shape", "encoding", "nnz")
    )
    values, positions = fields.get("values", dtype), fields.get("positions", 0)
    who = f"tensor {name!r:.80}"
    _require(not name.startswith(RESERVED), f"{who}: the name is reserved")
    sizes = isinstance(shape, list) and len(shape) <= 64 and all(map(_is_count, shape))
    _require(sizes, f"{who}: its shape is not a list of up to 64 sizes")
    # Empty tensors too: torch multiplies the sizes for the strides.
    product = math.prod(max(size, 1) for size in shape)
    _require(product <= _LARGEST, f"{who}: its shape multiplies past 2**62")
    _require(isinstance(dtype, str) and dtype in DTYPES, f"{who}: unknown dtype {dtype!r:.40}")
    _require(
        values == dtype or values in ROUNDED.get(dtype, ()),
        f"{who}: {dtype} values stored as {values!r:.40}",
    )
    _require(_is_encoding(encoding, dtype), f"{who}: unknown encoding {encoding!r:.40} for {dtype}")
    counted = _is_count(nnz) and nnz <= math.prod(shape)
    _require(counted, f"{who}: nnz {nnz!r:.40} is not a count of its entries")
    _require(_is_count(positions), f"{who}: positions {positions!r:.40} is not a count of bytes")
    return Entry(name, dtype, tuple(shape), encoding, nnz, values, positions)


def _is_encoding(encoding: Any, dtype: str) -> bool:
    known = isinstance(encoding, str) and encoding in ENCODINGS and dtype in SPARSE_DTYPES
    return encoding == "dense" or known


def is_name(value: Any) -> bool:
    """Whether it is text that UTF-8 can hold, as all names in a safetensors header are."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise ArtifactError(reason)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")
