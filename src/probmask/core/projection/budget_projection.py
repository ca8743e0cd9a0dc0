"""Project the keep-probabilities of all layers, jointly, onto one budget."""

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from probmask.core.memory import storage_order
from probmask.core.projection.passes import (
    CompiledPasses,
    Cost,
    Entries,
    Extent,
    Passes,
    PlainPasses,
    Shift,
    Total,
    extremes,
    kernels_over,
)
from probmask.core.projection.root_finding import Sample, solve, stride_for
from probmask.errors import InputError, NonFiniteError


def project_(
    probs: Sequence[Tensor],
    keep: float,
    *,
    costs: Sequence[Tensor | float] | None = None,
    names: Sequence[str] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """argmin over s of ‖s - z‖² subject to 0 ≤ s ≤ 1 and Σ c·s ≤ keep, in place.

    ProbMask (CVPR 2021), theorem 1 (eq. 6 and 7): s = clip(z - v·c, 0, 1) with v = max(0, v₁),
    where v₁ solves Σ c·clip(z - v₁·c, 0, 1) = keep. The paper has c = 1 and bisects. Here a sample
    of the entries predicts v, and two to four passes over all entries correct it. If the budget is
    active, the written values meet it to 1e-6·keep, unless they underflow their dtype.

    Args:
        probs: the tensors z, overwritten by s; float32 or float64, on one device.
        keep: the budget, ≥ 0.
        costs: c, positive; one number or one tensor of the same shape per tensor; 1 by default.
        names: the names of the tensors, for error messages.
        reduce: a function that sums a small 1-D fp64 tensor over all ranks, if each rank has a
            shard of the entries.

    Returns:
        v, the shift.

    Raises:
        InputError: if the budget is negative, a cost is not positive and finite, numbers or shapes
            do not match, or a dtype or device is not supported.
        NonFiniteError: if a tensor contains NaN or infinity; no tensor is changed then.

    Example:
        >>> s = torch.tensor([1.0, 0.75, 0.25])
        >>> project_([s], 1.25)
        0.25
        >>> s.tolist()
        [0.75, 0.5, 0.0]
    """
    if not keep >= 0:
        raise InputError(
            f"project_(keep={keep}): keep is the budget for Σ c·s and must be ≥ 0; "
            "to keep 2 % of n entries pass 0.02 * n."
        )

    def total(part: Tensor) -> list[float]:
        whole: list[float] = (reduce(part) if reduce else part).tolist()
        return whole

    keep = float(keep)  # NumPy scalars warn on overflow to infinity, Python floats do not
    sites = _sites(probs, costs, names)
    passes, n = _passes(sites, total)
    extent = _survey(sites, passes, n, total)
    if keep == 0 or extent.top == 0:
        shift = Shift(extent.top, extent.top, 1.0)  # every v ≥ max z/c gives Σ c·s = 0
    else:
        shift = solve(passes, Sample(passes, extent, total), keep, extent)
    passes.write_(shift)
    for site in sites:
        if not site.ordered.is_contiguous():
            site.ordered.copy_(site.z.view(site.ordered.shape))
    return shift.share * shift.a + (1 - shift.share) * shift.b


def _sites(
    probs: Sequence[Tensor], costs: Sequence[Cost] | None, names: Sequence[str] | None
) -> list[Entries]:
    costs = [1.0] * len(probs) if costs is None else costs
    names = [f"tensor {i}" for i in range(len(probs))] if names is None else names
    for label, given in (("costs", costs), ("names", names)):
        if len(given) != len(probs):
            raise InputError(
                f"project_({len(given)} {label} for {len(probs)} tensors): pass one for each "
                "tensor, in the same order."
            )
    return [_site(*one) for one in zip(probs, costs, names, strict=True)]


def _site(z: Tensor, c: Cost, name: str) -> Entries:
    if z.device.type == "mps":
        raise InputError(
            f"project_({name} on {z.device}): the budget is summed in float64, which this device "
            "does not support; train on the CPU."
        )
    if z.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"project_({name} of dtype {z.dtype}): the budget can only be met in float32 or "
            "float64; keep the probabilities in float32."
        )
    order = storage_order(z)  # in this order a dense tensor is flattened without a copy
    if isinstance(c, Tensor):
        if c.shape != z.shape:
            raise InputError(
                f"project_(costs of shape {tuple(c.shape)} for {name}): the tensor has shape "
                f"{tuple(z.shape)}; pass a number or a tensor of that shape."
            )
        c = c.detach().permute(order).reshape(-1)
    ordered = z.detach().permute(order)
    return Entries(ordered, ordered.reshape(-1), c, name)


def _passes(sites: Sequence[Entries], total: Total) -> tuple[Passes, int]:
    """Return the passes to use, and the number of entries on all ranks.

    They are compiled only if every rank can use kernels. Otherwise the ranks would evaluate
    different values of v.
    """
    kernels = kernels_over(sites)
    found = [float(kernels is None), float(sum(len(site.z) for site in sites))]
    device = sites[0].z.device if sites else None
    without, n = total(torch.tensor(found, dtype=torch.float64, device=device))
    if without:
        return PlainPasses(sites, total), int(n)
    return CompiledPasses(kernels, sites, total), int(n)


def _survey(sites: Sequence[Entries], passes: Passes, n: int, total: Total) -> Extent:
    """Return the extent of the entries; raise for costs and entries that have no projection."""
    costs = extremes([site.c for site in sites], empty=1.0)
    for site, (low, high) in zip(sites, costs, strict=True):
        if not (low > 0 and high < math.inf):
            raise InputError(
                f"project_(cost {high if low > 0 else low} for {site.name}): costs must be "
                "positive and finite; leave out of probs what costs nothing."
            )
    ends = passes.extremes(stride_for(n))
    finite = [math.isfinite(low) and math.isfinite(high) for low, high in ends]
    broken = [site.name for site, good in zip(sites, finite, strict=True) if not good]
    # `reduce` can only sum, and the sum of the maxima is an upper bound of all of them.
    top = sum(max(high, 0.0) / c for (_, high), (c, _) in zip(ends, costs, strict=True))
    found = [float(len(broken)), top]
    device = sites[0].z.device if sites else None
    failures, top = total(torch.tensor(found, dtype=torch.float64, device=device))
    if failures:
        raise NonFiniteError(
            f"project_({', '.join(broken) or 'a tensor of another rank'}): NaN and infinity have "
            "no projection. No tensor was changed; look for a loss or a gradient that diverged."
        )
    return Extent(
        least=min((low for low, _ in ends), default=0.0),
        most=max((high for _, high in ends), default=0.0),
        top=min(top * (1 + 1e-15), sys.float_info.max),  # 1e-15 covers the rounding of z/c and v·c
        n=n,
        unit=all(pair == (1, 1) for pair in costs),
    )
