"""The relaxed mask and its slope, in closed form and stable in fp32."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from probmask.core import noise
from probmask.core.kernel_runner import in_parts, kernels_for
from probmask.core.memory import room_for


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


def masked_draw(weight: Tensor, prob: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    """w m with m = sigmoid((ln s - ln(1 - s) + L) / tau), L the logistic noise of ``key``.

    As `relaxed_mask`, but neither mask nor noise is kept for the way back: both are computed
    again. ``prob`` and ``temperature`` are fp32, ``key`` (a `draw_key`) int64, all three tensors,
    so that a compiled graph depends on no value. A weight of half precision is rounded once.

    On the CPU compiled code computes this if Numba is there, elsewhere PyTorch; the uniforms are
    the same bits, the masks agree to a few units of the last place.
    """
    result: Tensor = _MaskedDraw.apply(weight, prob, key, temperature)  # type: ignore[no-untyped-call]
    return result


class _MaskedDraw(torch.autograd.Function):
    """Saves what is there anyway: weight and probabilities."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, prob: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
        ctx.save_for_backward(weight, prob, key, temperature)
        kernels = kernels_for("relaxation_kernels", weight, prob)
        if kernels is not None:
            return _forward(kernels, weight, prob, key, temperature)
        m = torch.sigmoid((logit(prob) + noise.logistic(prob.shape, key)) / temperature)
        return (_wide(weight) * m).to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, prob, key, temperature = ctx.saved_tensors
        kernels = kernels_for("relaxation_kernels", weight, prob, grad)
        if kernels is not None:
            to_weight, to_prob = _backward(kernels, grad, weight, prob, key, temperature)
        else:
            L = noise.logistic(prob.shape, key)
            m = torch.sigmoid((logit(prob) + L) / temperature)
            slope = relaxed_slope(prob, L, temperature)
            to_weight = (_wide(grad) * m).to(weight.dtype)
            to_prob = (_wide(grad) * _wide(weight)).to(prob.dtype) * slope
        return (to_weight if ctx.needs_input_grad[0] else None), to_prob, None, None


def _wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def _room_for(x: Tensor) -> Tensor:
    """For a result of this shape, in row-major order, in fp32 at least."""
    return room_for(x.shape, torch.promote_types(x.dtype, torch.float32))


def _flat(x: Tensor) -> Any:
    """The entries in row-major order, as NumPy has them; a copy where that is not how they lie."""
    return _wide(x.detach()).reshape(-1).numpy()


def _forward(
    kernels: Any, weight: Tensor, prob: Tensor, key: Tensor, temperature: Tensor
) -> Tensor:
    w, s = _flat(weight), _flat(prob)
    out = _room_for(weight)
    o = _flat(out)
    key0, key1, a = _scalars(key, temperature)

    def part(begin: int, end: int) -> None:
        piece = slice(begin, end)
        kernels.forward(w[piece], s[piece], o[piece], begin, key0, key1, a)

    in_parts(len(o), part)
    return _laid_out(out, weight)


def _backward(
    kernels: Any, grad: Tensor, weight: Tensor, prob: Tensor, key: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    g, w, s = _flat(grad), _flat(weight), _flat(prob)
    to_weight = _room_for(weight)
    to_prob = _room_for(prob)
    gw, gs = _flat(to_weight), _flat(to_prob)
    key0, key1, a = _scalars(key, temperature)
    at_ends = np.float32(a == 1)  # below temperature 1 nothing comes back from 0 or 1

    def part(begin: int, end: int) -> None:
        p = slice(begin, end)
        kernels.backward(g[p], w[p], s[p], gw[p], gs[p], begin, key0, key1, a, at_ends)

    in_parts(len(g), part)
    return _laid_out(to_weight, weight), _laid_out(to_prob, prob)


def _scalars(key: Tensor, temperature: Tensor) -> tuple[Any, Any, Any]:
    """The key's words and the inverse temperature, of the types that the kernels take."""
    key0, key1 = key.tolist()
    return np.uint32(key0), np.uint32(key1), np.float32(1) / np.float32(temperature.item())


def _laid_out(computed: Tensor, like: Tensor) -> Tensor:
    """Of the other's dtype and order in memory."""
    if like.is_contiguous():
        return computed.to(like.dtype)
    return torch.empty_like(like).copy_(computed)
