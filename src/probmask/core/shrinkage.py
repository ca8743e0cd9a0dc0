"""Shrinking towards zero by a threshold, so that the large weights hardly notice."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.core.kernel_runner import in_parts, kernels_for
from probmask.core.memory import as_stored, room_like


def kept_part(weight: Tensor, threshold: Tensor, power: Tensor) -> Tensor:
    """s = (1 - (θ / |w|)^p)^(1/p) where |w| > θ, else 0, of fp32 or fp64 weights.

    p = 1 is the soft threshold, p = 3 Feather's (BMVC 2023), and with p to infinity it becomes the
    hard one. Computed from 1 - θ/|w|, so that nothing is lost close to the threshold.
    """
    size = weight.abs().clamp_min(torch.finfo(weight.dtype).tiny)
    excess = ((size - threshold) / size).clamp_min(0.0)
    return (-torch.expm1(power * torch.log1p(-excess))).pow(1 / power)


def power_shrink(weight: Tensor, active: Tensor, threshold: Tensor, power: Tensor) -> Tensor:
    """w s where active, else 0; s = `kept_part`. For p = 3: sign(w) (|w|³ - θ³)^⅓.

    With a threshold of zero it is the weight itself, to the bit.
    """
    kernels = kernels_for("shrinkage_kernels", weight, active, threshold, power)
    if kernels is None or weight.dtype != torch.float32:
        return torch.where(active, weight * kept_part(weight, threshold, power), 0.0)
    out = room_like(weight)
    w, a, o = _stored_like(out, weight, active, out)
    cut, p = np.float32(threshold.item()), np.float32(power.item())

    def part(begin: int, end: int) -> None:
        kernels.power(w[begin:end], a[begin:end], cut, p, o[begin:end])

    in_parts(len(o), part)
    return out


def power_grow(size: Tensor, threshold: Tensor, power: Tensor) -> Tensor:
    """The |w| that `power_shrink` takes to ``size``: (size^p + θ^p)^(1/p); θ itself to 0."""
    larger = torch.maximum(size, threshold).clamp_min(torch.finfo(size.dtype).tiny)
    total = (size / larger).pow(power) + (threshold / larger).pow(power)
    return larger * total.pow(1 / power)


def temper_removed(grad: Tensor, active: Tensor, share: Tensor, *, most: float) -> Tensor:
    """Outside the active entries share·g, g first clamped to ± most times the RMS inside; else g.

    Laid out as ``active`` is. With nothing active there is nothing to compare with: all is zero.
    """
    kernels = kernels_for("shrinkage_kernels", grad, active, share)
    if kernels is None or grad.dtype != torch.float32 or grad.requires_grad:
        inside = torch.where(active, grad, 0.0).double().square().sum()
        rms = (inside / active.count_nonzero().clamp_min(1)).sqrt().to(grad.dtype)
        return torch.where(active, grad, share.to(grad.dtype) * grad.clamp(-most * rms, most * rms))
    out = room_like(active)
    g, a, o = _stored_like(out, grad, active, out)
    sums = in_parts(len(g), lambda begin, end: kernels.squares(g[begin:end], a[begin:end]))
    total, count = sum(part[0] for part in sums), sum(part[1] for part in sums)
    limit = np.float32(most * math.sqrt(total / count) if count else 0.0)
    factor = np.float32(share.item())

    def part(begin: int, end: int) -> None:
        kernels.temper(g[begin:end], a[begin:end], factor, limit, o[begin:end])

    in_parts(len(g), part)
    return out


def _stored_like(out: Tensor, *tensors: Tensor) -> list[Any]:
    """The entries of each as NumPy has them, in the order that ``out`` has in memory."""
    found = []
    for tensor in tensors:
        vectors = as_stored(out, tensor.detach())
        if vectors is None:
            laid_out = torch.empty_like(out, dtype=tensor.dtype)
            vectors = as_stored(out, laid_out.copy_(tensor.detach()))
        assert vectors is not None
        found.append(vectors[1].numpy())
    return found
