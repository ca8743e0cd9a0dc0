"""Shrinking towards zero by a threshold, so that the large weights hardly notice."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.core.compiled import in_parts, kernels_for
from probmask.core.large_pages import room_for


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
    kernels = kernels_for("shrink_kernels", weight, active, threshold, power)
    if kernels is not None and weight.dtype == torch.float32:
        out = room_for(weight.shape)
        w, a, o = _flat(weight), _flat(active), _flat(out)
        cut, p = np.float32(threshold.item()), np.float32(power.item())

        def part(begin: int, end: int) -> None:
            kernels.power(w[begin:end], a[begin:end], cut, p, o[begin:end])

        in_parts(len(o), part)
        return out if weight.is_contiguous() else torch.empty_like(weight).copy_(out)
    return torch.where(active, weight * kept_part(weight, threshold, power), 0.0)


def power_grow(size: Tensor, threshold: Tensor, power: Tensor) -> Tensor:
    """The |w| that `power_shrink` takes to ``size``: (size^p + θ^p)^(1/p); θ itself to 0."""
    larger = torch.maximum(size, threshold).clamp_min(torch.finfo(size.dtype).tiny)
    total = (size / larger).pow(power) + (threshold / larger).pow(power)
    return larger * total.pow(1 / power)


def temper_removed_(grad: Tensor, active: Tensor, *, share: float, most: float) -> None:
    """Outside the active entries: g <- share g, g first clamped to ± most times the RMS inside.

    In place. With nothing active there is nothing to compare with: the gradient becomes zero.
    """
    kernels = kernels_for("shrink_kernels", grad, active)
    if kernels is not None and grad.dtype == torch.float32 and grad.is_contiguous():
        g, a = _flat(grad), _flat(active)
        sums = in_parts(len(g), lambda begin, end: kernels.squares(g[begin:end], a[begin:end]))
        total, count = sum(part[0] for part in sums), sum(part[1] for part in sums)
        limit = np.float32(most * math.sqrt(total / count) if count else 0.0)

        def part(begin: int, end: int) -> None:
            kernels.temper(g[begin:end], a[begin:end], np.float32(share), limit)

        in_parts(len(g), part)
        return
    inside = torch.where(active, grad, 0.0).double().square().sum()
    rms = (inside / active.count_nonzero().clamp_min(1)).sqrt().to(grad.dtype)
    grad.copy_(torch.where(active, grad, share * grad.clamp(-most * rms, most * rms)))


def _flat(x: Tensor) -> Any:
    """The entries in row-major order, as NumPy has them; a copy where that is not how they lie."""
    return x.detach().reshape(-1).numpy()
