"""Loading an artifact as a model, when its network is known by name."""

from os import PathLike
from typing import Any

import torch
from torch import nn

from probmask.artifact.reader import ArtifactInfo, check_unpacked_size
from probmask.artifact.restore import load_into, match, read
from probmask.errors import ArtifactError, InputError
from probmask.models import MODELS, build_model


def load(
    path: str | PathLike[str], *, model: str | None = None, max_bytes: int | None = None
) -> nn.Module:
    """Build the network that the artifact names and load it, in evaluation mode.

    A network of this package is built by its name. One that was given as
    ``package.module:function`` is imported only if ``model`` says so too: a file alone never
    decides which code runs. For any other class use `load_into`.

    A file whose network takes more than 256 MiB and more than 1,024 times its size is refused
    unless ``max_bytes`` allows it.
    """
    info = read(path)
    name, settings = _network(path, info, model)
    sketch = _sketch(name, settings)
    try:
        check_unpacked_size(info, max_bytes)
        if sketch is not None:
            match(sketch.state_dict(), info, strict=True)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    ours = name in MODELS and sketch is not None
    # Code of others may hold tensors that are neither parameters nor buffers: it is run for real.
    network = sketch if ours else build_model(name, settings)
    assert network is not None
    return load_into(network, path).eval()


def _sketch(name: str, settings: dict[str, Any]) -> nn.Module | None:
    """Build the network without memory, so that settings from a file cannot ask for any.

    None if it cannot be built so, as when the user's code computes with its weights.
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


def _network(
    path: str | PathLike[str], info: ArtifactInfo, model: str | None
) -> tuple[str, dict[str, Any]]:
    recorded, settings = info.metadata.get("model"), info.metadata.get("model_args", {})
    if not isinstance(settings, dict):
        raise ArtifactError(f"{path}: its model_args are not a table.")
    if model is not None:
        return model, settings
    if not isinstance(recorded, str):
        raise ArtifactError(
            f"{path}: does not say which model it is; build it and use probmask.load_into."
        )
    if recorded not in MODELS:
        raise ArtifactError(
            f"{path}: was made from the model {recorded!r:.200}, which is not one of probmask's; "
            f"if you trust it, pass model={recorded!r:.200} (--model {recorded!r:.200})."
        )
    return recorded, settings
