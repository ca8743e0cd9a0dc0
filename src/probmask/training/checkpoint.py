"""Checkpoints: nested state in one safetensors file, written atomically and read without pickle.

Tensors are the file's tensors; everything else is JSON in its header. A digest over both detects
a damaged file before any of it is used. The format is our own because `torch.save` writes pickle,
and no file that probmask reads may contain pickle.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from probmask.errors import CheckpointError
from probmask.files import write_atomically

_FORMAT = "probmask-checkpoint-2"
_SCALARS = (str, int, float, bool, type(None))


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested dicts, lists and tuples of numbers, strings and tensors to ``path``.

    Raises:
        TypeError: ``state`` contains another type.
        OSError: The file cannot be written. A previous checkpoint at ``path`` stays intact.
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_encode(state, tensors), allow_nan=True)
    metadata = {"format": _FORMAT, "state": tree, "digest": _digest(tree, tensors)}
    write_atomically(path, save(tensors, metadata=metadata), overwrite=True)


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
        raise _damaged(path, str(error)) from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path}: is not a checkpoint of this version of probmask; resume with the version "
            "that wrote it, or start a new run with another --out."
        )
    if metadata.get("digest") != _digest(metadata.get("state", ""), tensors):
        raise _damaged(path, "its digest does not match its content")
    # Copy: the tensors are mapped from a file that the next checkpoint replaces.
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    state: dict[str, Any] = _decode(json.loads(metadata["state"]), copies)
    return state


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the checkpoint is damaged ({reason}); restore it from a copy, or start a new run "
        "with another --out."
    )


def _digest(tree: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(tree.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state as JSON values; an object with one key stands for each non-JSON type."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, tensors) for item in value]}
    raise TypeError(f"a checkpoint cannot store a {type(value).__name__}")


def _decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    decoders: dict[str, Callable[[], Any]] = {
        "tensor": lambda: tensors[content],
        "dict": lambda: {_decode(k, tensors): _decode(v, tensors) for k, v in content},
        "list": lambda: [_decode(item, tensors) for item in content],
        "tuple": lambda: tuple(_decode(item, tensors) for item in content),
    }
    return decoders[kind]()
