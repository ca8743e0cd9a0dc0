"""Read a sparsifier's state from a checkpoint of ``torch.distributed.checkpoint``.

That library loads into tensors that exist. A new sparsifier does not have all tensors of a saved
one yet, such as momenta and final masks. They are created from the checkpoint's own list of
tensors, sharded as the weights are now, whatever the number of ranks that saved them.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from probmask.errors import InputError
from probmask.masking.distributed import running
from probmask.masking.sharding import is_dtensor, whole_like


def read_state(path: str | os.PathLike[str], key: str, weights: Sequence[Any]) -> dict[str, Any]:
    """Return the state saved under ``key``; tensors with the shape of a weight are sharded like it.

    Raises:
        InputError: If the directory is not such a checkpoint, or has nothing under this key.
    """
    reader = FileSystemReader(path)
    try:
        metadata = reader.read_metadata()
    except OSError as error:
        raise InputError(
            f"load_distributed({str(path)!r}): not a directory that torch.distributed.checkpoint "
            "has saved."
        ) from error
    places = {
        name: place for name, place in (metadata.planner_data or {}).items() if place[0] == key
    }
    if not places:
        raise InputError(
            f"load_distributed({str(path)!r}, key={key!r}): the checkpoint has no such key; save "
            f"{{{key!r}: sparsifier.state_dict()}} with torch.distributed.checkpoint.save."
        )
    values = {name: _empty(metadata.state_dict_metadata[name], weights) for name in places}
    with warnings.catch_warnings():
        # PyTorch warns a single process that there are no other ranks, which is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(values, storage_reader=reader, no_dist=not running())
    state: dict[str, Any] = _nested(values, places)[key]
    return _completed(state)


def _empty(saved: Any, weights: Sequence[Any]) -> Any:
    """Return what a saved value is loaded into."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return empty_like_weight(saved.size, saved.properties.dtype, weights)


def empty_like_weight(shape: torch.Size, dtype: torch.dtype, weights: Sequence[Any]) -> Tensor:
    """Return a tensor without values, divided like the weights of this shape if there are some."""
    like = next((weight for weight in weights if weight.shape == shape), None)
    if like is None or not is_dtensor(like):
        return torch.empty(shape, dtype=dtype, device=weights[0].device if weights else None)
    rows: Tensor = like._local_tensor
    return whole_like(torch.empty_like(rows, dtype=dtype, requires_grad=False), like)


def _nested(values: Mapping[str, Any], places: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the values as nested dictionaries and lists; a number in a place indexes a list."""
    root: dict[Any, Any] = {}
    for name, place in places.items():
        inside = root
        for step in place[:-1]:
            inside = inside.setdefault(step, {})
        inside[place[-1]] = values[name]
    return dict(_with_lists(root))


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {step: _with_lists(item) for step, item in value.items()}
    if inner and all(isinstance(step, int) for step in inner):
        return [inner[step] for step in sorted(inner)]
    return inner


def _completed(state: dict[str, Any]) -> dict[str, Any]:
    """Add the empty dictionaries that are not saved; keys of optimizer states are numbers."""
    method = {"values": {}, **state.get("method", {})}
    method["sites"] = [{"mask": None, "values": {}, **site} for site in method.get("sites", [])]
    trainables = [
        {**group, "state": {int(index): item for index, item in group.get("state", {}).items()}}
        for group in state.get("trainables", [])
    ]
    return {**state, "method": method, "trainables": trainables}
