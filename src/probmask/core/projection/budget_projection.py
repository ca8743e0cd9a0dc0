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
    """argmin over s of ‖s - z‖² subject to 0 ≤ s ≤ 1 and Σ c·s ≤ keep, in place; returns v.

    ProbMask (CVPR 2021), Theorem 1: s = clip(z - v·c, 0, 1) with v = max(0, v₁), where v₁ solves
    Σ c·clip(z - v₁·c, 0, 1) = keep. The paper has c = 1 and bisects; here a sample of the entries
    predicts v and two to four passes over all of them correct it. The values as written meet an
    active budget to 1e-6·keep, unless they are too small for their dtype.

    Args:
        probs: the tensors z, overwritten by s; float32 or float64, on one device.
        keep: the budget.
        costs: positive; per tensor a number or a tensor of its shape; 1 by default.
        names: what errors call the tensors.
        reduce: sums a small 1-D fp64 tensor over the ranks, if each holds a shard of the entries.
    """
    if not keep >= 0:
        raise InputError(
            f"project_(keep={keep}): keep is the budget for Σ c·s, must be ≥ 0; "
            "to keep 2 % of n entries pass 0.02 * n."
        )

    def total(part: Tensor) -> list[float]:
        whole: list[float] = (reduce(part) if reduce else part).tolist()
        return whole

    keep = float(keep)  # numpy's numbers would warn where ours turn infinite
    sites = _sites(probs, costs, names)
    passes, n = _passes(sites, total)
    extent = _survey(sites, passes, n, total)
    if keep == 0 or extent.top == 0:
        shift = Shift(extent.top, extent.top, 1.0)  # every v ≥ max z/c leaves Σ c·s = 0
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
                f"project_({len(given)} {label} for {len(probs)} tensors): {label} belong to "
                "tensors one to one; pass as many, in the same order."
            )
    return [_site(*one) for one in zip(probs, costs, names, strict=True)]


def _site(z: Tensor, c: Cost, name: str) -> Entries:
    if z.device.type == "mps":
        raise InputError(
            f"project_({name} on {z.device}): the budget is summed in float64, which this device "
            "does not have; train on the CPU."
        )
    if z.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"project_({name} of dtype {z.dtype}): a budget can only be met in float32 or "
            "float64; keep the probabilities in float32."
        )
    order = storage_order(z)  # in which a dense tensor flattens without a copy
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
    """The way to pass over the entries, and their number on all ranks.

    Compiled unless some rank cannot: the others would look at other values of v.
    """
    kernels = kernels_over(sites)
    found = [float(kernels is None), float(sum(len(site.z) for site in sites))]
    device = sites[0].z.device if sites else None
    without, n = total(torch.tensor(found, dtype=torch.float64, device=device))
    if without:
        return PlainPasses(sites, total), int(n)
    return CompiledPasses(kernels, sites, total), int(n)


def _survey(sites: Sequence[Entries], passes: Passes, n: int, total: Total) -> Extent:
    """The extent of the problem; an error for what has no projection."""
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
    # The sum of the maxima bounds them all, and a sum is what `reduce` offers.
    top = sum(max(high, 0.0) / c for (_, high), (c, _) in zip(ends, costs, strict=True))
    found = [float(len(broken)), top]
    device = sites[0].z.device if sites else None
    failures, top = total(torch.tensor(found, dtype=torch.float64, device=device))
    if failures:
        raise NonFiniteError(
            f"project_({', '.join(broken) or 'a tensor of another rank'}): NaN and infinity have "
            "no projection; nothing was changed, look for a loss or gradient that diverged."
        )
    return Extent(
        least=min((low for low, _ in ends), default=0.0),
        most=max((high for _, high in ends), default=0.0),
        top=min(top * (1 + 1e-15), sys.float_info.max),  # 1e-15: z/c and v·c are rounded
        n=n,
        unit=all(pair == (1, 1) for pair in costs),
    )
