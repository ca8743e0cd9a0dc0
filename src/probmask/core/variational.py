"""Sparse variational dropout: the noise ratio of a weight and what it costs."""

import torch
from torch import Tensor

_FLOOR = 1e-8
_LIMIT = 8.0
_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695


def log_alpha(weight: Tensor, log_variance: Tensor) -> Tensor:
    """ln α = ln σ² - ln θ², within ±8: how noisy a weight is, relative to its size."""
    square = weight.to(log_variance.dtype).square()
    return (log_variance - torch.log(square + _FLOOR)).clamp(-_LIMIT, _LIMIT)


def kl_divergence(log_alpha: Tensor) -> Tensor:
    """KL ≈ k₁ - k₁ σ(k₂ + k₃ ln α) + ½ ln(1 + 1/α)  (Molchanov et al., ICML 2017, eq. 14).

    The divergence of N(θ, αθ²) from the log-uniform prior, up to a constant such that it vanishes
    for α → ∞; accurate to 0.02.
    """
    fit = _K1 * torch.sigmoid(_K2 + _K3 * log_alpha)
    return _K1 - fit + 0.5 * torch.nn.functional.softplus(-log_alpha)
