"""A draw of the relaxed mask times the weight, in one pass, its noise stored nowhere."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from probmask.core.compiled import in_parts, kernels_for
from probmask.core.counter_noise import logistic
from probmask.core.large_pages import room_for
from probmask.core.relaxation import logit, relaxed_slope


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
        kernels = kernels_for("draw_kernels", weight, prob)
        if kernels is not None:
            return _forward(kernels, weight, prob, key, temperature)
        m = torch.sigmoid((logit(prob) + logistic(prob.shape, key)) / temperature)
        return (_wide(weight) * m).to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, prob, key, temperature = ctx.saved_tensors
        kernels = kernels_for("draw_kernels", weight, prob, grad)
        if kernels is not None:
            to_weight, to_prob = _backward(kernels, grad, weight, prob, key, temperature)
        else:
            noise = logistic(prob.shape, key)
            m = torch.sigmoid((logit(prob) + noise) / temperature)
            slope = relaxed_slope(prob, noise, temperature)
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
