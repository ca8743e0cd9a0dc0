"""The methods, and the types that a new method is written with.

`METHODS` has every method by its name on the command line.
"""

from probmask.core.allocation import Spread
from probmask.core.selection import select_top
from probmask.masking.masker import Histogram, Masker, Progress, Trainables
from probmask.masking.method import Context, Method, Phase
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.probe import Probe
from probmask.masking.sites import Site
from probmask.methods.families.stored import StoredMasker, StoredWeight
from probmask.methods.probmask import ProbMask, TiedProbMask
from probmask.methods.rigl import RigL

_ALL: tuple[type[Method], ...] = (
    # ours
    TiedProbMask,
    # compared in the paper
    ProbMask,
    RigL,
)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = [
    "METHODS",
    "Context",
    "Histogram",
    "MaskedWeight",
    "Masker",
    "Method",
    "Phase",
    "ProbMask",
    "Probe",
    "Progress",
    "RigL",
    "Site",
    "Spread",
    "StoredMasker",
    "StoredWeight",
    "TiedProbMask",
    "Trainables",
    "WeightOptimizers",
    "select_top",
]
