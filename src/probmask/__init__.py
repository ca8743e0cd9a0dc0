"""Train neural networks to an exact sparsity under one global budget.

Names are imported when they are first used, so that commands which need no PyTorch start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from probmask.version import __version__

if TYPE_CHECKING:
    from probmask import data, methods, models, runtime
    from probmask.artifact import inspect, load, load_into, read, save
    from probmask.errors import (
        ArtifactError,
        CheckpointError,
        EarlyEndWarning,
        InputError,
        LayerCollapseWarning,
    )
    from probmask.masking.attaching import attach
    from probmask.masking.freezing import FrozenMasks, freeze_masks
    from probmask.masking.protocol import Masker, Method, Probe
    from probmask.masking.sparsifier import Sparsifier
    from probmask.masking.summary import Summary
    from probmask.methods.dense import Dense
    from probmask.methods.probmask import ProbMask
    from probmask.training.config import load_config
    from probmask.training.trainer import train

_HOMES = {
    "ArtifactError": "probmask.errors",
    "CheckpointError": "probmask.errors",
    "Dense": "probmask.methods.dense",
    "EarlyEndWarning": "probmask.errors",
    "FrozenMasks": "probmask.masking.freezing",
    "InputError": "probmask.errors",
    "LayerCollapseWarning": "probmask.errors",
    "Masker": "probmask.masking.protocol",
    "Method": "probmask.masking.protocol",
    "ProbMask": "probmask.methods.probmask",
    "Probe": "probmask.masking.protocol",
    "Sparsifier": "probmask.masking.sparsifier",
    "Summary": "probmask.masking.summary",
    "attach": "probmask.masking.attaching",
    "freeze_masks": "probmask.masking.freezing",
    "inspect": "probmask.artifact",
    "load": "probmask.artifact",
    "load_into": "probmask.artifact",
    "read": "probmask.artifact",
    "save": "probmask.artifact",
    "load_config": "probmask.training.config",
    "train": "probmask.training.trainer",
}
# Packages whose content is reached through them: probmask.models.resnet32().
_PACKAGES = ("data", "methods", "models", "runtime")

__all__ = [
    "ArtifactError",
    "CheckpointError",
    "Dense",
    "EarlyEndWarning",
    "FrozenMasks",
    "InputError",
    "LayerCollapseWarning",
    "Masker",
    "Method",
    "ProbMask",
    "Probe",
    "Sparsifier",
    "Summary",
    "__version__",
    "attach",
    "data",
    "freeze_masks",
    "inspect",
    "load",
    "load_config",
    "load_into",
    "methods",
    "models",
    "read",
    "runtime",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return import_module(f"probmask.{name}")
    raise AttributeError(f"module 'probmask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
