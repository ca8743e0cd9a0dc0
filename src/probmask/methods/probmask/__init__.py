"""The ProbMask family: the paper's method, and its form with probabilities tied to the weights."""

from probmask.methods.probmask.learned import ProbMask
from probmask.methods.probmask.tied import TiedProbMask

__all__ = ["ProbMask", "TiedProbMask"]
