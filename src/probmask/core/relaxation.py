"""The relaxed random mask and its gradient, in closed form and stable in fp32.

`relaxed_mask` takes given noise. `masked_draw` multiplies a weight by a relaxed mask whose noise is
hashed from a key, in one pass and without storing mask or noise.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from probmask.core import noise
from probmask.core.kernel_runner import empty_in_large_pages, kernels_for, map_parts


def relaxed_mask(prob: Tensor, logistic: Tensor, temperature: Tensor) -> Tensor:
    """m = σ((ln s - ln(1 - s) + L) / τ)  (ProbMask, CVPR 2021, eq. 4, with L = g₁ - g₀).

    For τ → 0 this is `bernoulli_mask`. At s = 0 and s = 1 value and gradient are the exact limits:
    the mask is s for any noise, and the gradient is zero for τ < 1.

    Args:
        prob: s, the probability that a weight is kept.
        logistic: L, Logistic(0, 1) noise of the same shape.
        temperature: τ, a 0-D tensor, so that a compiled graph does not depend on its value.

    Returns:
        m, differentiable with respect to ``prob``.

    Example:
        >>> s, L = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([3.0, 0.0, -3.0])
        >>> relaxed_mask(s, L, torch.tensor(0.5)).tolist()
        [0.0, 0.5, 1.0]
    """
    mask: Tensor = _RelaxedMask.apply(prob, logistic, temperature)  # type: ignore[no-untyped-call]
    return mask


def logit(prob: Tensor) -> Tensor:
    """ln s - ln(1 - s); ``torch.logit`` is not vectorized on the CPU and ten times slower."""
    return prob.log() - torch.log1p(-prob)


def bernoulli_mask(prob: Tensor, logistic: Tensor) -> Tensor:
    """m = 1[ln s - ln(1 - s) + L ≥ 0]  (ProbMask, CVPR 2021, eq. 3), True with probability s.

    Args:
        prob: s, the probability that a weight is kept.
        logistic: L, Logistic(0, 1) noise of the same shape.

    Returns:
        A boolean mask.

    Example:
        >>> bernoulli_mask(torch.tensor([0.0, 0.4, 1.0]), torch.tensor([5.0, 1.0, -5.0])).tolist()
        [False, True, True]
    """
    return logit(prob) + logistic >= 0


def relaxed_slope(prob: Tensor, logistic: Tensor, temperature: Tensor) -> Tensor:
    """dm/ds = a m (1 - m) / (s (1 - s)) with a = 1/τ  (the paper's S, appendix on annealing).

    Computed in logarithms, which have no 0/0 and do not overflow. With p = a ln s and
    q = a (ln(1 - s) - L), m = e^p / (e^p + e^q) and

        ln dm/ds = ln a + (a - 1) ln(s (1 - s)) - a L - 2 ln(e^p + e^q)

    This stays accurate where m rounds to 0 or 1 but its slope is not negligible.

    Args:
        prob: s, the probability that a weight is kept.
        logistic: L, Logistic(0, 1) noise of the same shape.
        temperature: τ, a 0-D tensor.

    Returns:
        dm/ds for each entry, finite and not negative.

    Example:
        >>> relaxed_slope(torch.tensor([0.5]), torch.zeros(1), torch.tensor(0.5)).tolist()
        [2.0]
    """
    a = temperature.reciprocal()
    log_s = prob.log()
    log_r = torch.log1p(-prob)
    normalizer = torch.logaddexp(a * log_s, a * (log_r - logistic))
    # xlogy is 0 where a - 1 = 0 (τ = 1), even if ln(s (1 - s)) is -inf.
    boundary = torch.special.xlogy(a - 1, prob * (1 - prob))
    return torch.exp(a.log() + boundary - a * logistic - 2 * normalizer)


class _RelaxedMask(torch.autograd.Function):
    """One autograd node; the backward pass computes the slope, so no intermediate is stored."""

    @staticmethod
    def forward(ctx: Any, prob: Tensor, logistic: Tensor, temperature: Tensor) -> Tensor:
        ctx.save_for_backward(prob, logistic, temperature)
        return torch.sigmoid((logit(prob) + logistic) / temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * relaxed_slope(*ctx.saved_tensors), None, None


def masked_draw(
    weight: Tensor,
    prob: Tensor,
    key: Tensor,
    temperature: Tensor,
    *,
    straight_through: bool = False,
) -> Tensor:
    """w m with m = σ((ln s - ln(1 - s) + L) / τ)  (ProbMask, CVPR 2021, eq. 5, one draw).

    This is ``weight * relaxed_mask(...)`` with the noise `noise.logistic` of ``key``. The backward
    pass recomputes mask and noise instead of storing them. On the CPU a compiled kernel computes
    it if Numba is installed, otherwise PyTorch does. The uniforms have the same bits both ways;
    the masks agree to a few units in the last place.

    Args:
        weight: w; a half-precision weight is multiplied in fp32 and rounded once.
        prob: s, fp32, of the same shape.
        key: the two words of a `noise.draw_key`, int64. A tensor like ``temperature``, so that a
            compiled graph does not depend on their values.
        temperature: τ, a 0-D fp32 tensor.
        straight_through: Take dm/ds as 1 in the backward pass, instead of `relaxed_slope`.

    Returns:
        w m, differentiable with respect to ``weight`` and ``prob``.

    Example:
        >>> key = torch.tensor(noise.draw_key(0, 1))
        >>> w, s = torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])
        >>> masked_draw(w, s, key, torch.tensor(0.5)).tolist()
        [0.0, 3.0]
    """
    result: Tensor = _MaskedDraw.apply(weight, prob, key, temperature, straight_through)  # type: ignore[no-untyped-call]
    return result


class _MaskedDraw(torch.autograd.Function):
    """One autograd node that saves only tensors that exist anyway: weight and probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        prob: Tensor,
        key: Tensor,
        temperature: Tensor,
        straight_through: bool,
    ) -> Tensor:
        ctx.save_for_backward(weight, prob, key, temperature)
        ctx.straight_through = straight_through
        return _times_mask(weight, prob, key, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _straight_gradients if ctx.straight_through else _relaxed_gradients
        grad_weight, grad_prob = gradients(grad, *ctx.saved_tensors)
        return (grad_weight if ctx.needs_input_grad[0] else None), grad_prob, None, None, None


def _relaxed_gradients(
    grad: Tensor, weight: Tensor, prob: Tensor, key: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return g m and g w dm/ds."""
    kernels = kernels_for("relaxation_kernels", weight, prob, grad)
    if kernels is not None:
        return _backward(kernels, grad, weight, prob, key, temperature)
    L = noise.logistic(prob.shape, key)
    m = torch.sigmoid((logit(prob) + L) / temperature)
    slope = relaxed_slope(prob, L, temperature)
    g = _at_least_fp32(grad)
    grad_prob = (g * _at_least_fp32(weight)).to(prob.dtype) * slope
    return (g * m).to(weight.dtype), grad_prob


def _straight_gradients(
    grad: Tensor, weight: Tensor, prob: Tensor, key: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return g m and g w."""
    grad_prob = (_at_least_fp32(grad) * _at_least_fp32(weight)).to(prob.dtype)
    return _times_mask(grad, prob, key, temperature), grad_prob


def _times_mask(x: Tensor, prob: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    """Return x m, in the dtype of x."""
    kernels = kernels_for("relaxation_kernels", x, prob)
    if kernels is not None:
        return _forward(kernels, x, prob, key, temperature)
    m = torch.sigmoid((logit(prob) + noise.logistic(prob.shape, key)) / temperature)
    return (_at_least_fp32(x) * m).to(x.dtype)


def _forward(
    kernels: Any, weight: Tensor, prob: Tensor, key: Tensor, temperature: Tensor
) -> Tensor:
    w, s = _flat(weight), _flat(prob)
    out = _empty_result(weight)
    o = _flat(out)
    key0, key1, a = _scalars(key, temperature)

    def part(begin: int, end: int) -> None:
        p = slice(begin, end)
        kernels.forward(w[p], s[p], o[p], begin, key0, key1, a)

    map_parts(len(o), part)
    return _stored_like(weight, out)


def _backward(
    kernels: Any, grad: Tensor, weight: Tensor, prob: Tensor, key: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    g, w, s = _flat(grad), _flat(weight), _flat(prob)
    grad_weight = _empty_result(weight)
    grad_prob = _empty_result(prob)
    gw, gs = _flat(grad_weight), _flat(grad_prob)
    key0, key1, a = _scalars(key, temperature)
    at_ends = np.float32(a == 1)  # below τ = 1 the slope at s = 0 and s = 1 is zero

    def part(begin: int, end: int) -> None:
        p = slice(begin, end)
        kernels.backward(g[p], w[p], s[p], gw[p], gs[p], begin, key0, key1, a, at_ends)

    map_parts(len(g), part)
    return _stored_like(weight, grad_weight), _stored_like(prob, grad_prob)


def _scalars(key: Tensor, temperature: Tensor) -> tuple[Any, Any, Any]:
    """Return the words of the key and 1/τ, in the types that the kernels expect."""
    key0, key1 = key.tolist()
    return np.uint32(key0), np.uint32(key1), np.float32(1) / np.float32(temperature.item())


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _flat(x: Tensor) -> Any:
    """Return the entries in row-major order as a NumPy array; a copy if x is not row-major."""
    return _at_least_fp32(x.detach()).reshape(-1).numpy()


def _empty_result(x: Tensor) -> Tensor:
    """Return an uninitialized row-major tensor of the shape of x, at least fp32."""
    return empty_in_large_pages(x.shape, torch.promote_types(x.dtype, torch.float32))


def _stored_like(like: Tensor, computed: Tensor) -> Tensor:
    """Return ``computed`` in the dtype and memory order of ``like``."""
    if like.is_contiguous():
        return computed.to(like.dtype)
    return torch.empty_like(like).copy_(computed)
