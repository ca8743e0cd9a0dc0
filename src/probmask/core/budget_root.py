"""The root behind the projection: the shift v at which a budget is met.

Σ c·clip(z - v·c, 0, 1) falls with v, piecewise linearly, from everything to nothing. A sample of
the entries predicts where it takes the value sought; a few passes over all of them correct that.
"""

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softshrink

# The sample holds at least that many entries and every 256th: it predicts sums to 1 % or so.
_SAMPLE, _STRIDE = 1 << 15, 256
# |Σ c·s - keep| / keep at which the search stops; rounding s to fp32 adds at most 1.2e-7.
_TOLERANCE = 2e-7
_FLOAT32_MAX = torch.finfo(torch.float32).max

Cost = Tensor | float
Chunks = list[tuple[Tensor, Cost]]
Total = Callable[[Tensor], list[float]]


class Entries(NamedTuple):
    """A tensor with its dimensions in memory order, its flat entries and costs, its name."""

    ordered: Tensor
    z: Tensor  # a view of `ordered` where that is dense, else a copy
    c: Cost
    name: str


class Extent(NamedTuple):
    """Bounds of z on this rank; a bound of z/c and the number of entries on all; is c = 1?"""

    least: float
    most: float
    top: float
    n: int
    unit: bool


class Shift(NamedTuple):
    """s = share·clip(z - a·c, 0, 1) + (1 - share)·clip(z - b·c, 0, 1), a = b or fp64 neighbours.

    One fp64 number cannot always express v: entries tied at 1e30 fall from 1 to 0 between two
    neighbours. Mixing the two sides is exact for ties and meets the budget in any case.
    """

    a: float
    b: float
    share: float


def solve(chunks: Chunks, sample: "Sample", keep: float, extent: Extent, total: Total) -> Shift:
    """The v ≥ 0 at which Σ c·clip(z - v·c, 0, 1) falls to keep, by predictions of the sample."""
    bracket = _Bracket(extent.top, keep)
    # fp64 takes longer; sums in fp32 are off by up to 1e-6, which is good enough to start with.
    exact = sample.scale == 1 or extent.top > 2**20
    proposal = sample.invert(keep, 0.0, within=(1e-12 if sample.scale == 1 else 1e-3) * keep)
    v = 0.0
    while bracket.admits(proposal):
        v = _rounded(proposal, extent, (1e-7 if exact else 3e-5) * keep)
        excess = _kept(chunks, v, keep, extent, total, exact=exact) - keep
        if (exact and abs(excess) <= _TOLERANCE * keep) or (v == 0 and excess < 0):
            return Shift(v, v, 1.0)
        proposal = sample.predict(v, excess)
        if exact or abs(excess) > 1e-5 * keep:  # else fp32 could have got the side wrong
            bracket.tighten(v, excess)
        exact = exact or abs(excess) <= 1e-4 * keep
    # The sample misleads: it has seen too few of the entries that matter.
    bracket.last, bracket.stalled = math.inf, False
    return _newton(partial(_spent, chunks, total), keep, v, bracket, _TOLERANCE * keep)


def _newton(
    spent: Callable[[float], list[float]], keep: float, v: float, bracket: "_Bracket", within: float
) -> Shift:
    """The same by Newton steps from v, given the sum and its slope as functions of v."""
    while True:
        kept, slope = spent(v)
        excess = kept - keep
        if abs(excess) <= within or (v == 0 and excess < 0):
            return Shift(v, v, 1.0)
        bracket.tighten(v, excess)
        if bracket.closed:
            return bracket.shift()
        slope = slope or kept  # all at 1, as before training: let them begin to fall here
        proposal = max(0.0, v + excess / slope) if slope else math.nan
        v = proposal if bracket.admits(proposal) else bracket.middle()


def _spent(chunks: Chunks, total: Total, v: float) -> list[float]:
    """Σ c·clip(z - v·c, 0, 1), and by how much it falls per unit of v: Σ c² where 0 < s < 1."""
    sums = []
    for z, c in chunks:
        s = clip(z, c, v, exact=True)
        sums.append(torch.stack(((s * c).sum(), (s.frac_().ceil_() * c**2).sum())))
    return total(torch.stack(sums).sum(0) if sums else torch.zeros(2).double())


def _kept(
    chunks: Chunks, v: float, keep: float, extent: Extent, total: Total, *, exact: bool
) -> float:
    """Σ c·clip(z - v·c, 0, 1), in fp64 if exact; by fewer operations where c = 1 allows it."""
    simple = extent.unit and (exact or v == _float32(v))
    # Σ clip(z, v, v+1) - n·v is the same sum, unless cancellation makes it worse.
    shifted = simple and v * extent.n <= (1e6 if exact else 3) * keep
    unsaturated = simple and -v <= extent.least and extent.most - v <= 1
    sums = []
    for z, c in chunks:
        if shifted:
            s = z.to(torch.float64, copy=True).clamp_(v, v + 1) if exact else z.clamp(v, v + 1)
            sums.append(s.sum().double() - v * len(z))
        elif unsaturated:
            sums.append(softshrink(z.double() if exact else z, v).sum().double())
        else:
            s = clip(z, c, v, exact=exact)
            sums.append((s * c).sum() if isinstance(c, Tensor) else s.sum().double() * c)
    return total(torch.stack(sums).sum(0, keepdim=True) if sums else torch.zeros(1).double())[0]


class _Bracket:
    """lo < v < hi, the ends as fp64 bit patterns, which order like the numbers they stand for.

    So halving it ends at neighbours after some 60 steps, whatever the magnitude.
    """

    def __init__(self, top: float, keep: float) -> None:
        self.lo, self.hi = -1, _bits(top)  # -1: v = 0 is inside
        self.above, self.below = math.inf, -keep  # Σ c·s - keep at lo, at hi
        self.last, self.stalled = math.inf, False

    def tighten(self, v: float, excess: float) -> None:
        """Replace one end by v."""
        if excess > 0:
            self.lo, self.above = _bits(v), excess
        else:
            self.hi, self.below = _bits(v), excess
        self.last, self.stalled = abs(excess), abs(excess) > self.last / 2

    @property
    def closed(self) -> bool:
        """No fp64 number is left between the ends."""
        return self.hi - self.lo <= 1

    def shift(self) -> Shift:
        """The mixture of the two ends at which the budget is met."""
        share = -self.below / (self.above - self.below)
        return Shift(_float(self.lo), _float(self.hi), share)

    def admits(self, v: float) -> bool:
        """Whether v is inside, and the step before it paid."""
        return self.lo < _bits(v) < self.hi and not self.stalled

    def middle(self) -> float:
        """Half way, but no more than 8 octaves down: half of all fp64 numbers are below 1e-150."""
        return _float((max(self.lo, self.hi - (16 << 52)) + self.hi) // 2)


class Sample:
    """Every stride-th entry: predicts Σ c·clip(z - v·c, 0, 1) and where it takes a value."""

    def __init__(self, sites: Sequence[Entries], extent: Extent, total: Total) -> None:
        # Odd: a power of two could see no more than one input channel.
        stride = min(extent.n // _SAMPLE, _STRIDE) | 1
        self.top = extent.top
        self.seen: tuple[float, float] | None = None
        # Joined, many small tensors take no longer than one.
        z = torch.cat([site.z[::stride].double() for site in sites] or [torch.zeros(0).double()])
        self.scale = extent.n / max(1.0, total(z.new_tensor([len(z)]))[0])
        inside = z > 0  # the others are 0 at every v ≥ 0
        c: Cost = 1.0
        if not extent.unit:
            each = [torch.as_tensor(site.c, dtype=z.dtype, device=z.device) for site in sites]
            each = [t.expand(len(site.z))[::stride] for t, site in zip(each, sites, strict=True)]
            c = torch.cat(each)[inside] if each else 1.0
        self.spent = partial(_spent, [(z[inside], c)], total)

    def invert(self, keep: float, v: float, *, within: float) -> float:
        """Where the sample expects the sum to be keep."""
        bracket = _Bracket(self.top, keep / self.scale)
        return _newton(self.spent, keep / self.scale, v, bracket, within / self.scale).a

    def predict(self, v: float, excess: float) -> float:
        """Where the excess found at v should vanish: a secant step in the sample's own sum.

        Over the sample's sum the full one is all but a straight line, whatever the distribution.
        """
        kept = self.spent(v)[0] * self.scale
        ratio = 1.0
        if self.seen and kept != self.seen[0]:
            ratio = (excess - self.seen[1]) / (kept - self.seen[0])
        self.seen = kept, excess
        keep = kept - excess / (ratio if 0.25 < ratio < 4 else 1.0)
        return self.invert(keep, v, within=1e-3 * abs(excess)) if keep > 0 else math.nan


def clip(z: Tensor, c: Cost, v: float, *, exact: bool = False, out: Tensor | None = None) -> Tensor:
    """clip(z - v·c, 0, 1), in fp64 if exact; v rounded to fp32 could already break the budget."""
    if exact or isinstance(c, Tensor) or z.dtype == torch.float64:
        s = z.to(torch.float64, copy=True)
        s = (s.sub_(c, alpha=v) if isinstance(c, Tensor) else s.sub_(v * c)).clamp_(0, 1)
        return s if out is None else out.copy_(s)
    # v·c = high + low, two fp32 numbers: as good as fp64 for each entry, at half the cost.
    high = _float32(v * c)
    low = v * c - high
    s = torch.sub(z, high, out=out)
    return (s.sub_(low) if low else s).clamp_(0, 1)


def _rounded(v: float, extent: Extent, spare: float) -> float:
    """v as an fp32 number, which saves operations, if that moves the sum by no more than spare."""
    return _float32(v) if extent.unit and v * extent.n * 2**-25 <= spare else v


def _float32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", min(x, _FLOAT32_MAX)))[0])


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
