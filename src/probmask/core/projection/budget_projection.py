"""Project the keep-probabilities of all layers, jointly, onto one budget.

The projection shifts all entries by the v at which the budget is met. Σ c·clip(z - v·c, 0, 1) is
piecewise linear in v and falls from its value at v = 0 to 0. A sample of the entries predicts where
it equals the budget; a few passes over all entries correct the prediction.
"""

import math
import struct
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from probmask.core.kernel_runner import storage_order
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
    float32,
    kernels_over,
)
from probmask.core.shards import WHOLE, Shards
from probmask.errors import InputError, NonFiniteError

# The sample has at least _SAMPLE entries, if there are that many, and at least every _STRIDE-th. It
# predicts sums to about 1 %.
_SAMPLE, _STRIDE = 1 << 15, 256
_SENT = 1 << 12  # entries that the ranks send to each other
# The search stops at |Σ c·s - keep| / keep below this; rounding s to fp32 adds at most 1.2e-7.
_TOLERANCE = 2e-7


def project_(
    probs: Sequence[Tensor],
    keep: float,
    *,
    costs: Sequence[Tensor | float] | None = None,
    names: Sequence[str] | None = None,
    shards: Shards = WHOLE,
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
        shards: the division of the entries, if each rank has a shard of them. The ranks send a
            few scalars and one sample of at most 64 KiB.

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
        whole: list[float] = shards.total(part).tolist()
        return whole

    keep = float(keep)  # NumPy scalars warn on overflow to infinity, Python floats do not
    sites = _sites(probs, costs, names)
    passes, n = _passes(sites, total)
    extent = _survey(sites, passes, n, total)
    if keep == 0 or extent.top == 0:
        shift = Shift(extent.top, extent.top, 1.0)  # every v ≥ max z/c gives Σ c·s = 0
    else:
        shift = _solve(passes, _Sample(passes, extent, shards), keep, extent)
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
                "positive and finite; do not pass tensors without a cost."
            )
    ends = passes.extremes(_stride_for(n))
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


def _solve(passes: Passes, sample: "_Sample", keep: float, extent: Extent) -> Shift:
    """Return the v ≥ 0 with Σ c·clip(z - v·c, 0, 1) = keep (theorem 1, eq. 7)."""
    bracket = _Bracket(extent.top, keep)
    # Where fp64 is slower, start with sums in fp32, whose error is at most 1e-6.
    exact = passes.always_exact or sample.scale == 1 or extent.top > 2**20
    proposal = sample.invert(keep, 0.0, within=(1e-12 if sample.scale == 1 else 1e-3) * keep)
    v = 0.0
    while bracket.admits(proposal):
        v = proposal
        if not passes.always_exact:
            v = _rounded(v, extent, (1e-7 if exact else 3e-5) * keep)
        excess = passes.weighted_sum(v, keep, extent, exact=exact) - keep
        if (exact and abs(excess) <= _TOLERANCE * keep) or (v == 0 and excess < 0):
            return Shift(v, v, 1.0)
        proposal = sample.predict(v, excess)
        if exact or abs(excess) > 1e-5 * keep:  # else the sign could be an fp32 rounding error
            bracket.tighten(v, excess)
        exact = exact or abs(excess) <= 1e-4 * keep
    # The sample has too few of the entries between 0 and 1 to predict v. Search without it.
    bracket.last, bracket.stalled = math.inf, False
    return _newton(passes.sum_and_slope, keep, v, bracket, _TOLERANCE * keep)


def _newton(
    sum_and_slope: Callable[[float], list[float]],
    keep: float,
    v: float,
    bracket: "_Bracket",
    within: float,
) -> Shift:
    """Solve by safeguarded Newton steps from v, given the sum and its slope as functions of v."""
    while True:
        total, slope = sum_and_slope(v)
        excess = total - keep
        if abs(excess) <= within or (v == 0 and excess < 0):
            return Shift(v, v, 1.0)
        bracket.tighten(v, excess)
        if bracket.closed:
            return bracket.shift()
        # A zero slope means that every s is 0 or 1, as before training. Take the slope that the sum
        # has once the entries at 1 begin to fall.
        slope = slope or total
        proposal = max(0.0, v + excess / slope) if slope else math.nan
        v = proposal if bracket.admits(proposal) else bracket.middle()


class _Bracket:
    """lo < v < hi, with both ends stored as fp64 bit patterns, which have the order of the floats.

    Halving bit patterns reaches neighboring floats after about 60 steps, for any magnitude.
    """

    def __init__(self, top: float, keep: float) -> None:
        self.lo, self.hi = -1, _bits(top)  # -1: v = 0 is inside
        self.above, self.below = math.inf, -keep  # Σ c·s - keep at lo and at hi
        self.last, self.stalled = math.inf, False

    def tighten(self, v: float, excess: float) -> None:
        """Replace one end by v, and note whether the excess less than halved."""
        if excess > 0:
            self.lo, self.above = _bits(v), excess
        else:
            self.hi, self.below = _bits(v), excess
        self.last, self.stalled = abs(excess), abs(excess) > self.last / 2

    @property
    def closed(self) -> bool:
        """Whether no fp64 number is left between the ends."""
        return self.hi - self.lo <= 1

    def shift(self) -> Shift:
        """Return the mixture of both ends that meets the budget."""
        share = -self.below / (self.above - self.below)
        return Shift(_float(self.lo), _float(self.hi), share)

    def admits(self, v: float) -> bool:
        """Return whether v is inside and the previous step at least halved the excess."""
        return self.lo < _bits(v) < self.hi and not self.stalled

    def middle(self) -> float:
        """Return the middle bit pattern, at most 8 octaves below hi.

        The limit keeps the search out of the tiny numbers: half of all fp64 numbers are below
        1e-150.
        """
        return _float((max(self.lo, self.hi - (16 << 52)) + self.hi) // 2)


class _Sample:
    """Every stride-th entry; predicts Σ c·clip(z - v·c, 0, 1) and its inverse."""

    def __init__(self, passes: Passes, extent: Extent, shards: Shards) -> None:
        self.top = extent.top
        self.seen: tuple[float, float] | None = None
        if shards.count == 1:
            self.sum_and_slope, size = passes.sample()
        else:
            z, c = _gathered(*passes.sampled(), shards)
            self.sum_and_slope, size = PlainPasses([Entries(z, z, c, "")], Tensor.tolist).sample()
        self.scale = extent.n / max(1, size)

    def invert(self, keep: float, v: float, *, within: float) -> float:
        """Return the v at which the sample predicts a sum of ``keep``, searching from v."""
        bracket = _Bracket(self.top, keep / self.scale)
        return _newton(self.sum_and_slope, keep / self.scale, v, bracket, within / self.scale).a

    def predict(self, v: float, excess: float) -> float:
        """Return the v at which an excess found at v should vanish.

        This is a secant step in the sum of the sample. The sum of all entries is almost linear in
        the sum of the sample, for any distribution.
        """
        total = self.sum_and_slope(v)[0] * self.scale
        ratio = 1.0
        if self.seen and total != self.seen[0]:
            ratio = (excess - self.seen[1]) / (total - self.seen[0])
        self.seen = total, excess
        keep = total - excess / (ratio if 0.25 < ratio < 4 else 1.0)
        return self.invert(keep, v, within=1e-3 * abs(excess)) if keep > 0 else math.nan


def _gathered(z: Tensor, c: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    """Return the sampled entries of all ranks and their costs, at most _SENT of them.

    A search that asks all ranks for the sum at each v would take many more messages.
    """
    sizes = shards.gathered(torch.tensor([len(z)])).flatten().tolist()
    step = -(-sum(sizes) // _SENT) | 1
    longest = -(-max(sizes) // step)
    sent = z.new_full((2, longest), torch.nan)
    for row, x in zip(sent, (z, c), strict=True):
        row[: len(x[::step])] = x[::step]
    found = shards.gathered(sent).movedim(1, 0).flatten(1)
    z, c = found[:, ~found[0].isnan()]
    return z, c


def _stride_for(n: int) -> int:
    """Return the stride of the sample for n entries.

    It is odd: with a power of two, the sample could contain a single channel.
    """
    return min(n // _SAMPLE, _STRIDE) | 1


def _rounded(v: float, extent: Extent, spare: float) -> float:
    """Return v as an fp32 number, which saves operations, if this changes the sum by < spare."""
    return float32(v) if extent.unit and v * extent.n * 2**-25 <= spare else v


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
