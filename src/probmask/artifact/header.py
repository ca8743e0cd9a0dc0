"""The header of an artifact: its text when written, its meaning when read, nothing taken on trust.

A safetensors file is the length of its header (8 bytes), the header (JSON) and the data. The
header's `__metadata__` carries ours as text under `probmask`, and the checksum of that text.
"""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from probmask.artifact.format import DTYPE_NAMES, DTYPES, ENCODINGS, FORMAT, SPARSE_DTYPES, Entry
from probmask.errors import ArtifactError, InputError
from probmask.version import __version__

KEY, CRC_KEY = "probmask", "probmask_crc32"
LONGEST = 100_000_000  # bytes of header that safetensors readers accept
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Header:
    """What an artifact says of its tensors, in the model's order, and of its origin."""

    entries: dict[str, Entry]
    aliases: dict[str, str]  # a second name of a tensor -> the name it is stored under
    metadata: dict[str, Any]
    created_by: str = f"probmask {__version__}"


def container_start(header: Header, parts: Mapping[str, Tensor]) -> bytes:
    """Return what precedes the data of `parts`, which are stored in the order given."""
    ours = _text(header)
    fields: dict[str, Any] = {"__metadata__": {KEY: ours, CRC_KEY: _crc(ours)}}
    offset = 0
    for name, part in parts.items():
        end = offset + part.nbytes
        dtype, shape = DTYPE_NAMES[part.dtype], list(part.shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = _to_json(fields).encode()
    text += b" " * (-len(text) % 8)  # so that all data is aligned
    if len(text) > LONGEST:
        raise InputError(
            f"save(model): the header is {len(text)} bytes long, safetensors allows {LONGEST}; "
            "put less into metadata"
        )
    return len(text).to_bytes(8, "little") + text


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


def _text(header: Header) -> str:
    return _to_json(
        {
            "format": FORMAT,
            "created_by": header.created_by,
            "tensors": {name: vars(entry) for name, entry in header.entries.items()},
            "aliases": header.aliases,
            "metadata": header.metadata,
        }
    )


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def parse(outer: Mapping[str, str] | None) -> Header:
    """Return the header that a safetensors file's `__metadata__` spells out."""
    if not outer or KEY not in outer:
        raise ArtifactError("a safetensors file, but not one of probmask")
    if outer.get(CRC_KEY) != _crc(outer[KEY]):
        raise ArtifactError("the header's checksum does not match: the file is damaged")
    try:
        ours = json.loads(outer[KEY], parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the header is not JSON ({error})") from error
    _require(isinstance(ours, dict), "the header is not an object")
    if ours.get("format") != FORMAT:
        raise ArtifactError(
            f"format {ours.get('format')!r:.40}, where this probmask ({__version__}) reads "
            f"format {FORMAT}; use a version that reads it"
        )
    tensors, aliases, metadata, created_by = (
        _typed(ours, "tensors", dict),
        _typed(ours, "aliases", dict),
        _typed(ours, "metadata", dict),
        _typed(ours, "created_by", str),
    )
    entries = {name: _entry(name, raw) for name, raw in tensors.items()}
    for alias, target in aliases.items():
        stored = isinstance(target, str) and target in entries
        _require(stored and alias not in entries, f"the alias {alias!r:.80} leads nowhere")
    return Header(entries, aliases, metadata, created_by)


def _typed(ours: dict[str, Any], key: str, kind: type) -> Any:
    _require(isinstance(ours.get(key), kind), f"the header has no proper {key!r}")
    return ours[key]


def _entry(name: str, raw: Any) -> Entry:
    """Return one tensor's entry, with every number in its range."""
    who = f"tensor {name!r:.80}"
    _require(isinstance(raw, dict), f"{who}: its entry is not an object")
    shape, dtype, encoding, nnz, crc32 = (
        raw.get(key) for key in ("shape", "dtype", "encoding", "nnz", "crc32")
    )
    sizes = isinstance(shape, list) and all(_is_count(size) for size in shape)
    _require(sizes, f"{who}: its shape is not a list of sizes")
    # Empty tensors too: torch multiplies the sizes for the strides.
    _require(
        math.prod(max(size, 1) for size in shape) <= _LARGEST,
        f"{who}: its shape multiplies past 2**63",
    )
    _require(isinstance(dtype, str) and dtype in DTYPES, f"{who}: unknown dtype {dtype!r:.40}")
    _require(
        encoding in ENCODINGS and (encoding == "dense" or dtype in SPARSE_DTYPES),
        f"{who}: unknown encoding {encoding!r:.40} for {dtype}",
    )
    counted = _is_count(nnz) and nnz <= math.prod(shape)
    _require(counted, f"{who}: nnz {nnz!r:.40} is not a count of its entries")
    _require(_is_count(crc32), f"{who}: its crc32 is not a number")
    return Entry(tuple(shape), dtype, encoding, nnz, crc32)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise ArtifactError(reason)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")
