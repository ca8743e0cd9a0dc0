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
from probmask.methods.autoprune import AutoPrune
from probmask.methods.dnw import DNW
from probmask.methods.edge_popup import EdgePopup
from probmask.methods.families.stored import StoredMasker, StoredWeight
from probmask.methods.feather import Feather
from probmask.methods.movement import Movement
from probmask.methods.optg import OptG
from probmask.methods.probmask import ProbMask, TiedProbMask
from probmask.methods.rigl import RigL
from probmask.methods.sparse_vd import SparseVD
from probmask.methods.spartan import Spartan
from probmask.methods.srinivas import Srinivas
from probmask.methods.st3 import ST3
from probmask.methods.str_ import STR

_ALL: tuple[type[Method], ...] = (
    # ours
    TiedProbMask,
    # compared in the paper
    ProbMask,
    DNW,
    EdgePopup,
    RigL,
    SparseVD,
    STR,
    # discussed in the paper
    AutoPrune,
    Srinivas,
    # newer rivals
    Feather,
    Movement,
    OptG,
    Spartan,
    ST3,
)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = [
    "DNW",
    "METHODS",
    "ST3",
    "STR",
    "AutoPrune",
    "Context",
    "EdgePopup",
    "Feather",
    "Histogram",
    "MaskedWeight",
    "Masker",
    "Method",
    "Movement",
    "OptG",
    "Phase",
    "ProbMask",
    "Probe",
    "Progress",
    "RigL",
    "Site",
    "SparseVD",
    "Spartan",
    "Spread",
    "Srinivas",
    "StoredMasker",
    "StoredWeight",
    "TiedProbMask",
    "Trainables",
    "WeightOptimizers",
    "select_top",
]
