"""The root behind the projection: the shift v at which a budget is met.

Σ c·clip(z - v·c, 0, 1) falls with v, piecewise linearly, from everything to nothing. A sample of
the entries predicts where it takes the value sought; a few passes over all of them correct that.
"""

import math
import struct
from collections.abc import Callable

import torch

from probmask.core.projection.passes import Extent, Passes, Shift, Total, float32

# The sample holds at least that many entries and every 256th: it predicts sums to 1 % or so.
_SAMPLE, _STRIDE = 1 << 15, 256
# |Σ c·s - keep| / keep at which the search stops; rounding s to fp32 adds at most 1.2e-7.
_TOLERANCE = 2e-7


def solve(passes: Passes, sample: "Sample", keep: float, extent: Extent) -> Shift:
    """The v ≥ 0 at which Σ c·clip(z - v·c, 0, 1) falls to keep, by predictions of the sample."""
    bracket = _Bracket(extent.top, keep)
    # Where fp64 takes longer: sums in fp32 are off by up to 1e-6, good enough to start with.
    exact = passes.always_exact or sample.scale == 1 or extent.top > 2**20
    proposal = sample.invert(keep, 0.0, within=(1e-12 if sample.scale == 1 else 1e-3) * keep)
    v = 0.0
    while bracket.admits(proposal):
        v = proposal
        if not passes.always_exact:
            v = _rounded(v, extent, (1e-7 if exact else 3e-5) * keep)
        excess = passes.kept(v, keep, extent, exact=exact) - keep
        if (exact and abs(excess) <= _TOLERANCE * keep) or (v == 0 and excess < 0):
            return Shift(v, v, 1.0)
        proposal = sample.predict(v, excess)
        if exact or abs(excess) > 1e-5 * keep:  # else fp32 could have got the side wrong
            bracket.tighten(v, excess)
        exact = exact or abs(excess) <= 1e-4 * keep
    # The sample misleads: it has seen too few of the entries that matter.
    bracket.last, bracket.stalled = math.inf, False
    return _newton(passes.spent, keep, v, bracket, _TOLERANCE * keep)


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

    def __init__(self, passes: Passes, extent: Extent, total: Total) -> None:
        self.top = extent.top
        self.seen: tuple[float, float] | None = None
        self.spent, size = passes.sample()
        self.scale = extent.n / max(1.0, total(torch.tensor([size], dtype=torch.float64))[0])

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


def stride_for(n: int) -> int:
    """Every how many entries one is sampled; odd: a power of two could see one channel only."""
    return min(n // _SAMPLE, _STRIDE) | 1


def _rounded(v: float, extent: Extent, spare: float) -> float:
    """v as an fp32 number, which saves operations, if that moves the sum by no more than spare."""
    return float32(v) if extent.unit and v * extent.n * 2**-25 <= spare else v


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
