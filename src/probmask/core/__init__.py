"""Tensors in, tensors out: no modules, no files, no globals."""

from probmask.core.allocation import erdos_renyi, largest_remainder, uniform
from probmask.core.noise import fold, logistic_, uniform_
from probmask.core.projection import project_
from probmask.core.relaxation import bernoulli_mask, relaxed_mask, relaxed_slope
from probmask.core.schedules import cosine, kept_fraction, temperature, warm_up
from probmask.core.selection import select_top, select_within

__all__ = [
    "bernoulli_mask",
    "cosine",
    "erdos_renyi",
    "fold",
    "kept_fraction",
    "largest_remainder",
    "logistic_",
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
