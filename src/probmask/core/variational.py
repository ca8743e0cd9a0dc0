"""Sparse variational dropout: the noise-to-signal ratio of a weight, and its penalty.

Molchanov, Ashukha and Vetrov, "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017.
"""

import torch
from torch import Tensor

_FLOOR = 1e-8
_LIMIT = 8.0
_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695


def log_alpha(weight: Tensor, log_variance: Tensor) -> Tensor:
    """ln α = ln σ² - ln θ², clipped to ±8: the noise of a weight relative to its size.

    Args:
        weight: θ, the mean of each weight.
        log_variance: ln σ², the variance of its noise.

    Returns:
        ln α, in the dtype of ``log_variance``.
    """
    square = weight.to(log_variance.dtype).square()
    return (log_variance - torch.log(square + _FLOOR)).clamp(-_LIMIT, _LIMIT)


def kl_divergence(log_alpha: Tensor) -> Tensor:
    """KL ≈ k₁ - k₁ σ(k₂ + k₃ ln α) + ½ ln(1 + 1/α)  (Molchanov et al., eq. 14).

    The divergence of N(θ, αθ²) from the log-uniform prior. The constant is chosen so that it goes
    to 0 for α → ∞. The approximation is accurate to 0.02.

    Args:
        log_alpha: ln α of each weight.

    Returns:
        The divergence for each weight.
    """
    fit = _K1 * torch.sigmoid(_K2 + _K3 * log_alpha)
    return _K1 - fit + 0.5 * torch.nn.functional.softplus(-log_alpha)
