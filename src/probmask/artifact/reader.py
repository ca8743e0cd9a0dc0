"""Opening an artifact: everything in the file is checked before it is returned."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from probmask.artifact.format import FORMAT, Part, decode, locate, raw
from probmask.artifact.header import TABLE, check_format, checksum, parse_table
from probmask.errors import ArtifactError

# The artifact of a very sparse network can be a thousand times smaller than its dense tensors. A
# file with a larger ratio is only loaded up to this size, unless the caller allows more.
_MAX_DENSE_BYTES = 256 * 2**20
_MAX_DENSE_RATIO = 1024


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in the table of an artifact.

    `nnz` is the number of entries with a bit set; unlike in PyTorch, -0.0 is one of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    nnz: int
    stored_bytes: int


@dataclass(frozen=True)
class ArtifactInfo:
    """The header of an artifact; tensors are in the model's order, tied ones appear once.

    `aliases` maps a further name of a tied tensor to the name in `tensors`. `rounding` is None, or
    the effect of `save(values=...)`: `values`, `max_error`, `relative_error`, and `before` and
    `after` if `measure` was passed.
    """

    format: int
    created_by: str
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    aliases: dict[str, str]
    rounding: dict[str, Any] | None
    file_bytes: int
    dense_bytes: int


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
        with _opened(path) as file:
            yield Reader(file, path.stat().st_size)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path}: not an intact safetensors file ({error})") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error


def _opened(path: Path) -> Any:
    # Only regular files are opened: opening a pipe would block.
    if not path.is_file():
        raise ArtifactError("not a file" if path.exists() else "no such file")
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:  # from PyTorch, for a file too large to map
        raise ArtifactError(f"cannot be mapped into memory ({error})") from error


class Reader:
    """An open artifact whose table matches the tensors in the file."""

    def __init__(self, file: Any, file_bytes: int) -> None:
        check_format(file.metadata())
        self._file = file
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        stored = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
        dtype, shape = stored.pop(TABLE, ("", ()))
        if dtype != "U8" or len(shape) != 1:
            raise ArtifactError("the file has no table")
        header = parse_table(raw(self._aligned(TABLE)))
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
        """Return one tensor, dense. A large tensor stored dense is memory-mapped, not copied."""
        entry = self._entries[name]
        try:
            tensor = decode(entry, [self._part(part) for part in entry.parts])
        except ArtifactError as error:
            raise ArtifactError(f"tensor {name!r:.80}: {error}") from error
        except MemoryError as error:
            size = entry.dense_bytes
            raise ArtifactError(f"tensor {name!r:.80}: no memory for its {size} bytes") from error
        # A view would keep the whole pack in memory.
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


def check_dense_size(info: ArtifactInfo, max_bytes: int | None) -> None:
    """Raise if a small file contains a huge network, before any memory is allocated for it."""
    limit = max(_MAX_DENSE_BYTES, _MAX_DENSE_RATIO * info.file_bytes)
    if info.dense_bytes > (limit if max_bytes is None else max_bytes):
        raise ArtifactError(
            f"the file has {info.file_bytes} bytes, but its tensors take {info.dense_bytes}; if "
            f"you trust it, pass max_bytes={info.dense_bytes}."
        )
