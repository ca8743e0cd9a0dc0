"""The arithmetic of ProbMask's released code, with its epsilon and its bisection.

Only ``ProbMask(compat="official")`` uses this file. The rest of this package computes the same
quantities exactly. Two differences decide which pruned weights can return:

- At s = 1 the epsilon makes the slope exactly zero at every temperature, so a probability of 1
  would never change. But while the whole network is kept, the bisection does not notice that the
  constraint already holds, and it subtracts 2^-21. This moves every probability away from 1 once.
- At s = 0 the slope is that of s = 1e-20: heavy-tailed at temperature 1, zero below 0.5.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_EPS = 1e-20
_TOLERANCE = 1e-3
_MAX_HALVINGS = 21


def official_noise(u0: Tensor, u1: Tensor) -> Tensor:
    """g = -ln(ln(u₀ + ε) / ln(u₁ + ε) + ε): the difference of two Gumbel variables."""
    return -torch.log(torch.log(u0 + _EPS) / torch.log(u1 + _EPS) + _EPS)


def official_mask(prob: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
    """m = σ((ln(s + ε) - ln(1 - s + ε) + g) / τ), differentiated by autograd."""
    logit = torch.log(prob + _EPS) - torch.log(1.0 - prob + _EPS)
    return torch.sigmoid((logit + noise) * temperature.reciprocal())


def official_project_(probs: Sequence[Tensor], keep: float) -> float:
    """s ← clip(s - v, 0, 1) in place, with v from at most 21 halvings of [0, max s]; return v.

    Sums are in fp32, and the search stops when Σ s is within 1e-3 of ``keep``.
    """
    with torch.no_grad():
        shift = _bisect(probs, keep)
        for prob in probs:
            prob.sub_(shift).clamp_(0, 1)
    return float(shift)


def _bisect(probs: Sequence[Tensor], keep: float) -> Tensor:
    def excess(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        for prob in probs:
            total = total + (prob - v).clamp(0, 1).sum()
        return total - keep

    low = torch.zeros((), dtype=probs[0].dtype, device=probs[0].device)
    if excess(low) < 0:
        return low
    high = torch.stack([low, *(prob.max() for prob in probs)]).max()
    middle = (low + high) / 2
    for _ in range(1, _MAX_HALVINGS):
        gap = excess(middle)
        if abs(gap) < _TOLERANCE:
            break
        low, high = (low, middle) if gap < 0 else (middle, high)
        middle = (low + high) / 2
    return middle
