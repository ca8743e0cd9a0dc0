"""Opening an artifact: everything in the file is checked before it is returned."""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from probmask.errors import ArtifactError
from probmask.storage.encodings import ENCODINGS, require
from probmask.storage.format import (
    FORMAT_KEY,
    FORMATS,
    GRAPH_TENSOR,
    MAX_TABLE_BYTES,
    RESERVED,
    ROUNDED_DTYPES,
    SPARSE_DTYPES,
    TABLE,
    WIDTHS,
    WORDS,
    Bits,
    Entry,
    Header,
    Part,
    StoredGraph,
    checksum,
    decode,
    is_name,
    locate,
    raw,
)
from probmask.storage.integers import INTEGER_DTYPES, INTEGERS
from probmask.version import __version__

# The artifact of a very sparse network can be a thousand times smaller than its dense tensors. A
# file with a larger ratio is only loaded up to this size, unless the caller allows more.
_MAX_DENSE_BYTES = 256 * 2**20
_MAX_DENSE_RATIO = 1024
_MAX_COUNT = 2**62


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in the table of an artifact.

    `nnz` is the number of its non-zero entries, `encoding` that of their positions. `values` is the
    dtype in which they are stored, or ``"int8"`` to ``"int2"``. `stored_bytes` is the size of both.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    nnz: int
    stored_bytes: int
    values: str


@dataclass(frozen=True)
class ArtifactInfo:
    """The header of an artifact; tensors are in the model's order, tied ones appear once.

    `aliases` maps a further name of a tied tensor to the name in `tensors`. `rounding` is None, or
    the effect of `save(values=...)`: `values`, `max_error`, `relative_error`, and `before` and
    `after` if `measure` was passed. `has_graph` says whether `probmask.runtime.load` can run it.
    """

    format: int
    created_by: str
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    aliases: dict[str, str]
    rounding: dict[str, Any] | None
    file_bytes: int
    dense_bytes: int
    has_graph: bool = False


def read(path: str | os.PathLike[str]) -> ArtifactInfo:
    """Return the header of an artifact without reading its tensors.

    Args:
        path: The artifact, a file that `probmask.save` or ``probmask train`` wrote.

    Returns:
        The metadata, one `TensorInfo` for each tensor, and the sizes of the file and of the dense
        tensors in bytes.

    Raises:
        ArtifactError: The file does not exist or is not an intact artifact.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch, probmask
        >>> with TemporaryDirectory() as folder:
        ...     path = f"{folder}/model.safetensors"
        ...     saved = probmask.save(torch.nn.Linear(4, 2), path, metadata={"note": "mine"})
        ...     info = probmask.read(path)
        >>> info.metadata, [(row.name, row.shape) for row in info.tensors]
        ({'note': 'mine'}, [('weight', (2, 4)), ('bias', (2,))])
    """
    with open_artifact(path) as artifact:
        return artifact.info


@contextmanager
def open_artifact(path: str | os.PathLike[str]) -> Iterator["Reader"]:
    """Open the file and check its table. Raise `ArtifactError` for any fault of the file."""
    path = Path(path)
    try:
        _check_regular(path)
        # Checks the container: its header, and that the stored tensors cover the data.
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
        yield Reader(path, metadata)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path}: not an intact safetensors file ({error})") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error


def _check_regular(path: Path) -> None:
    """Raise unless it is a regular file: opening a pipe would block."""
    if path.is_file():
        return
    if path.is_dir():
        inside = path / "model.safetensors"
        raise ArtifactError(f"a directory{f'; pass {inside}' if inside.is_file() else ''}")
    raise ArtifactError("not a file" if path.exists() else "no such file")


class Reader:
    """An open artifact whose table matches the tensors in the file."""

    def __init__(self, path: Path, metadata: Mapping[str, str] | None) -> None:
        version = _checked_format(metadata)
        self._file = _File(path)
        stored = dict(self._file.shapes)
        dtype, shape = stored.pop(TABLE, ("", ()))
        if dtype != "U8" or len(shape) != 1:
            raise ArtifactError("the file has no table")
        header = _parse_table(raw(self._file.words(TABLE)))
        if version == "1" and any(entry.has_integers for entry in header.entries):
            raise ArtifactError("a file of format 1 has values stored as integers")
        require(header.graph is None or version >= "3", f"a file of format {version} has a graph")
        # The entries of the table by name, with those that only the graph needs.
        self.entries = {entry.name: entry for entry in header.all_entries}
        # The graph of the network, not checked yet.
        self.network = None if header.graph is None else header.graph.network
        self._places = locate((part for e in header.all_entries for part in e.parts), stored)
        if header.crc32.keys() != stored.keys():
            raise ArtifactError("the table does not have one crc32 for each stored tensor")
        self._crc32 = header.crc32
        self._packs: dict[str, Bits] = {}
        self.info = ArtifactInfo(
            format=int(version),
            created_by=header.created_by,
            metadata=header.metadata,
            tensors=tuple(
                TensorInfo(e.name, e.shape, e.dtype, e.encoding, e.nnz, e.stored_bytes, e.values)
                for e in header.entries
            ),
            aliases=header.aliases,
            rounding=header.rounding,
            file_bytes=self._file.size,
            dense_bytes=sum(entry.dense_bytes for entry in header.all_entries),
            has_graph=header.graph is not None,
        )

    def words(self, name: str) -> Bits:
        """Return the bits of one tensor, dense, in its shape.

        A large tensor stored dense is memory-mapped, not copied. Writing to it does not change the
        file.
        """
        entry = self.entries[name]
        try:
            words = decode(entry, [self._part(part) for part in entry.parts])
        except ArtifactError as error:
            raise ArtifactError(f"tensor {name!r:.80}: {error}") from error
        except MemoryError as error:
            size = entry.dense_bytes
            raise ArtifactError(f"tensor {name!r:.80}: no memory for its {size} bytes") from error
        # A view would keep the whole pack in memory.
        whole = entry.encoding == "dense" and not entry.has_integers
        packed = whole and self._places[name].begin is not None
        return words.copy() if packed else words

    def _part(self, part: Part) -> Bits:
        key, begin = self._places[part.name]
        if begin is None:
            return self._checked(key)
        if key not in self._packs:
            self._packs[key] = self._checked(key)
        return self._packs[key][begin : begin + part.numel].reshape(part.shape)

    def _checked(self, key: str) -> Bits:
        words = self._file.words(key)
        if checksum(words) != self._crc32[key]:
            raise ArtifactError(f"the checksum of {key!r:.90} does not match: the data is damaged")
        return words


class _File:
    """A safetensors file in memory: the bits of its tensors, whatever their dtype."""

    def __init__(self, path: Path) -> None:
        self.size = path.stat().st_size
        try:
            data = np.memmap(path, np.uint8, "c")
        except (ValueError, OverflowError) as error:
            raise ArtifactError(f"cannot be mapped into memory ({error})") from error
        self._start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        fields = json.loads(data[8 : self._start].tobytes())
        fields.pop("__metadata__", None)
        self._data = np.asarray(data)  # a plain array, which refers to the mapped file
        self._places = {key: tensor["data_offsets"] for key, tensor in fields.items()}
        # Dtype and shape of each stored tensor.
        self.shapes = {key: (v["dtype"], tuple(v["shape"])) for key, v in fields.items()}

    def words(self, key: str) -> Bits:
        """Return the entries of a stored tensor as integers of the same width."""
        dtype, shape = self.shapes[key]
        begin, end = (self._start + offset for offset in self._places[key])
        width = WIDTHS[dtype]
        if begin % width:
            raise ArtifactError(f"the data of {key!r:.90} is not aligned")
        return self._data[begin:end].view(WORDS[width]).reshape(shape)


def check_dense_size(info: ArtifactInfo, max_bytes: int | None) -> None:
    """Raise if a small file contains a huge network, before any memory is allocated for it."""
    limit = max(_MAX_DENSE_BYTES, _MAX_DENSE_RATIO * info.file_bytes)
    if info.dense_bytes > (limit if max_bytes is None else max_bytes):
        raise ArtifactError(
            f"the file has {info.file_bytes} bytes, but its tensors take {info.dense_bytes}; if "
            f"you trust it, pass max_bytes={info.dense_bytes}."
        )


def _checked_format(metadata: Mapping[str, str] | None) -> str:
    """Return the version in the `__metadata__` of a safetensors header, if it is read here."""
    if not metadata or FORMAT_KEY not in metadata:
        raise ArtifactError("a safetensors file, but not a probmask artifact")
    if metadata[FORMAT_KEY] not in FORMATS:
        raise ArtifactError(
            f"format {metadata[FORMAT_KEY]!r:.40} is not supported: probmask {__version__} reads "
            f"formats {', '.join(FORMATS[:-1])} and {FORMATS[-1]}; install a version that reads "
            "this file."
        )
    return metadata[FORMAT_KEY]


def _parse_table(table: memoryview) -> Header:
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
    graph = _graph(_typed(fields, "graph", dict)) if "graph" in fields else None
    return Header(entries, aliases, crc32, metadata, rounding, graph, created_by)


def _graph(fields: dict[str, Any]) -> StoredGraph:
    """Return the graph with its tensors; `probmask.runtime.load` checks the network itself."""
    version = fields.get("version")
    require(version == 1, f"the graph has version {version!r:.40}, but only 1 is known")
    entries = [_entry(tensor, GRAPH_TENSOR) for tensor in _typed(fields, "tensors", list)]
    names = {entry.name for entry in entries}
    require(len(names) == len(entries), "the graph names a tensor twice")
    return StoredGraph(_typed(fields, "network", dict), entries)


def _decompressed(table: memoryview) -> bytes:
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(table, MAX_TABLE_BYTES + 1)
    except zlib.error as error:
        raise ArtifactError(f"the table is damaged ({error})") from error
    require(len(text) <= MAX_TABLE_BYTES, f"the table is longer than {MAX_TABLE_BYTES} bytes")
    require(stream.eof and not stream.unused_data, "the table is damaged (its end is missing)")
    return text


def _typed(fields: dict[str, Any], key: str, kind: type) -> Any:
    require(isinstance(fields.get(key), kind), f"the table has no valid {key!r}")
    return fields[key]


def _entry(fields: Any, prefix: str = "") -> Entry:
    """Return the entry of one tensor. Only names with a prefix may be reserved ones."""
    named = isinstance(fields, dict) and is_name(fields.get("name"))
    require(named, "an entry of the table has no name")
    name, dtype, shape, encoding, nnz = (
        fields.get(key) for key in ("name", "dtype", "shape", "encoding", "nnz")
    )
    values = fields.get("values", dtype)
    positions, coded = fields.get("positions", 0), fields.get("coded", 0)
    where = f"tensor {name!r:.80}"
    if prefix:
        require(name.startswith(prefix), f"{where}: its name does not start with {prefix}")
    else:
        require(not name.startswith(RESERVED), f"{where}: the name is reserved")
    sizes = isinstance(shape, list) and len(shape) <= 64 and all(map(_is_count, shape))
    require(sizes, f"{where}: its shape is not a list of up to 64 sizes")
    # Checked for empty tensors too: PyTorch multiplies the sizes to compute the strides.
    product = math.prod(max(size, 1) for size in shape)
    require(product <= _MAX_COUNT, f"{where}: the product of its shape exceeds 2**62")
    require(isinstance(dtype, str) and dtype in WIDTHS, f"{where}: unknown dtype {dtype!r:.40}")
    integers = isinstance(values, str) and values in INTEGERS and dtype in INTEGER_DTYPES
    require(
        values == dtype or values in ROUNDED_DTYPES.get(dtype, ()) or integers,
        f"{where}: {dtype} values cannot be stored as {values!r:.40}",
    )
    known = _is_encoding(encoding, dtype)
    require(known, f"{where}: unknown encoding {encoding!r:.40} for {dtype}")
    counted = _is_count(nnz) and nnz <= math.prod(shape)
    require(counted, f"{where}: nnz {nnz!r:.40} is not a valid number of entries")
    sized = _is_count(positions)
    require(sized, f"{where}: positions {positions!r:.40} is not a valid number of bytes")
    require(_is_count(coded), f"{where}: coded {coded!r:.40} is not a valid number of bytes")
    if integers:
        countable = len(shape) > 0 and nnz > 0
        require(countable, f"{where}: a tensor without dimensions or values has no integers")
        filled = encoding != "dense" or nnz == math.prod(shape)
        require(filled, f"{where}: dense integers, but nnz {nnz} is not the number of its entries")
    return Entry(name, dtype, tuple(shape), encoding, nnz, values, positions, coded)


def _is_encoding(encoding: Any, dtype: str) -> bool:
    sparse = isinstance(encoding, str) and encoding in ENCODINGS and dtype in SPARSE_DTYPES
    return encoding == "dense" or sparse


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
