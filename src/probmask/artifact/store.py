"""Save a finished network to one file, and get it back bit for bit."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from probmask.artifact.format import DTYPE_NAMES, Entry, bits, encode, raw
from probmask.artifact.header import Header, checked_metadata, container_start
from probmask.artifact.reader import ArtifactInfo, open_artifact
from probmask.errors import ArtifactError, InputError
from probmask.files import write_atomically

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)


def save(
    model: nn.Module,
    path: PathLike,
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write the parameters and persistent buffers of `model` to one safetensors file.

    Equal models and metadata give equal bytes. An existing file is refused unless `overwrite`.
    """
    _refuse_unfinished(model)
    notes = checked_metadata(metadata or {})
    tensors, aliases = _distinct(model.state_dict())
    entries: dict[str, Entry] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # A name that the parts would take from another tensor leaves only the dense encoding.
        free = not {name + ".values", name + ".positions"} & tensors.keys()
        entries[name], parts = encode(tensor.detach().cpu().contiguous(), sparse=free)
        stored |= {name + suffix: part for suffix, part in parts.items()}
    # Wide entries first: then each tensor starts at a multiple of its entries' width.
    ordered = dict(sorted(stored.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    start = container_start(Header(entries, aliases, notes), ordered)
    write_atomically(path, _chunks(start, ordered.values()), overwrite=overwrite)


def _chunks(start: bytes, parts: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield start
    for part in parts:
        yield raw(part)


def _refuse_unfinished(model: nn.Module) -> None:
    """Refuse masks that are still being learned; others' parametrizations are plain tensors."""
    package = __name__.partition(".")[0]
    for prefix, module in model.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        for name, steps in module.parametrizations.items():
            if any(type(step).__module__.partition(".")[0] == package for step in steps):
                where = f"{prefix}.{name}" if prefix else name
                raise InputError(
                    f"save(model): the model is still being sparsified ({where}); "
                    "call sparsifier.finalize() first"
                )


def _distinct(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, by its first name, and the other names of those shared."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for names in _same_memory(state):
        tensors[names[0]] = _storable(names[0], state[names[0]])
        aliases |= dict.fromkeys(names[1:], names[0])
    return tensors, aliases


def _same_memory(state: Mapping[str, Any]) -> list[list[str]]:
    """Return the names in groups that stand for the same memory."""
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        key: Any = name
        if isinstance(value, Tensor) and value.layout == torch.strided and not is_lazy(value):
            where = (value.device, value.data_ptr())
            if value.data_ptr():  # empty and meta tensors have no memory to share
                key = (*where, value.dtype, value.shape, value.stride())
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _storable(name: str, value: Any) -> Tensor:
    plain = isinstance(value, Tensor) and not is_lazy(value) and not value.is_meta
    if not plain or value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
        kind = f"a {value.dtype} tensor" if plain else f"a {type(value).__name__} without data"
        raise InputError(
            f"save(model): {name} is {kind}, which the format cannot hold; "
            "store plain initialised tensors only"
        )
    if name == "__metadata__":
        raise InputError("save(model): safetensors reserves the name __metadata__; rename it")
    assert isinstance(value, Tensor)
    return value


def read(path: PathLike) -> ArtifactInfo:
    """Return what the file says of itself, without reading its tensors."""
    with open_artifact(path) as artifact:
        return artifact.info


def load_state(path: PathLike) -> dict[str, Tensor]:
    """Return the dense state_dict, bit for bit as it was saved.

    Names that shared a tensor get the same tensor object.
    """
    with open_artifact(path) as artifact:
        state = {row.name: artifact.tensor(row.name) for row in artifact.info.tensors}
        return state | {alias: state[name] for alias, name in artifact.info.aliases.items()}


def load_into(model: Model, path: PathLike, *, strict: bool = True) -> Model:
    """Copy the file's tensors into `model` and return it, all of them or, on an error, none.

    With `strict=False` names that only one side knows are passed over. As in PyTorch, values are
    converted to the dtype and device that the model has.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    with open_artifact(path) as artifact:
        stored_as = {row.name: row.name for row in artifact.info.tensors} | artifact.info.aliases
        shapes = {row.name: row.shape for row in artifact.info.tensors}
        if strict:
            _compare_names(own.keys(), stored_as.keys())
        shared = {name: stored for name, stored in stored_as.items() if name in own}
        # Shapes before data: what is decoded is then no larger than the model.
        _compare_shapes(own, {name: shapes[stored] for name, stored in shared.items()})
        tensors = {stored: artifact.tensor(stored) for stored in set(shared.values())}
        state = {name: tensors[stored] for name, stored in shared.items()}
        _require_tied(own, state)
    model.load_state_dict(state, strict=False)
    return model


def _compare_names(own: Iterable[str], stored: Iterable[str]) -> None:
    missing, unexpected = sorted(set(own) - set(stored)), sorted(set(stored) - set(own))
    if missing or unexpected:
        raise ArtifactError(
            f"the model and the file differ: {_first(missing)} missing in the file, "
            f"{_first(unexpected)} unknown to the model; build the model that was saved, "
            "or pass strict=False"
        )


def _first(names: list[str]) -> str:
    """Return how many and the first few."""
    few = ", ".join(name[:80] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} ({few})" if names else "0"


def _compare_shapes(own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [name for name, shape in shapes.items() if tuple(own[name].shape) != shape]
    if wrong:
        name = wrong[0]
        raise ArtifactError(
            f"shapes differ: {name} is {list(shapes[name])} in the file and "
            f"{list(own[name].shape)} in the model; in all {_first(wrong)}; "
            "build the model that was saved"
        )
    for name in shapes:
        if own[name].is_meta:
            raise InputError(f"load_into(model): {name} is on the meta device; call to_empty first")


def _require_tied(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse two tensors for one place: the second would silently replace the first."""
    for first, *others in _same_memory({name: own[name] for name in state}):
        for name in others:
            a, b = state[first], state[name]
            if a is not b and not np.array_equal(bits(a), bits(b)):
                raise ArtifactError(
                    f"{first} and {name} are one tensor in the model but differ in the file; "
                    "build the model that was saved"
                )
