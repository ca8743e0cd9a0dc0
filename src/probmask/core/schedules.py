"""Schedules as functions of progress, the part of the training that is done, in [0, 1].

They are evaluated per step or per epoch: the caller decides what progress it passes.
"""

import math


def temperature(progress: float, *, start: float = 1.0, end: float = 0.03) -> float:
    """tau = (start - end) (1 - t/T) + end  (ProbMask, CVPR 2021, algorithm 1, line 3)."""
    return (start - end) * (1 - progress) + end


def kept_fraction(progress: float, final: float, *, begin: float = 0.16, end: float = 0.6) -> float:
    """k = k_f + (1 - k_f) (1 - (t - t1)/(t2 - t1))^3  (ProbMask, CVPR 2021, eq. 8).

    1 before t1 = begin T, k_f from t2 = end T on. The cubic is that of gradual magnitude pruning.
    """
    if progress < begin:
        return 1.0
    if progress >= end:
        return final
    return final + (1 - final) * (1 - (progress - begin) / (end - begin)) ** 3


def cosine(progress: float) -> float:
    """(1 + cos(pi t/T)) / 2: the factor on the learning rates of weights and probabilities."""
    return (1 + math.cos(math.pi * progress)) / 2


def warm_up(progress: float, *, until: float) -> float:
    """min(1, t / until): a linear rise to 1 over the first part of the training."""
    return 1.0 if progress >= until else progress / until
