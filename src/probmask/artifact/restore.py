"""Get a saved network back, bit for bit."""

import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
from torch import Tensor, nn

from probmask.artifact.format import bits
from probmask.artifact.reader import ArtifactInfo, check_unpacked_size, open_artifact
from probmask.artifact.ties import same_memory
from probmask.errors import ArtifactError, InputError

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)


def read(path: PathLike) -> ArtifactInfo:
    """Return what the file says of itself, without reading its tensors."""
    with open_artifact(path) as artifact:
        return artifact.info


def load_state(path: PathLike, *, max_bytes: int | None = None) -> dict[str, Tensor]:
    """Return the dense state_dict, bit for bit as it was saved.

    Names that shared a tensor get the same tensor object. A file whose tensors take more than
    256 MiB and more than 1,024 times its size is refused unless `max_bytes` allows it.
    """
    with open_artifact(path) as artifact:
        check_unpacked_size(artifact.info, max_bytes)
        state = {row.name: artifact.tensor(row.name) for row in artifact.info.tensors}
        return state | {alias: state[name] for alias, name in artifact.info.aliases.items()}


def load_into(model: Model, path: PathLike, *, strict: bool = True) -> Model:
    """Put the file's tensors into `model` and return it, all of them or, on an error, none.

    With `strict=False` names that only one side knows are passed over. As in PyTorch, values are
    converted to the dtype and device that the model has. A model on the meta device, which has no
    data yet, takes the tensors themselves, with the dtypes of the file: no copy, no second model.
    """
    own = _own_tensors(model)
    with open_artifact(path) as artifact:
        shared = match(own, artifact.info, strict=strict)
        on_meta = _is_on_meta(model, shared)
        tensors = {stored: artifact.tensor(stored) for stored in sorted(set(shared.values()))}
        state = {name: tensors[stored] for name, stored in shared.items()}
        _require_tied(own, state)
    if on_meta:
        state = _as_parameters(own, state)
    model.load_state_dict(state, strict=False, assign=on_meta)
    return model


def match(own: Mapping[str, Tensor], info: ArtifactInfo, *, strict: bool) -> dict[str, str]:
    """Return the names that the model has in common with the file, and what each is stored as.

    Shapes are compared too: what is decoded then is no larger than the model.
    """
    stored_as = {row.name: row.name for row in info.tensors} | info.aliases
    shapes = {row.name: row.shape for row in info.tensors}
    if strict:
        _compare_names(own.keys(), stored_as.keys())
    shared = {name: stored for name, stored in stored_as.items() if name in own}
    _compare_shapes(own, {name: shapes[stored] for name, stored in shared.items()})
    return shared


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _is_on_meta(model: nn.Module, shared: Iterable[str]) -> bool:
    """Whether the model waits for its data; refuse one that the file cannot complete."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    waiting = {name for name, tensor in tensors if tensor.is_meta}
    missing = sorted(waiting - set(shared))
    if missing:
        raise InputError(
            f"load_into(model): {_first(missing)} are on the meta device and not in the file; "
            "build the model on a device that has memory"
        )
    return bool(waiting)


def _as_parameters(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as what the model has: one object where it has one, and only there."""
    made: dict[str, Tensor] = {}
    given: set[int] = set()
    for names in same_memory({name: own[name] for name in state}):
        first, tensor = own[names[0]], state[names[0]]
        if id(tensor) in given:  # tied in the file, but not in the model
            tensor = tensor.clone()
        given.add(id(tensor))
        if isinstance(first, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=first.requires_grad)
        made |= dict.fromkeys(names, tensor)
    return made


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


def _require_tied(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse two tensors for one place: the second would silently replace the first."""
    for first, *others in same_memory({name: own[name] for name in state}):
        for name in others:
            a, b = state[first], state[name]
            if a is not b and not np.array_equal(bits(a), bits(b)):
                raise ArtifactError(
                    f"{first} and {name} are one tensor in the model but differ in the file; "
                    "build the model that was saved"
                )
