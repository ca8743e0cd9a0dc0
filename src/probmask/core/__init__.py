"""The mathematics of the methods: tensors in, tensors out, without modules, files or global state.

`relaxation`, `projection` and `schedules` are the parts of ProbMask's Algorithm 1; `noise`,
`allocation` and `selection` serve all methods; `shrinkage` is the tied form of ProbMask. One-letter
names are those of the paper: s the probabilities, w the weights, m the mask, τ the temperature.
"""

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
