"""The methods, and the types that a new method is written with.

`METHODS` has every method by its name on the command line.
"""

from probmask.checks import Range, TrainingFraction, Updates
from probmask.core.allocation import Spread
from probmask.core.noise import Stream
from probmask.core.schedules import kept_fraction
from probmask.core.selection import select_top
from probmask.masking.masker import Histogram, Masker, Progress, Trainables
from probmask.masking.method import Context, Method, Phase
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.probe import Probe
from probmask.masking.sites import Site
from probmask.messages import NamedTable
from probmask.methods.ac_dc import ACDC
from probmask.methods.autoprune import AutoPrune
from probmask.methods.deepr import DeepR
from probmask.methods.dense import Dense
from probmask.methods.dns import DNS
from probmask.methods.dnw import DNW
from probmask.methods.dsr import DSR
from probmask.methods.edge_popup import EdgePopup
from probmask.methods.families.stored import StoredMasker, StoredWeight
from probmask.methods.feather import Feather
from probmask.methods.gmp import GMP
from probmask.methods.granet import GraNet
from probmask.methods.grasp import GraSP
from probmask.methods.l0 import L0
from probmask.methods.lottery import Lottery
from probmask.methods.lr_rewind import LRRewind
from probmask.methods.magnitude import Magnitude
from probmask.methods.mlprune import MLPrune
from probmask.methods.movement import Movement
from probmask.methods.optg import OptG
from probmask.methods.pbw import PBW
from probmask.methods.probmask import ProbMask, TiedProbMask
from probmask.methods.random import Random
from probmask.methods.rigl import RigL
from probmask.methods.set import SET
from probmask.methods.snfs import SNFS
from probmask.methods.snip import SNIP
from probmask.methods.sparse_vd import SparseVD
from probmask.methods.spartan import Spartan
from probmask.methods.srinivas import Srinivas
from probmask.methods.st3 import ST3
from probmask.methods.str_ import STR
from probmask.methods.vrpge import VRPGE

_ALL: tuple[type[Method], ...] = (
    # ours
    TiedProbMask,
    # compared in the paper
    ProbMask,
    DNW,
    EdgePopup,
    GMP,
    MLPrune,
    PBW,
    RigL,
    SparseVD,
    STR,
    # discussed in the paper
    AutoPrune,
    DeepR,
    DNS,
    DSR,
    GraSP,
    L0,
    Lottery,
    LRRewind,
    SET,
    SNFS,
    SNIP,
    Srinivas,
    VRPGE,
    # newer rivals
    ACDC,
    Feather,
    GraNet,
    Movement,
    OptG,
    Spartan,
    ST3,
    # baselines
    Dense,
    Magnitude,
    Random,
)
METHODS = NamedTable("method", {method.name: method for method in _ALL})

__all__ = [
    "ACDC",
    "DNS",
    "DNW",
    "DSR",
    "GMP",
    "L0",
    "METHODS",
    "PBW",
    "SET",
    "SNFS",
    "SNIP",
    "ST3",
    "STR",
    "VRPGE",
    "AutoPrune",
    "Context",
    "DeepR",
    "Dense",
    "EdgePopup",
    "Feather",
    "GraNet",
    "GraSP",
    "Histogram",
    "LRRewind",
    "Lottery",
    "MLPrune",
    "Magnitude",
    "MaskedWeight",
    "Masker",
    "Method",
    "Movement",
    "OptG",
    "Phase",
    "ProbMask",
    "Probe",
    "Progress",
    "Random",
    "Range",
    "RigL",
    "Site",
    "SparseVD",
    "Spartan",
    "Spread",
    "Srinivas",
    "StoredMasker",
    "StoredWeight",
    "Stream",
    "TiedProbMask",
    "Trainables",
    "TrainingFraction",
    "Updates",
    "WeightOptimizers",
    "kept_fraction",
    "select_top",
]
