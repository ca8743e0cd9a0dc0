"""The root behind the projection: the shift v at which the budget is met.

Σ c·clip(z - v·c, 0, 1) is piecewise linear in v and falls from its value at v = 0 to 0. A sample of
the entries predicts where it equals the budget; a few passes over all entries correct the
prediction.
"""

import math
import struct
from collections.abc import Callable

import torch

from probmask.core.projection.passes import Extent, Passes, Shift, Total, float32

# The sample has at least _SAMPLE entries, if there are that many, and at least every _STRIDE-th. It
# predicts sums to about 1 %.
_SAMPLE, _STRIDE = 1 << 15, 256
# The search stops at |Σ c·s - keep| / keep below this; rounding s to fp32 adds at most 1.2e-7.
_TOLERANCE = 2e-7


def solve(passes: Passes, sample: "Sample", keep: float, extent: Extent) -> Shift:
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
    # The sample misleads: it has too few of the entries that matter. Search without it.
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


class Sample:
    """Every stride-th entry; predicts Σ c·clip(z - v·c, 0, 1) and its inverse."""

    def __init__(self, passes: Passes, extent: Extent, total: Total) -> None:
        self.top = extent.top
        self.seen: tuple[float, float] | None = None
        self.sum_and_slope, size = passes.sample()
        self.scale = extent.n / max(1.0, total(torch.tensor([size], dtype=torch.float64))[0])

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


def stride_for(n: int) -> int:
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
