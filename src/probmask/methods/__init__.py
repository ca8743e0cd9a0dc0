"""The methods, by the names they have on the command line."""

from probmask.masking.protocol import Method
from probmask.methods.dense import Dense
from probmask.methods.probmask import ProbMask

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "probmask": ProbMask,
}

__all__ = ["METHODS", "Dense", "ProbMask"]
