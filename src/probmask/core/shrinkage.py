"""Shrinkage of weights by a threshold θ, and the gradients of the pruned weights.

In ProbMask with tied probabilities, s is the fraction of a weight that remains after shrinkage, and
the temperature is 1/p. Feather is the case p = 3.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.core.kernel_runner import (
    empty_like_in_large_pages,
    kernels_for,
    map_parts,
    storage_vectors,
)


def kept_part(weight: Tensor, threshold: Tensor, power: Tensor) -> Tensor:
    """s = (1 - (θ / |w|)^p)^(1/p) where |w| > θ, else 0.

    p = 1 is the soft threshold, p = 3 is Feather's (BMVC 2023), and p → ∞ is the hard threshold.
    Computed from 1 - θ/|w|, so that s is accurate close to the threshold.

    Args:
        weight: w, fp32 or fp64.
        threshold: θ ≥ 0, a 0-D tensor.
        power: p ≥ 1, a 0-D tensor.

    Returns:
        s, in [0, 1].

    Example:
        >>> kept_part(torch.tensor([0.5, -2.0]), torch.tensor(1.0), torch.tensor(1.0)).tolist()
        [0.0, 0.5]
    """
    size = weight.abs().clamp_min(torch.finfo(weight.dtype).tiny)
    excess = ((size - threshold) / size).clamp_min(0.0)
    return (-torch.expm1(power * torch.log1p(-excess))).pow(1 / power)


def power_shrink(weight: Tensor, active: Tensor, threshold: Tensor, power: Tensor) -> Tensor:
    """w s where active, else 0, with s of `kept_part`; for p = 3, sign(w) (|w|³ - θ³)^⅓.

    For θ = 0 the active entries are the weight itself, bit for bit.

    Args:
        weight: w, fp32 or fp64.
        active: the mask of kept weights.
        threshold: θ ≥ 0, a 0-D tensor.
        power: p ≥ 1, a 0-D tensor.

    Returns:
        The shrunk weight, in the memory order of ``weight``.

    Example:
        >>> w, kept = torch.tensor([0.5, -2.0]), torch.tensor([False, True])
        >>> power_shrink(w, kept, torch.tensor(1.0), torch.tensor(1.0)).tolist()
        [0.0, -1.0]
    """
    kernels = kernels_for("shrinkage_kernels", weight, active, threshold, power)
    if kernels is None or weight.dtype != torch.float32:
        return torch.where(active, weight * kept_part(weight, threshold, power), 0.0)
    out = empty_like_in_large_pages(weight)
    w, a, o = _arrays(out, weight, active, out)
    theta, p = np.float32(threshold.item()), np.float32(power.item())

    def part(begin: int, end: int) -> None:
        kernels.power(w[begin:end], a[begin:end], theta, p, o[begin:end])

    map_parts(len(o), part)
    return out


@dataclass(frozen=True)
class Growth:
    """The rule u = sign(w) (|w|^p - c |w₀|^p)^(1/p) where positive, else 0: growth since the start.

    For p = 2 and c = 1, u² = w² - w₀² is what ProbMask's update accumulates in a probability
    (docs/methods/probmask-tied.md). u is `power_shrink` of w with a threshold of c^(1/p) |w₀|, so
    it is never larger than w.

    Args:
        initial: w₀, in any floating-point dtype.
        fraction: c in [0, 1], a 0-D tensor.
        power: p ≥ 1, a 0-D tensor.

    Example:
        >>> start, half = torch.tensor([-4.0, 2.0]), torch.tensor(0.5)
        >>> growth = Growth(start, torch.tensor(1.0), torch.tensor(2.0))
        >>> growth(torch.tensor([5.0, -1.0])).tolist()
        [3.0, -0.0]
    """

    initial: Tensor
    fraction: Tensor
    power: Tensor

    def __call__(self, weight: Tensor) -> Tensor:
        """Return u in at least fp32, in the memory order of ``weight``."""
        weight = weight if weight.dtype == torch.float64 else weight.float()
        kernels = self._kernels(weight)
        if kernels is None:
            start = self.factor * self.initial.to(weight.dtype).abs()
            return weight * kept_part(weight, start, self.power)
        out = empty_like_in_large_pages(weight)
        w, start, o = _arrays(out, weight, self.initial, out)
        factor = np.float32(self.factor.item())

        def part(begin: int, end: int) -> None:
            kernels.outgrow(w[begin:end], start[begin:end], factor, o[begin:end])

        map_parts(len(o), part)
        return out

    def shrink(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        """Return ``power_shrink(u, active, threshold, power)`` without computing all of u."""
        kernels = self._kernels(weight, active, threshold)
        if kernels is None:
            return power_shrink(self(weight), active, threshold, self.power)
        out = empty_like_in_large_pages(weight)
        w, start, a, o = _arrays(out, weight, self.initial, active, out)
        factor, theta = np.float32(self.factor.item()), np.float32(threshold.item())

        def part(begin: int, end: int) -> None:
            some = slice(begin, end)
            kernels.outgrow_active(w[some], start[some], factor, a[some], theta, o[some])

        map_parts(len(o), part)
        return out

    @property
    def factor(self) -> Tensor:
        """c^(1/p): u is zero up to this times |w₀|."""
        return self.fraction.pow(1 / self.power)

    def is_cubic(self, weight: Tensor) -> bool:
        """Return whether the kernels for p = 3 can compute the growth of this weight."""
        kernels = kernels_for("shrinkage_kernels", weight, self.initial, self.power)
        fp32 = weight.dtype == self.initial.dtype == torch.float32
        return kernels is not None and fp32 and self.power.item() == 3

    def _kernels(self, weight: Tensor, *others: Tensor) -> Any:
        """Return the kernels for p = 3, if they work on these tensors."""
        return kernels_for("shrinkage_kernels", *others) if self.is_cubic(weight) else None


def power_grow(size: Tensor, threshold: Tensor, power: Tensor) -> Tensor:
    """|w| = (size^p + θ^p)^(1/p), the inverse of `power_shrink`: |w| shrinks to ``size``.

    Args:
        size: the size after shrinkage, not negative.
        threshold: θ ≥ 0, a 0-D tensor.
        power: p ≥ 1, a 0-D tensor.

    Returns:
        |w|, which is θ for a size of 0.

    Example:
        >>> power_grow(torch.tensor([0.0, 1.0]), torch.tensor(1.0), torch.tensor(1.0)).tolist()
        [1.0, 2.0]
    """
    larger = torch.maximum(size, threshold).clamp_min(torch.finfo(size.dtype).tiny)
    total = (size / larger).pow(power) + (threshold / larger).pow(power)
    return larger * total.pow(1 / power)


def bound_pruned_gradient(
    grad: Tensor, active: Tensor, outside: Tensor, *, most: float, rms: float | None = None
) -> Tensor:
    """g where active, else outside · clip(g, -b, b) with b = most · RMS of g over active entries.

    If no entry is active, b = 0 and the result is zero.

    Args:
        grad: g, the gradient of a weight.
        active: the mask of kept weights.
        outside: the factor on the gradient of pruned weights, a 0-D tensor.
        most: the bound on the gradient of a pruned weight, in units of the RMS.
        rms: the RMS, if ``grad`` is a shard of the gradient; by default it is computed.

    Returns:
        The bounded gradient, in the memory order of ``active`` where a kernel computes it.

    Example:
        >>> g, kept = torch.tensor([2.0, 1.0, 9.0]), torch.tensor([True, False, False])
        >>> bound_pruned_gradient(g, kept, torch.tensor(0.5), most=3.0).tolist()
        [2.0, 0.5, 3.0]
    """
    kernels = kernels_for("shrinkage_kernels", grad, active, outside)
    if kernels is None or grad.dtype != torch.float32 or grad.requires_grad:
        total, count = kept_squares(grad, active)
        found = (total / count.clamp_min(1)).sqrt() if rms is None else rms
        bound = most * torch.as_tensor(found).to(grad.device, grad.dtype)
        return torch.where(active, grad, outside.to(grad.dtype) * grad.clamp(-bound, bound))
    out = empty_like_in_large_pages(active)
    g, a, o = _arrays(out, grad, active, out)
    if rms is None:
        sum_of_squares, kept = _sum_parts(kernels, g, a)
        rms = math.sqrt(sum_of_squares / kept) if kept else 0.0
    limit = np.float32(most * rms)
    factor = np.float32(outside.item())

    def part(begin: int, end: int) -> None:
        kernels.temper(g[begin:end], a[begin:end], factor, limit, o[begin:end])

    map_parts(len(g), part)
    return out


def kept_squares(grad: Tensor, active: Tensor) -> Tensor:
    """(Σ g², number of entries) over the active entries, in fp64.

    Example:
        >>> kept_squares(torch.tensor([2.0, 1.0]), torch.tensor([True, False])).tolist()
        [4.0, 1.0]
    """
    kernels = kernels_for("shrinkage_kernels", grad, active)
    if kernels is None or grad.dtype != torch.float32 or grad.requires_grad:
        total = torch.where(active, grad, 0.0).double().square().sum()
        return torch.stack([total, active.count_nonzero().double()])
    return torch.tensor(_sum_parts(kernels, *_arrays(active, grad, active)), dtype=torch.float64)


def _sum_parts(kernels: Any, grad: Any, active: Any) -> tuple[float, int]:
    """Return Σ g² over the active entries, and their number."""
    sums = map_parts(
        len(grad), lambda begin, end: kernels.squares(grad[begin:end], active[begin:end])
    )
    return sum(part[0] for part in sums), sum(part[1] for part in sums)


def _arrays(out: Tensor, *tensors: Tensor) -> list[Any]:
    """Return the entries of each tensor as a NumPy array, in the memory order of ``out``."""
    plain = [tensor.detach() for tensor in tensors]
    vectors = storage_vectors(out, *plain)
    if vectors is None:
        vectors = storage_vectors(out, *(_in_order_of(out, tensor) for tensor in plain))
    assert vectors is not None
    return [vector.numpy() for vector in vectors[1:]]


def _in_order_of(out: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in the memory order of ``out``: itself, or a copy."""
    if storage_vectors(out, tensor) is not None:
        return tensor
    return torch.empty_like(out, dtype=tensor.dtype).copy_(tensor)
