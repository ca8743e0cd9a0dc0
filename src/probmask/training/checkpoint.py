"""Checkpoints: nested state in one safetensors file, written atomically and read without pickle.

Tensors and long texts are the file's tensors; everything else is JSON in its header. A digest over
both detects a damaged file before any of it is used. It does not protect from a forged file, so the
types of the decoded state must be checked too (`checkpoint_schema`). The format is our own because
`torch.save` writes pickle, and no file that probmask reads may contain pickle.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from probmask.errors import CheckpointError
from probmask.files import write_atomically
from probmask.messages import one_line

_FORMAT = "probmask-checkpoint-3"
_SCALARS = (str, int, float, bool, type(None))
_LONG_TEXT = 1000  # characters; safetensors limits the size of the header
_MAX_DEPTH = 50  # of nested containers


@dataclass(frozen=True)
class StoredRows:
    """A tensor whose rows the ranks have stored in other files (`shard_files`).

    ``directory`` is next to the checkpoint, and ``digest`` is that of all files in it.
    """

    directory: str
    digest: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def with_digest(self, digest: str) -> Self:
        """Return the same tensor in files with this digest."""
        return replace(self, digest=digest)


def map_stored_rows(value: Any, fn: Callable[[StoredRows], Any]) -> Any:
    """Return a nested state with ``fn`` applied to all `StoredRows` in it."""
    if isinstance(value, StoredRows):
        return fn(value)
    if isinstance(value, dict):
        return {key: map_stored_rows(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_stored_rows(item, fn) for item in value)
    return value


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested dicts, lists and tuples of numbers, strings and tensors to ``path``.

    Tensors may be `StoredRows`.

    Raises:
        TypeError: ``state`` contains another type.
        OSError: The file cannot be written. A previous checkpoint at ``path`` stays intact.
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_encode(state, tensors), allow_nan=True)
    metadata = {"format": _FORMAT, "state": tree, "digest": _digest(tree, tensors)}
    write_atomically(path, save(tensors, metadata=metadata), overwrite=True)


def check_storable(state: Mapping[str, Any]) -> None:
    """Raise `TypeError` for a state that `write_checkpoint` cannot write."""
    _encode(state, {})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state that `write_checkpoint` wrote.

    Raises:
        CheckpointError: The file is missing, damaged, or not a checkpoint.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise damaged(path, str(error)) from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path}: is not a checkpoint of this version of probmask; resume with the version "
            "that wrote it, or start a new run with another --out."
        )
    if metadata.get("digest") != _digest(metadata.get("state", ""), tensors):
        raise damaged(path, "its digest does not match its content")
    try:
        # Copy: the tensors are mapped from a file that the next checkpoint replaces.
        copies = {name: _plain_copy(tensor) for name, tensor in tensors.items()}
        state = _decode(json.loads(metadata.get("state", "")), copies)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its content cannot be decoded: {one_line(error)}") from error
    if not isinstance(state, dict):
        raise damaged(path, "its content is not a table")
    return state


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a checkpoint that cannot be read."""
    return CheckpointError(
        f"{path}: the checkpoint is damaged ({reason}); restore it from a copy, or start a new run "
        "with another --out."
    )


def _plain_copy(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        raise ValueError("a truth value is neither 0 nor 1")  # the result would be undefined
    return tensor.clone()


def _digest(tree: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(tree.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state as JSON values; an object with one key stands for each non-JSON type."""
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        content = torch.frombuffer(
            bytearray(value.encode(errors="surrogatepass")), dtype=torch.uint8
        )
        return {"text": _encode(content, tensors)["tensor"]}
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, StoredRows):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"rows": [value.directory, value.digest, value.name, list(value.shape), dtype]}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, tensors) for item in value]}
    raise TypeError(f"a checkpoint cannot store a {type(value).__name__}")


def _decode(tree: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """Return the state that `_encode` encoded; raise ValueError if it did not."""
    if not isinstance(tree, dict):
        if not isinstance(tree, _SCALARS):
            raise ValueError(f"expected a value, found a {type(tree).__name__}")
        return tree
    if len(tree) != 1 or depth > _MAX_DEPTH:
        raise ValueError("its nesting is wrong")
    ((kind, content),) = tree.items()
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ValueError(f"{kind!r:.50} is not a type of value")
    return decoder(content, tensors, depth + 1)


def _decode_tensor(name: Any, tensors: Mapping[str, Tensor], _: int) -> Tensor:
    if not isinstance(name, str) or name not in tensors:
        raise ValueError(f"tensor {name!r:.50} is missing")
    return tensors[name]


def _decode_rows(content: Any, _: Mapping[str, Tensor], __: int) -> StoredRows:
    if not isinstance(content, list) or len(content) != 5:
        raise ValueError("expected five fields of a tensor")
    directory, digest, name, shape, dtype = content
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not all(isinstance(text, str) for text in (directory, digest, name)) or not sizes:
        raise ValueError("a field of a tensor has the wrong type")
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r:.50} is not a type of tensor")
    return StoredRows(directory, digest, name, tuple(shape), kind)


def _decode_text(name: Any, tensors: Mapping[str, Tensor], depth: int) -> str:
    content = _decode_tensor(name, tensors, depth)
    if content.dtype != torch.uint8 or content.dim() != 1:
        raise ValueError(f"tensor {name!r:.50} is not a text")
    return content.numpy().tobytes().decode(errors="surrogatepass")


def _decode_list(items: Any, tensors: Mapping[str, Tensor], depth: int) -> list[Any]:
    if not isinstance(items, list):
        raise ValueError("expected a list")
    return [_decode(item, tensors, depth) for item in items]


def _decode_tuple(items: Any, tensors: Mapping[str, Tensor], depth: int) -> tuple[Any, ...]:
    return tuple(_decode_list(items, tensors, depth))


def _decode_dict(items: Any, tensors: Mapping[str, Tensor], depth: int) -> dict[Any, Any]:
    if not isinstance(items, list):
        raise ValueError("expected a list of pairs")
    found: dict[Any, Any] = {}
    for pair in items:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], _SCALARS):
            raise ValueError("expected a pair of key and value")
        found[pair[0]] = _decode(pair[1], tensors, depth)
    return found


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor], int], Any]] = {
    "tensor": _decode_tensor,
    "rows": _decode_rows,
    "text": _decode_text,
    "list": _decode_list,
    "tuple": _decode_tuple,
    "dict": _decode_dict,
}
