"""Train neural networks to an exact sparsity under one global budget.

Names are imported when they are first used, so that commands without PyTorch start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from probmask.version import __version__

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` imports these names
    from probmask import data, methods, models, optim, runtime
    from probmask.artifact import inspect, load, load_into, read, save
    from probmask.errors import (
        ArtifactError,
        CheckpointError,
        EarlyEndWarning,
        InputError,
        LayerCollapseWarning,
        NonFiniteError,
        RankLostError,
        RankMismatchError,
        RefilledWeightsWarning,
        UnmaskedWeightsWarning,
    )
    from probmask.integrations.lora import MergeCost, merge_lora
    from probmask.masking.attach import attach
    from probmask.masking.freeze_masks import FrozenMasks, freeze_masks, quantize
    from probmask.masking.masker import Histogram, Masker, Progress, Trainables
    from probmask.masking.method import Context, Method, Phase
    from probmask.masking.optimizers import WeightOptimizers
    from probmask.masking.parametrization import MaskedWeight
    from probmask.masking.probe import Probe
    from probmask.masking.rank_watch import watch_ranks
    from probmask.masking.sites import Site, find_sites
    from probmask.masking.sparsifier import Sparsifier
    from probmask.masking.summary import Summary
    from probmask.methods.dense import Dense
    from probmask.methods.families.stored import StoredMasker
    from probmask.methods.probmask import ProbMask, TiedProbMask
    from probmask.training.config import load_config
    from probmask.training.trainer import train

_HOMES = {
    "ArtifactError": "probmask.errors",
    "CheckpointError": "probmask.errors",
    "Context": "probmask.masking.method",
    "Dense": "probmask.methods.dense",
    "EarlyEndWarning": "probmask.errors",
    "FrozenMasks": "probmask.masking.freeze_masks",
    "Histogram": "probmask.masking.masker",
    "InputError": "probmask.errors",
    "LayerCollapseWarning": "probmask.errors",
    "MaskedWeight": "probmask.masking.parametrization",
    "Masker": "probmask.masking.masker",
    "MergeCost": "probmask.integrations.lora",
    "Method": "probmask.masking.method",
    "NonFiniteError": "probmask.errors",
    "RankLostError": "probmask.errors",
    "RankMismatchError": "probmask.errors",
    "Phase": "probmask.masking.method",
    "ProbMask": "probmask.methods.probmask",
    "Probe": "probmask.masking.probe",
    "Progress": "probmask.masking.masker",
    "RefilledWeightsWarning": "probmask.errors",
    "Site": "probmask.masking.sites",
    "Sparsifier": "probmask.masking.sparsifier",
    "StoredMasker": "probmask.methods.families.stored",
    "Summary": "probmask.masking.summary",
    "TiedProbMask": "probmask.methods.probmask",
    "Trainables": "probmask.masking.masker",
    "UnmaskedWeightsWarning": "probmask.errors",
    "WeightOptimizers": "probmask.masking.optimizers",
    "attach": "probmask.masking.attach",
    "find_sites": "probmask.masking.sites",
    "freeze_masks": "probmask.masking.freeze_masks",
    "inspect": "probmask.artifact",
    "load": "probmask.artifact",
    "load_config": "probmask.training.config",
    "load_into": "probmask.artifact",
    "merge_lora": "probmask.integrations.lora",
    "quantize": "probmask.masking.freeze_masks",
    "read": "probmask.artifact",
    "save": "probmask.artifact",
    "train": "probmask.training.trainer",
    "watch_ranks": "probmask.masking.rank_watch",
}
# Packages whose content is reached through them, such as probmask.models.resnet32().
_PACKAGES = ("data", "methods", "models", "optim", "runtime")

__all__ = [
    "ArtifactError",
    "CheckpointError",
    "Context",
    "Dense",
    "EarlyEndWarning",
    "FrozenMasks",
    "Histogram",
    "InputError",
    "LayerCollapseWarning",
    "MaskedWeight",
    "Masker",
    "MergeCost",
    "Method",
    "NonFiniteError",
    "Phase",
    "ProbMask",
    "Probe",
    "Progress",
    "RankLostError",
    "RankMismatchError",
    "RefilledWeightsWarning",
    "Site",
    "Sparsifier",
    "StoredMasker",
    "Summary",
    "TiedProbMask",
    "Trainables",
    "UnmaskedWeightsWarning",
    "WeightOptimizers",
    "__version__",
    "attach",
    "data",
    "find_sites",
    "freeze_masks",
    "inspect",
    "load",
    "load_config",
    "load_into",
    "merge_lora",
    "methods",
    "models",
    "optim",
    "quantize",
    "read",
    "runtime",
    "save",
    "train",
    "watch_ranks",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return import_module(f"probmask.{name}")
    raise AttributeError(f"module 'probmask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
