"""The relaxed mask and its slope, in closed form and stable in fp32."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def relaxed_mask(prob: Tensor, logistic: Tensor, temperature: Tensor) -> Tensor:
    """m = sigmoid((ln s - ln(1 - s) + L) / tau)  (ProbMask, CVPR 2021, eq. 5).

    s is the probability that the weight is kept, L Logistic(0, 1) noise and tau the temperature,
    a tensor without dimensions (so that a compiled graph does not depend on its value). For
    tau -> 0 this is `bernoulli_mask`. At s = 0 and s = 1 value and slope are the exact limits:
    the mask is 0 or 1 whatever the noise, and the slope is zero for tau < 1.
    """
    mask: Tensor = _RelaxedMask.apply(prob, logistic, temperature)  # type: ignore[no-untyped-call]
    return mask


def logit(prob: Tensor) -> Tensor:
    """ln s - ln(1 - s); ``torch.logit`` computes it one entry at a time, ten times slower."""
    return prob.log() - torch.log1p(-prob)


def bernoulli_mask(prob: Tensor, logistic: Tensor) -> Tensor:
    """m = 1[ln s - ln(1 - s) + L >= 0], which is True with probability exactly s."""
    return logit(prob) + logistic >= 0


def relaxed_slope(prob: Tensor, logistic: Tensor, temperature: Tensor) -> Tensor:
    """dm/ds = a m (1 - m) / (s (1 - s)) with a = 1 / tau, without its 0 / 0 and its overflow.

    Written with p = a ln s and q = a (ln(1 - s) - L), where m = e^p / (e^p + e^q):

        ln dm/ds = ln a + (a - 1) ln(s (1 - s)) - a L - 2 ln(e^p + e^q)

    which stays finite where m rounds to 0 or 1 long before its slope is negligible.
    """
    a = temperature.reciprocal()
    log_s = prob.log()
    log_r = torch.log1p(-prob)
    normaliser = torch.logaddexp(a * log_s, a * (log_r - logistic))
    # xlogy: the factor a - 1 is 0 at tau = 1, where ln(s (1 - s)) may be -inf and must not count.
    boundary = torch.special.xlogy(a - 1, prob * (1 - prob))
    return torch.exp(a.log() + boundary - a * logistic - 2 * normaliser)


class _RelaxedMask(torch.autograd.Function):
    """One node in the graph; the slope is computed on the way back, so nothing is stored for it."""

    @staticmethod
    def forward(ctx: Any, prob: Tensor, logistic: Tensor, temperature: Tensor) -> Tensor:
        ctx.save_for_backward(prob, logistic, temperature)
        return torch.sigmoid((logit(prob) + logistic) / temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * relaxed_slope(*ctx.saved_tensors), None, None
