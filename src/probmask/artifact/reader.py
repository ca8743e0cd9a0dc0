"""Open an artifact, and hand out nothing that has not been checked."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from probmask.artifact.format import FORMAT, Part, decode, raw
from probmask.artifact.header import TABLE, check_format, checksum, parse
from probmask.artifact.packing import locate
from probmask.errors import ArtifactError

# A very sparse network is a thousand times smaller than its dense tensors; a file that claims more
# is taken at its word only up to this size.
UNPACKED_BYTES = 256 * 2**20
UNPACKED_RATIO = 1024


@dataclass(frozen=True)
class TensorInfo:
    """One row of an artifact's table."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    nnz: int
    stored_bytes: int


@dataclass(frozen=True)
class ArtifactInfo:
    """What a file says of itself; tensors in the model's order, shared ones once.

    `rounding` is None, or what `save(values=...)` changed: `values`, `max_error`,
    `relative_error`, and `before` and `after` if it was asked to `measure`.
    """

    format: int
    created_by: str
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    aliases: dict[str, str]
    rounding: dict[str, Any] | None
    file_bytes: int
    dense_bytes: int


@contextmanager
def open_artifact(path: str | os.PathLike[str]) -> Iterator["Reader"]:
    """Open the file with its table checked; what is wrong with it is an ArtifactError."""
    path = Path(path)
    try:
        with _opened(path) as file:
            yield Reader(file, path.stat().st_size)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path}: not an intact safetensors file ({error})") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error


def _opened(path: Path) -> Any:
    # Anything but a plain file is refused unopened: a pipe would keep us waiting.
    if not path.is_file():
        raise ArtifactError("not a file" if path.exists() else "no such file")
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:  # PyTorch's, of a file larger than the memory that it may map
        raise ArtifactError(f"cannot be mapped ({error})") from error


class Reader:
    """An open artifact whose table agrees with the tensors in the file."""

    def __init__(self, file: Any, file_bytes: int) -> None:
        check_format(file.metadata())
        self._file = file
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        stored = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
        dtype, shape = stored.pop(TABLE, ("", ()))
        if dtype != "U8" or len(shape) != 1:
            raise ArtifactError("the file has no table")
        header = parse(raw(self._aligned(TABLE)))
        self._entries = {entry.name: entry for entry in header.entries}
        self._places = locate((part for e in header.entries for part in e.parts), stored)
        if header.crc32.keys() != stored.keys():
            raise ArtifactError("the table does not have one crc32 for each stored tensor")
        self._crc32 = header.crc32
        self._packs: dict[str, Tensor] = {}
        self.info = ArtifactInfo(
            format=FORMAT,
            created_by=header.created_by,
            metadata=header.metadata,
            tensors=tuple(
                TensorInfo(e.name, e.shape, e.dtype, e.encoding, e.nnz, e.stored_bytes)
                for e in header.entries
            ),
            aliases=header.aliases,
            rounding=header.rounding,
            file_bytes=file_bytes,
            dense_bytes=sum(entry.dense_bytes for entry in header.entries),
        )

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, dense; a large one that is stored so is mapped, not copied."""
        entry = self._entries[name]
        try:
            tensor = decode(entry, [self._part(part) for part in entry.parts])
        except ArtifactError as error:
            raise ArtifactError(f"tensor {name!r:.80}: {error}") from error
        except MemoryError as error:
            size = entry.dense_bytes
            raise ArtifactError(f"tensor {name!r:.80}: no memory for its {size} bytes") from error
        # What is kept of the network must not keep a whole pack.
        packed = entry.encoding == "dense" and self._places[name].begin is not None
        return tensor.clone() if packed else tensor

    def _part(self, part: Part) -> Tensor:
        key, begin = self._places[part.name]
        if begin is None:
            return self._checked(key)
        if key not in self._packs:
            self._packs[key] = self._checked(key)
        return self._packs[key][begin : begin + part.numel].reshape(part.shape)

    def _checked(self, key: str) -> Tensor:
        tensor = self._aligned(key)
        if checksum(tensor) != self._crc32[key]:
            raise ArtifactError(f"the checksum of {key!r:.90} does not match: the data is damaged")
        return tensor

    def _aligned(self, key: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(key)
        if tensor.data_ptr() % tensor.dtype.itemsize:
            raise ArtifactError(f"the data of {key!r:.90} is not aligned")
        return tensor


def check_unpacked_size(info: ArtifactInfo, max_bytes: int | None) -> None:
    """Refuse a small file that claims a huge network, before anything is allocated for it."""
    limit = max(UNPACKED_BYTES, UNPACKED_RATIO * info.file_bytes)
    if info.dense_bytes > (limit if max_bytes is None else max_bytes):
        raise ArtifactError(
            f"{info.file_bytes} bytes claim to be a network of {info.dense_bytes}; if you trust "
            f"the file, pass max_bytes={info.dense_bytes}"
        )
