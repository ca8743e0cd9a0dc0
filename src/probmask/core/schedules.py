"""Schedules as functions of progress: the fraction of the training that is done, in [0, 1].

The caller decides whether progress changes with every step or with every epoch.
"""

import math


def temperature(progress: float, *, start: float = 1.0, end: float = 0.03) -> float:
    """τ = (start - end) (1 - t/T) + end  (ProbMask, CVPR 2021, algorithm 1, line 3).

    Args:
        progress: t/T, in [0, 1].
        start: τ at the start of the training.
        end: τ at its end.

    Returns:
        The temperature of the relaxed mask.

    Example:
        >>> temperature(0.0), temperature(0.5)
        (1.0, 0.515)
    """
    return (start - end) * (1 - progress) + end


def kept_fraction(progress: float, final: float, *, begin: float = 0.16, end: float = 0.6) -> float:
    """k = k_f + (1 - k_f) (1 - (t - t₁)/(t₂ - t₁))³  (ProbMask, CVPR 2021, eq. 8).

    k is 1 before t₁ = begin·T and k_f from t₂ = end·T on. The cubic ramp is that of gradual
    magnitude pruning (Zhu and Gupta, 2017).

    Args:
        progress: t/T, in [0, 1].
        final: k_f, the fraction of the weights that is kept at the end.
        begin: where the ramp begins.
        end: where the ramp ends.

    Returns:
        The fraction of the weights that is kept now.

    Example:
        >>> [round(kept_fraction(t, 0.02), 4) for t in (0.1, 0.38, 0.6)]
        [1.0, 0.1425, 0.02]
    """
    if progress < begin:
        return 1.0
    if progress >= end:
        return final
    return final + (1 - final) * (1 - (progress - begin) / (end - begin)) ** 3


def cosine(progress: float) -> float:
    """(1 + cos(π t/T)) / 2: the factor on the learning rates of weights and probabilities.

    Args:
        progress: t/T, in [0, 1].

    Returns:
        A factor that falls from 1 to 0.

    Example:
        >>> cosine(0.0), cosine(1.0)
        (1.0, 0.0)
    """
    return (1 + math.cos(math.pi * progress)) / 2


def warm_up(progress: float, *, until: float) -> float:
    """min(1, t / until): a linear ramp from 0 to 1 at the start of the training.

    Args:
        progress: t/T, in [0, 1].
        until: where the ramp ends; 0 for no ramp.

    Returns:
        A factor in [0, 1].

    Example:
        >>> warm_up(0.025, until=0.05), warm_up(0.5, until=0.05)
        (0.5, 1.0)
    """
    return 1.0 if progress >= until else progress / until
