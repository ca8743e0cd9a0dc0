"""The methods, by the names they have on the command line."""

from probmask.masking.protocol import Method
from probmask.methods.ac_dc import ACDC
from probmask.methods.autoprune import AutoPrune
from probmask.methods.deepr import DeepR
from probmask.methods.dense import Dense
from probmask.methods.dns import DNS
from probmask.methods.dnw import DNW
from probmask.methods.dsr import DSR
from probmask.methods.edge_popup import EdgePopup
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
from probmask.methods.probmask import ProbMask
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

METHODS: dict[str, type[Method]] = {
    # compared in the paper
    "probmask": ProbMask,
    "dnw": DNW,
    "edge-popup": EdgePopup,
    "gmp": GMP,
    "mlprune": MLPrune,
    "pbw": PBW,
    "rigl": RigL,
    "sparse-vd": SparseVD,
    "str": STR,
    # discussed in the paper
    "autoprune": AutoPrune,
    "deepr": DeepR,
    "dns": DNS,
    "dsr": DSR,
    "grasp": GraSP,
    "l0": L0,
    "lottery": Lottery,
    "lr-rewind": LRRewind,
    "set": SET,
    "snfs": SNFS,
    "snip": SNIP,
    "srinivas": Srinivas,
    "vrpge": VRPGE,
    # newer rivals
    "ac-dc": ACDC,
    "feather": Feather,
    "granet": GraNet,
    "movement": Movement,
    "optg": OptG,
    "spartan": Spartan,
    "st3": ST3,
    # floors
    "dense": Dense,
    "magnitude": Magnitude,
    "random": Random,
}

__all__ = ["METHODS", "Dense", "ProbMask"]
