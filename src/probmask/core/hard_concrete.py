"""Hard-concrete gates: continuous, but exactly 0 or 1 with positive probability.

Louizos, Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization", ICLR 2018.
"""

import math

import torch
from torch import Tensor

# The stretched interval (gamma, zeta) and the temperature beta of the paper.
LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2 / 3
# The gate without noise is 0 for a log alpha up to this value.
SHUT = math.log(-LOW / HIGH)
_QUANTILES = 16


def hard_concrete(log_alpha: Tensor, logistic: Tensor) -> Tensor:
    """z = clip((ζ - γ) σ((L + ln α) / β) + γ, 0, 1)  (Louizos et al., eq. 10 and 11).

    Args:
        log_alpha: ln α, the location of each gate.
        logistic: L, Logistic(0, 1) noise of the same shape.

    Returns:
        z, the gates of one draw.
    """
    return _stretch(torch.sigmoid((logistic + log_alpha) / TEMPERATURE))


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(z ≠ 0) = σ(ln α - β ln(-γ / ζ))  (Louizos et al., eq. 12)."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


def settled_gate(log_alpha: Tensor) -> Tensor:
    """z = clip((ζ - γ) σ(ln α) + γ, 0, 1): the gate without noise  (Louizos et al., eq. 13)."""
    return _stretch(torch.sigmoid(log_alpha))


def mean_gate(log_alpha: Tensor) -> Tensor:
    """E z, averaged over 16 equally likely values of the noise; positive for ln α > -5."""
    total = torch.zeros_like(log_alpha)
    for index in range(_QUANTILES):
        u = (index + 0.5) / _QUANTILES
        total += hard_concrete(log_alpha, torch.tensor(math.log(u) - math.log1p(-u)))
    return total / _QUANTILES


def _stretch(s: Tensor) -> Tensor:
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)
