"""The mathematics of the methods: tensors in, tensors out, without modules, files or global state.

`relaxation`, `projection` and `schedules` are the parts of ProbMask's Algorithm 1; `noise`,
`allocation` and `selection` serve all methods; `shrinkage` is the tied form of ProbMask. One-letter
names are those of the paper: s the probabilities, w the weights, m the mask, τ the temperature.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probmask.core.allocation import Spread, erdos_renyi, largest_remainder, uniform
    from probmask.core.noise import Stream, fold, logistic_, normal_, uniform_
    from probmask.core.projection import project_
    from probmask.core.relaxation import bernoulli_mask, masked_draw, relaxed_mask, relaxed_slope
    from probmask.core.schedules import cosine, kept_fraction, temperature, warm_up
    from probmask.core.selection import (
        cut_between,
        cut_by_magnitude,
        kept_counts,
        select_top,
        select_within,
    )
    from probmask.core.shrinkage import bound_pruned_gradient, kept_part, power_grow, power_shrink

__all__ = [
    "Spread",
    "Stream",
    "bernoulli_mask",
    "bound_pruned_gradient",
    "cosine",
    "cut_between",
    "cut_by_magnitude",
    "erdos_renyi",
    "fold",
    "kept_counts",
    "kept_fraction",
    "kept_part",
    "largest_remainder",
    "logistic_",
    "masked_draw",
    "normal_",
    "power_grow",
    "power_shrink",
    "project_",
    "relaxed_mask",
    "relaxed_slope",
    "select_top",
    "select_within",
    "temperature",
    "uniform",
    "uniform_",
    "warm_up",
]

# Imported when first used: `kernel_cache` serves the engine, which runs without PyTorch too.
_HOMES = {
    "Spread": "probmask.core.allocation",
    "Stream": "probmask.core.noise",
    "bernoulli_mask": "probmask.core.relaxation",
    "bound_pruned_gradient": "probmask.core.shrinkage",
    "cosine": "probmask.core.schedules",
    "cut_between": "probmask.core.selection",
    "cut_by_magnitude": "probmask.core.selection",
    "erdos_renyi": "probmask.core.allocation",
    "fold": "probmask.core.noise",
    "kept_counts": "probmask.core.selection",
    "kept_fraction": "probmask.core.schedules",
    "kept_part": "probmask.core.shrinkage",
    "largest_remainder": "probmask.core.allocation",
    "logistic_": "probmask.core.noise",
    "masked_draw": "probmask.core.relaxation",
    "normal_": "probmask.core.noise",
    "power_grow": "probmask.core.shrinkage",
    "power_shrink": "probmask.core.shrinkage",
    "project_": "probmask.core.projection",
    "relaxed_mask": "probmask.core.relaxation",
    "relaxed_slope": "probmask.core.relaxation",
    "select_top": "probmask.core.selection",
    "select_within": "probmask.core.selection",
    "temperature": "probmask.core.schedules",
    "uniform": "probmask.core.allocation",
    "uniform_": "probmask.core.noise",
    "warm_up": "probmask.core.schedules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'probmask.core' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
