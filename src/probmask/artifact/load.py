"""Loading an artifact: as a state_dict, into a model, or as the network that the file names."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from probmask.artifact.tensors import bits, shared_names, stored_tensor
from probmask.errors import ArtifactError, InputError
from probmask.masking.zeros import remember_zeros
from probmask.models import MODELS, build_model
from probmask.models.own_code import untrusted
from probmask.storage.reader import ArtifactInfo, check_dense_size, open_artifact, read

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)


def load(path: PathLike, *, model: str | None = None, max_bytes: int | None = None) -> nn.Module:
    """Build the network that an artifact names, load its weights and set it to evaluation mode.

    A file alone never decides which code runs. A network of this package is built by its name. A
    network of your own, given to ``probmask train`` as ``package.module:function``, is imported
    only if you pass that name as ``model``. For any other class use `load_into`.

    Args:
        path: The artifact.
        model: The name of the network, ``"resnet32"`` or ``"package.module:function"``. Default:
            the name in the artifact's metadata, which must be a network of this package.
        max_bytes: The largest size of the dense tensors to accept. Default: 256 MiB or 1,024 times
            the size of the file, whichever is larger.

    Returns:
        The network in evaluation mode, on the CPU.

    Raises:
        ArtifactError: The file does not exist or is not an intact artifact, does not name its
            network, does not fit the network, or exceeds ``max_bytes``.
        InputError: The network does not exist or cannot be built with the settings in the file.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import probmask
        >>> model = probmask.models.smallconv(width=4)
        >>> described = {"model": "smallconv", "model_args": {"width": 4}}
        >>> with TemporaryDirectory() as folder:
        ...     info = probmask.save(model, f"{folder}/model.safetensors", metadata=described)
        ...     loaded = probmask.load(f"{folder}/model.safetensors")
        >>> loaded.training
        False
    """
    info = read(path)
    name, settings = _network(path, info, model)
    sketch = _on_meta_device(name, settings)
    try:
        check_dense_size(info, max_bytes)
        if sketch is not None:
            _match(sketch.state_dict(), info, strict=True)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    # The user's code may create tensors that are neither parameters nor buffers. They have no data
    # on the meta device, so the network is built again.
    reusable = name in MODELS and sketch is not None
    network = sketch if reusable else build_model(name, settings)
    assert network is not None
    return load_into(network, path).eval()


def _on_meta_device(name: str, settings: dict[str, Any]) -> nn.Module | None:
    """Build the network without memory, so that settings from a file cannot allocate any.

    Return None if that fails, for example because the user's code computes with its weights.
    """
    try:
        with torch.device("meta"):
            return build_model(name, settings)
    except InputError:
        raise
    except Exception:
        if name in MODELS:
            raise
        return None


def _network(path: PathLike, info: ArtifactInfo, model: str | None) -> tuple[str, dict[str, Any]]:
    """Return the name of the network and its settings."""
    recorded, settings = info.metadata.get("model"), info.metadata.get("model_args", {})
    if not isinstance(settings, dict):
        raise ArtifactError(f"{path}: the model_args in its metadata are not a table.")
    if model is not None:
        return model, settings
    if not isinstance(recorded, str):
        raise ArtifactError(
            f"{path}: does not name its network; build the network and use probmask.load_into."
        )
    if ":" in recorded:
        raise ArtifactError(untrusted(path, recorded, in_python=f"model={recorded!r:.200}"))
    if recorded not in MODELS:
        raise ArtifactError(
            f"{path}: was made from the model {recorded!r:.200}, which is not part of probmask; "
            "build the network and use probmask.load_into."
        )
    return recorded, settings


def load_state(path: PathLike, *, max_bytes: int | None = None) -> dict[str, Tensor]:
    """Return the dense state_dict of an artifact, equal in every bit to what `save` stored.

    Args:
        path: The artifact.
        max_bytes: The largest size of the dense tensors to accept. Default: 256 MiB or 1,024 times
            the size of the file, whichever is larger.

    Returns:
        A tensor for each name. Names that shared a tensor in the model share it here too.

    Raises:
        ArtifactError: The file does not exist, is not an intact artifact or exceeds ``max_bytes``.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch, probmask
        >>> from probmask.artifact import load_state
        >>> model = torch.nn.Linear(4, 2)
        >>> with TemporaryDirectory() as folder:
        ...     info = probmask.save(model, f"{folder}/model.safetensors")
        ...     state = load_state(f"{folder}/model.safetensors")
        >>> torch.equal(state["weight"], model.weight)
        True
    """
    with open_artifact(path) as artifact:
        check_dense_size(artifact.info, max_bytes)
        state = {row.name: stored_tensor(artifact, row.name) for row in artifact.info.tensors}
        return state | {alias: state[name] for alias, name in artifact.info.aliases.items()}


def load_into(model: Model, path: PathLike, *, strict: bool = True) -> Model:
    """Load an artifact into a model: all of its tensors or, on an error, none.

    As in PyTorch, values are converted to the dtype and device of the model. A model on the meta
    device takes the tensors themselves, with the dtypes in the file and without a copy.

    Args:
        model: A model with the same parameters and buffers as the saved one.
        path: The artifact.
        strict: Raise if a name occurs only in the model or only in the file. With ``False`` such
            names are ignored.

    Returns:
        ``model``.

    Raises:
        ArtifactError: The file does not exist or is not an intact artifact, or its names, shapes
            or tied weights do not fit the model.
        InputError: The model has tensors on the meta device that the file does not contain.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch, probmask
        >>> model = torch.nn.Linear(4, 2)
        >>> with TemporaryDirectory() as folder:
        ...     info = probmask.save(model, f"{folder}/model.safetensors")
        ...     twin = probmask.load_into(torch.nn.Linear(4, 2), f"{folder}/model.safetensors")
        >>> torch.equal(twin.weight, model.weight)
        True
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"load_into({type(model).__name__}, …): expected a model first, then the path of an "
            "artifact."
        )
    own = _own_tensors(model)
    with open_artifact(path) as artifact:
        shared = _match(own, artifact.info, strict=strict)
        on_meta = _is_on_meta(model, shared)
        tensors = {
            stored: stored_tensor(artifact, stored) for stored in sorted(set(shared.values()))
        }
        state = {name: tensors[stored] for name, stored in shared.items()}
        _check_ties(own, state)
    if on_meta:
        state = _as_parameters(own, state)
    model.load_state_dict(state, strict=False, assign=on_meta)
    remember_zeros(p for name, p in model.named_parameters() if name in shared and p.dim() > 1)
    return model


def _match(own: Mapping[str, Tensor], info: ArtifactInfo, *, strict: bool) -> dict[str, str]:
    """Map the names that the model shares with the file to the names they are stored under.

    Raise unless their shapes agree. A decoded tensor is then never larger than the model's.
    """
    stored_as = {row.name: row.name for row in info.tensors} | info.aliases
    shapes = {row.name: row.shape for row in info.tensors}
    if strict:
        _check_names(own.keys(), stored_as.keys())
    shared = {name: stored for name, stored in stored_as.items() if name in own}
    _check_shapes(own, {name: shapes[stored] for name, stored in shared.items()})
    return shared


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _is_on_meta(model: nn.Module, shared: Iterable[str]) -> bool:
    """Return whether the model is on the meta device. Raise if the file cannot complete it."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    without_data = {name for name, tensor in tensors if tensor.is_meta}
    missing = sorted(without_data - set(shared))
    if missing:
        raise InputError(
            f"load_into(model): {_first(missing)} are on the meta device and not in the file; "
            "build the model on a device with memory."
        )
    return bool(without_data)


def _as_parameters(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as parameters or buffers, tied exactly where the model ties them."""
    made: dict[str, Tensor] = {}
    used: set[int] = set()
    for names in shared_names({name: own[name] for name in state}):
        first, tensor = own[names[0]], state[names[0]]
        if id(tensor) in used:  # tied in the file, but not in the model
            tensor = tensor.clone()
        used.add(id(tensor))
        if isinstance(first, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=first.requires_grad)
        made |= dict.fromkeys(names, tensor)
    return made


def _check_names(own: Iterable[str], stored: Iterable[str]) -> None:
    missing, unexpected = sorted(set(own) - set(stored)), sorted(set(stored) - set(own))
    if missing or unexpected:
        raise ArtifactError(
            f"the model and the file differ: {_first(missing)} missing in the file, "
            f"{_first(unexpected)} missing in the model; build the model that was saved, "
            "or pass strict=False."
        )


def _first(names: list[str]) -> str:
    """Return the number of names and the first three."""
    few = ", ".join(name[:80] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} ({few})" if names else "0"


def _check_shapes(own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [name for name, shape in shapes.items() if tuple(own[name].shape) != shape]
    if wrong:
        name = wrong[0]
        raise ArtifactError(
            f"shapes differ: {name} is {list(shapes[name])} in the file and "
            f"{list(own[name].shape)} in the model (in total {_first(wrong)}); "
            "build the model that was saved."
        )


def _check_ties(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise if the file has two values for one tensor: the second would overwrite the first."""
    for first, *others in shared_names({name: own[name] for name in state}):
        for name in others:
            a, b = state[first], state[name]
            if a is not b and not np.array_equal(bits(a), bits(b)):
                raise ArtifactError(
                    f"{first} and {name} are tied in the model but differ in the file; "
                    "build the model that was saved."
                )
