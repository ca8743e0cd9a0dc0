"""Shrinking towards zero by a threshold, so that the large weights hardly notice."""

import numpy as np
import torch
from torch import Tensor

from probmask.core.compiled import in_parts, kernels_for


def cubic_shrink(weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
    """sign(w) (|w|³ - θ³)^⅓ where active, else 0  (Feather, BMVC 2023), of fp32 or fp64 weights.

    As w (1 - r³)^⅓ with r = θ / |w|, and 1 - r³ as (1 - r)(1 + r + r²), which loses nothing: |w|³
    would underflow for small weights.
    """
    kernels = kernels_for("shrink_kernels", weight, active, threshold)
    if kernels is not None and weight.dtype == torch.float32:
        out = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        w, a, o = (x.detach().reshape(-1).numpy() for x in (weight, active, out))
        cut = np.float32(threshold.item())

        def part(begin: int, end: int) -> None:
            kernels.cubic(w[begin:end], a[begin:end], cut, o[begin:end])

        in_parts(len(o), part)
        return out if weight.is_contiguous() else torch.empty_like(weight).copy_(out)
    size = weight.abs().clamp_min(torch.finfo(weight.dtype).tiny)
    ratio = threshold / size
    excess = ((size - threshold) / size).clamp_min(0.0)
    shrunk = weight * (excess * (1 + ratio + ratio.square())).pow(1 / 3)
    return torch.where(active, shrunk, 0.0)
