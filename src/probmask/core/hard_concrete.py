"""Hard-concrete gates: continuous, yet exactly 0 or 1 with positive probability."""

import math

import torch
from torch import Tensor

# The stretched interval (gamma, zeta) and the temperature, as Louizos et al. set them.
LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2 / 3
# Up to this logarithm of alpha the gate without noise is shut.
SHUT = math.log(-LOW / HIGH)
_QUANTILES = 16


def hard_concrete(log_alpha: Tensor, logistic: Tensor) -> Tensor:
    """z = clip((ζ - γ) σ((L + ln α) / β) + γ, 0, 1)  (Louizos et al., ICLR 2018, eq. 10 to 11)."""
    return _stretch(torch.sigmoid((logistic + log_alpha) / TEMPERATURE))


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(z ≠ 0) = σ(ln α - β ln(-γ / ζ))  (eq. 12)."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


def settled_gate(log_alpha: Tensor) -> Tensor:
    """z = clip((ζ - γ) σ(ln α) + γ, 0, 1): the gate without noise, for evaluation  (eq. 13)."""
    return _stretch(torch.sigmoid(log_alpha))


def mean_gate(log_alpha: Tensor) -> Tensor:
    """E z, as the mean over equally likely values of the noise; positive for ln α > -5."""
    total = torch.zeros_like(log_alpha)
    for index in range(_QUANTILES):
        u = (index + 0.5) / _QUANTILES
        total += hard_concrete(log_alpha, torch.tensor(math.log(u) - math.log1p(-u)))
    return total / _QUANTILES


def _stretch(s: Tensor) -> Tensor:
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)
