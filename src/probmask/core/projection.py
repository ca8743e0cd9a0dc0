"""Project the keep-probabilities of all layers, jointly, onto one budget."""

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from probmask.core.budget_root import (
    Chunks,
    Cost,
    Entries,
    Extent,
    Sample,
    Shift,
    Total,
    clip,
    solve,
)
from probmask.errors import InputError, NonFiniteError

# Entries handled at a time: they stay in cache, and dispatch costs little beside the arithmetic.
_CHUNK = 1 << 19


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
    extent = _survey(sites, total)
    chunks = _chunks(sites)
    if keep == 0 or extent.top == 0:
        shift = Shift(extent.top, extent.top, 1.0)  # every v ≥ max z/c leaves Σ c·s = 0
    else:
        shift = solve(chunks, Sample(sites, extent, total), keep, extent, total)
    for z, c in chunks:
        _write_(z, c, shift)
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
    # From the slowest dimension to the fastest, a dense tensor flattens without a copy.
    order = sorted(range(z.dim()), key=z.stride, reverse=True)
    if isinstance(c, Tensor):
        if c.shape != z.shape:
            raise InputError(
                f"project_(costs of shape {tuple(c.shape)} for {name}): the tensor has shape "
                f"{tuple(z.shape)}; pass a number or a tensor of that shape."
            )
        c = c.detach().permute(order).reshape(-1)
    ordered = z.detach().permute(order)
    return Entries(ordered, ordered.reshape(-1), c, name)


def _survey(sites: Sequence[Entries], total: Total) -> Extent:
    """The extent of the problem; an error for what has no projection."""
    costs = _extremes([site.c for site in sites], empty=1.0)
    for site, (low, high) in zip(sites, costs, strict=True):
        if not (low > 0 and high < math.inf):
            raise InputError(
                f"project_(cost {high if low > 0 else low} for {site.name}): costs must be "
                "positive and finite; leave out of probs what costs nothing."
            )
    ends = _extremes([site.z for site in sites], empty=0.0)
    finite = [math.isfinite(low) and math.isfinite(high) for low, high in ends]
    broken = [site.name for site, good in zip(sites, finite, strict=True) if not good]
    # The sum of the maxima bounds them all, and a sum is what `reduce` offers.
    top = sum(max(high, 0.0) / c for (_, high), (c, _) in zip(ends, costs, strict=True))
    found = [float(len(broken)), top, float(sum(len(site.z) for site in sites))]
    device = sites[0].z.device if sites else None
    failures, top, n = total(torch.tensor(found, dtype=torch.float64, device=device))
    if failures:
        raise NonFiniteError(
            f"project_({', '.join(broken) or 'a tensor of another rank'}): NaN and infinity have "
            "no projection; nothing was changed, look for a loss or gradient that diverged."
        )
    return Extent(
        least=min((low for low, _ in ends), default=0.0),
        most=max((high for _, high in ends), default=0.0),
        top=min(top * (1 + 1e-15), sys.float_info.max),  # 1e-15: z/c and v·c are rounded
        n=int(n),
        unit=all(pair == (1, 1) for pair in costs),
    )


def _extremes(values: Sequence[Cost], *, empty: float) -> list[tuple[float, float]]:
    """(min, max) of each, NaN if that is among the entries; waits for the device only once."""
    tensors = [t for t in values if isinstance(t, Tensor)]
    pairs = [torch.stack(t.aminmax()) if len(t) else t.new_full((2,), empty) for t in tensors]
    found = iter(torch.stack([pair.double() for pair in pairs]).tolist() if pairs else [])
    return [tuple(next(found)) if isinstance(t, Tensor) else (t, t) for t in values]


def _chunks(sites: Sequence[Entries]) -> Chunks:
    chunks: Chunks = []
    for site in sites:
        z = torch.split(site.z, _CHUNK)
        c = torch.split(site.c, _CHUNK) if isinstance(site.c, Tensor) else [site.c] * len(z)
        chunks += zip(z, c, strict=True)
    return chunks


def _write_(z: Tensor, c: Cost, shift: Shift) -> None:
    if shift.share == 1:
        clip(z, c, shift.a, out=z)
    else:
        z.copy_(clip(z, c, shift.a) * shift.share + clip(z, c, shift.b) * (1 - shift.share))
