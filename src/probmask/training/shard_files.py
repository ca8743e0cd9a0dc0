"""The files of a checkpoint in which every rank of a sharded network stores its own rows.

``torch.distributed.checkpoint`` writes and reads them, as safetensors, because its usual format
contains pickle. They are in a directory of their own, which the checkpoint refers to. It is written
when all of them are complete, so that an interruption leaves the earlier one. They can be read on
any number of ranks, and under any strategy.
"""

import fnmatch
import hashlib
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from probmask.files import sync_directory
from probmask.masking.distributed import from_first_rank, gathered, rank, running, world_size
from probmask.masking.parametrization import map_tensors
from probmask.masking.sharded_checkpoint import empty_like_weight
from probmask.masking.sharding import is_dtensor, rows_of
from probmask.messages import one_line
from probmask.training.checkpoint import StoredRows, damaged, map_stored_rows
from probmask.training.run_directory import SHARDS

try:
    from torch.distributed.checkpoint.hf_storage import (
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
    )

    _AVAILABLE = True
except ImportError:  # PyTorch before 2.8
    _AVAILABLE = False

_NAME = "checkpoint-{:016x}"
_CHUNK = 2**20  # bytes


def write_rows(state: Any, run: Path) -> tuple[Any, Path] | None:
    """Write the rows of all sharded tensors of a state to a new directory in that of the run.

    All ranks call this together.

    Returns:
        The state, which refers to the files in place of these tensors, and the new directory. None
        if the ranks do not share the directory of the run, or PyTorch is older than 2.8.

    Raises:
        OSError: A rank cannot write its file.
    """
    if not _AVAILABLE:
        return None
    directory = _create_directory(run)
    if directory is None:
        return None
    tensors: dict[str, Any] = {}

    def note(tensor: Any) -> Any:
        if not is_dtensor(tensor):
            return tensor
        name = str(len(tensors))
        tensors[name] = tensor.detach()
        return StoredRows(directory.name, "", name, tuple(tensor.shape), tensor.dtype)

    state = map_tensors(state, note)
    try:
        with _one_error(directory):
            writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
            save(tensors, storage_writer=writer, no_dist=not running())
    except OSError:  # the disk may be full
        if rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    sync_directory(directory)
    digest = _digest(directory)
    return map_stored_rows(state, lambda rows: rows.with_digest(digest)), directory


def read_rows(state: dict[str, Any], path: Path, weights: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a state with the tensors that it refers to, divided like weights of the same shape.

    All ranks call this together. Tensors without such a weight are whole.

    Args:
        state: State that `read_checkpoint` returned.
        path: The checkpoint.
        weights: The parameters of the network, which FSDP2 may have divided.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    found: dict[str, StoredRows] = {}
    map_stored_rows(state, lambda rows: found.setdefault(rows.name, rows))
    if not found:
        return state
    first = next(iter(found.values()))
    if not fnmatch.fnmatchcase(first.directory, SHARDS):
        raise damaged(path, f"{first.directory!r:.50} is not a directory of a checkpoint")
    if not _AVAILABLE:
        raise damaged(path, "its files can only be read with PyTorch 2.8 or newer")
    directory = path.parent / first.directory
    if _digest(directory) != first.digest:
        raise damaged(path, f"the files in {first.directory} do not match their digest")
    tensors: dict[str, Any] = {
        name: empty_like_weight(torch.Size(rows.shape), rows.dtype, weights)
        for name, rows in found.items()
    }
    try:
        with _one_error(directory), warnings.catch_warnings():
            # PyTorch warns a single process that there are no other ranks.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(directory))
            load(tensors, storage_reader=reader, no_dist=not running())
    except OSError as error:
        raise damaged(path, one_line(error)) from error
    if any(gathered(any(map(_is_undefined, tensors.values())))):
        raise damaged(path, "a truth value is neither 0 nor 1")
    return dict(map_stored_rows(state, lambda rows: tensors[rows.name]))


def _create_directory(run: Path) -> Path | None:
    """Let the first rank create a directory; return it if all ranks see it."""
    token = secrets.randbits(63)
    if rank() == 0:
        (run / _NAME.format(token)).mkdir()
    directory = run / _NAME.format(from_first_rank(token))
    if all(gathered(directory.is_dir())):
        return directory
    if rank() == 0:
        directory.rmdir()
    return None


def _digest(directory: Path) -> str:
    """Return a digest over all files, of which each rank reads a part."""
    files = sorted(directory.glob("*.safetensors"))[rank() :: world_size()]
    parts = gathered({file.name: _digest_of(file) for file in files})
    every = {name: digest for part in parts for name, digest in part.items()}
    return hashlib.blake2b(repr(sorted(every.items())).encode(), digest_size=16).hexdigest()


def _digest_of(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
    except OSError:  # all ranks then find that the digests differ
        return ""
    return digest.hexdigest()


def _is_undefined(tensor: Any) -> bool:
    rows = rows_of(tensor)
    return rows.dtype == torch.bool and rows.numel() > 0 and bool(rows.view(torch.uint8).max() > 1)


@contextmanager
def _one_error(directory: Path) -> Iterator[None]:
    """Raise the error of the first rank that failed, on all ranks, as an OSError of its file."""
    try:
        yield
    except CheckpointException as failure:
        number, (error, _) = min(failure.failures.items())
        reason = error.strerror if isinstance(error, OSError) else None
        code = error.errno if isinstance(error, OSError) else None
        text = f"{reason or one_line(error)} (rank {number})"
        raise OSError(code or 0, text, str(directory)) from error
