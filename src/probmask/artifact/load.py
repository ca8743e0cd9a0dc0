"""Loading an artifact as a model, when its network is known by name."""

from os import PathLike
from typing import Any

from torch import nn

from probmask.artifact.reader import ArtifactInfo
from probmask.artifact.store import load_into, read
from probmask.errors import ArtifactError
from probmask.models import MODELS, build_model


def load(path: str | PathLike[str], *, model: str | None = None) -> nn.Module:
    """Build the network that the artifact names and load it, in evaluation mode.

    A network of this package is built by its name. One that was given as
    ``package.module:function`` is imported only if ``model`` says so too: a file alone never
    decides which code runs. For any other class use `load_into`.
    """
    info = read(path)
    name, settings = _network(path, info, model)
    return load_into(build_model(name, settings), path).eval()


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
            f"{path}: was made from the model {recorded!r}, which is not one of probmask's; if you "
            f"trust it, pass model={recorded!r} (--model {recorded})."
        )
    return recorded, settings
