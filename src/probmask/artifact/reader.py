"""Open an artifact, and hand out nothing that has not been checked."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from probmask.artifact.format import FORMAT, Entry, check_backed, decode
from probmask.artifact.header import parse
from probmask.errors import ArtifactError


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
    """What a file says of itself; tensors in the model's order, shared ones once."""

    format: int
    created_by: str
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    aliases: dict[str, str]
    file_bytes: int
    dense_bytes: int


@contextmanager
def open_artifact(path: str | os.PathLike[str]) -> Iterator["Reader"]:
    """Open the file with its header checked; what is wrong with it is an ArtifactError."""
    path = Path(path)
    # Anything but a plain file is refused unopened: a pipe would keep us waiting.
    if not path.is_file():
        raise ArtifactError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    try:
        with safe_open(path, framework="pt") as file:
            yield Reader(file, path.stat().st_size)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path}: not an intact safetensors file ({error})") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error


class Reader:
    """An open artifact whose header agrees with the tensors in the file."""

    def __init__(self, file: Any, file_bytes: int) -> None:
        header = parse(file.metadata())
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        unclaimed = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
        rows = [_claim(name, entry, unclaimed) for name, entry in header.entries.items()]
        if unclaimed:
            raise ArtifactError(f"tensor {min(unclaimed)!r:.80}: the header does not know it")
        self._file, self._entries = file, header.entries
        self.info = ArtifactInfo(
            format=FORMAT,
            created_by=header.created_by,
            metadata=header.metadata,
            tensors=tuple(rows),
            aliases=header.aliases,
            file_bytes=file_bytes,
            dense_bytes=sum(entry.numel * entry.itemsize for entry in header.entries.values()),
        )

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, dense; one that is stored so is mapped rather than copied."""
        entry = self._entries[name]
        suffixes = [""] if entry.encoding == "dense" else [".values", ".positions"]
        try:
            return decode(entry, {suffix: self._aligned(name + suffix) for suffix in suffixes})
        except ArtifactError as error:
            raise ArtifactError(f"tensor {name!r:.80}: {error}") from error
        except MemoryError as error:
            size = entry.numel * entry.itemsize
            raise ArtifactError(f"tensor {name!r:.80}: no memory for its {size} bytes") from error

    def _aligned(self, key: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(key)
        if tensor.data_ptr() % tensor.dtype.itemsize:
            raise ArtifactError("its data is not aligned")
        return tensor


def _claim(name: str, entry: Entry, unclaimed: dict[str, Any]) -> TensorInfo:
    """Take a tensor's parts out of `unclaimed`, each of the dtype and shape that it must have."""
    if entry.encoding == "dense":
        parts, size = {name: (entry.dtype, entry.shape)}, entry.numel * entry.itemsize
    else:
        values, positions = name + ".values", name + ".positions"
        _, shape = unclaimed.get(positions, ("", ()))
        length = shape[0] if len(shape) == 1 else 0
        parts = {values: (entry.dtype, (entry.nnz,)), positions: ("U8", (length,))}
        size = entry.nnz * entry.itemsize + length
    for key, expected in parts.items():
        if unclaimed.pop(key, None) != expected:
            raise ArtifactError(f"tensor {name!r:.80}: {key!r:.90} is not there as the header says")
    if entry.encoding != "dense":
        check_backed(name, entry, length)
    return TensorInfo(name, entry.shape, entry.dtype, entry.encoding, entry.nnz, size)
