"""Passes over all entries that the projection needs: by PyTorch operations or compiled kernels.

z are the entries, c their costs, and s = clip(z - v·c, 0, 1) the projected entries for a shift v.
"""

import math
import struct
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softshrink

from probmask.core.kernel_runner import kernels_for, map_parts

# Entries per PyTorch operation: they stay in the cache, and dispatch costs little in comparison.
_CHUNK = 1 << 19
# Entries per kernel call: they stay in the cache. The pieces do not depend on the number of
# threads, so ranks with different numbers of threads get the same bits.
_PIECE = 1 << 16
_NOTHING = torch.zeros(0, dtype=torch.float64)
_FLOAT32_MAX = torch.finfo(torch.float32).max

Cost = Tensor | float
Total = Callable[[Tensor], list[float]]
SumAndSlope = Callable[[float], list[float]]


class Entries(NamedTuple):
    """The entries of one tensor, with their costs and the tensor's name."""

    ordered: Tensor  # the tensor with its dimensions in memory order
    z: Tensor  # its flat entries: a view of `ordered` if that is dense, else a copy
    c: Cost
    name: str


class Extent(NamedTuple):
    """The range of the entries."""

    least: float  # smallest z on this rank
    most: float  # largest z on this rank
    top: float  # upper bound of z/c on all ranks
    n: int  # number of entries on all ranks
    unit: bool  # whether all costs are 1


class Shift(NamedTuple):
    """s = share·clip(z - a·c, 0, 1) + (1 - share)·clip(z - b·c, 0, 1).

    a and b are equal or neighboring fp64 numbers. One fp64 number cannot always represent v:
    entries tied at 1e30 fall from 1 to 0 between two neighbors. The mixture is exact for ties and
    always meets the budget.
    """

    a: float
    b: float
    share: float


class Passes(ABC):
    """Sums over the entries of all ranks as functions of v, and the pass that writes s.

    ``always_exact`` means that every sum is in fp64, because it costs no more than fp32.
    """

    always_exact: bool

    @abstractmethod
    def extremes(self, stride: int) -> list[tuple[float, float]]:
        """Return (min, max) of each tensor, NaN if it contains NaN.

        ``stride`` is the stride of the entries that `sample` uses later.
        """

    @abstractmethod
    def sample(self) -> tuple[SumAndSlope, int]:
        """Return `sum_and_slope` of every stride-th entry, and their number on this rank."""

    @abstractmethod
    def sampled(self) -> tuple[Tensor, Tensor]:
        """Return every stride-th entry on this rank, and its cost, in fp64."""

    @abstractmethod
    def weighted_sum(self, v: float, keep: float, extent: Extent, *, exact: bool) -> float:
        """Σ c·clip(z - v·c, 0, 1), in fp64 if ``exact``."""

    @abstractmethod
    def sum_and_slope(self, v: float) -> list[float]:
        """Σ c·s with s = clip(z - v·c, 0, 1), and minus its slope, Σ c² over 0 < s < 1, in fp64."""

    @abstractmethod
    def write_(self, shift: Shift) -> None:
        """z ← s, in place."""


class PlainPasses(Passes):
    """Passes by PyTorch operations, on any device and for any costs."""

    always_exact = False  # fp64 is slower, and fp32 is accurate enough to start with

    def __init__(self, sites: Sequence[Entries], total: Total) -> None:
        self._sites, self._total = sites, total
        self._stride = 1
        self._chunks: list[tuple[Tensor, Cost]] = []
        for site in sites:
            z = torch.split(site.z, _CHUNK)
            c = torch.split(site.c, _CHUNK) if isinstance(site.c, Tensor) else [site.c] * len(z)
            self._chunks += zip(z, c, strict=True)

    def extremes(self, stride: int) -> list[tuple[float, float]]:
        """Return (min, max) of each tensor; waits once for the device."""
        self._stride = stride
        return extremes([site.z for site in self._sites], empty=0.0)

    def sample(self) -> tuple[SumAndSlope, int]:
        """Return `sum_and_slope` of every stride-th entry, and their number on this rank."""
        z, costs = self.sampled()
        positive = z > 0  # the other entries are 0 at every v ≥ 0
        unit = all(not isinstance(site.c, Tensor) and site.c == 1 for site in self._sites)
        c: Cost = 1.0 if unit else costs[positive]
        sampled = PlainPasses([Entries(z[positive], z[positive], c, "")], self._total)
        return sampled.sum_and_slope, len(z)

    def sampled(self) -> tuple[Tensor, Tensor]:
        """Return every stride-th entry on this rank, and its cost, in fp64."""
        step = self._stride
        # Joined, because many small tensors would take much longer than one.
        z = torch.cat([site.z[::step].double() for site in self._sites] or [_NOTHING])
        each = [torch.as_tensor(s.c, dtype=z.dtype, device=z.device) for s in self._sites]
        pairs = zip(each, self._sites, strict=True)
        c = torch.cat([t.expand(len(site.z))[::step] for t, site in pairs] or [_NOTHING])
        return z, c

    def weighted_sum(self, v: float, keep: float, extent: Extent, *, exact: bool) -> float:
        """Σ c·clip(z - v·c, 0, 1), with fewer operations where unit costs allow it."""
        simple = extent.unit and (exact or v == float32(v))
        # Σ clip(z, v, v+1) - n·v is the same sum; it is used unless cancellation makes it worse.
        shifted = simple and v * extent.n <= (1e6 if exact else 3) * keep
        unsaturated = simple and -v <= extent.least and extent.most - v <= 1
        sums = []
        for z, c in self._chunks:
            if shifted:
                s = z.to(torch.float64, copy=True).clamp_(v, v + 1) if exact else z.clamp(v, v + 1)
                sums.append(s.sum().double() - v * len(z))
            elif unsaturated:
                sums.append(softshrink(z.double() if exact else z, v).sum().double())
            else:
                s = _clip(z, c, v, exact=exact)
                sums.append((s * c).sum() if isinstance(c, Tensor) else s.sum().double() * c)
        parts = torch.stack(sums).sum(0, keepdim=True) if sums else torch.zeros(1).double()
        return self._total(parts)[0]

    def sum_and_slope(self, v: float) -> list[float]:
        """Σ c·s and minus its slope, in fp64."""
        sums = []
        for z, c in self._chunks:
            s = _clip(z, c, v, exact=True)
            sums.append(torch.stack(((s * c).sum(), (s.frac_().ceil_() * c**2).sum())))
        return self._total(torch.stack(sums).sum(0) if sums else torch.zeros(2).double())

    def write_(self, shift: Shift) -> None:
        """z ← s, in place."""
        a, b, share = shift
        for z, c in self._chunks:
            if share == 1:
                _clip(z, c, a, out=z)
            else:
                z.copy_(_clip(z, c, a) * share + _clip(z, c, b) * (1 - share))


class CompiledPasses(Passes):
    """Passes by Numba kernels: one read of the entries each, in fp64, on several threads."""

    always_exact = True

    def __init__(self, kernels: Any, sites: Sequence[Entries], total: Total) -> None:
        self._kernels, self._total = kernels, total
        self._sites = sites
        self._sampled: list[tuple[Any, float]] = []
        self._pieces: list[tuple[Any, float]] = []
        self._owners: list[int] = []  # the index of each piece's site
        for index, site in enumerate(sites):
            z, c = site.z.numpy(), float(site.c)
            pieces = [(z[begin : begin + _PIECE], c) for begin in range(0, len(z), _PIECE)]
            self._pieces += pieces
            self._owners += [index] * len(pieces)
        sizes = [len(z) for z, _ in self._pieces]
        self._starts = [0, *np.cumsum(sizes).tolist()]

    def extremes(self, stride: int) -> list[tuple[float, float]]:
        """Return (min, max) of each tensor, and copy the entries of the sample in the same pass."""

        def survey(z: Any, c: float) -> tuple[float, float, tuple[Any, float]]:
            low, high = self._kernels.survey(z)
            return low, high, (z[::stride].copy(), c)  # while the piece is in the cache

        ends = [(0.0, 0.0) if len(site.z) == 0 else (math.inf, -math.inf) for site in self._sites]
        self._sampled = []
        results = self._map_pieces(survey)
        for index, (low, high, sampled) in zip(self._owners, results, strict=True):
            least, most = ends[index]
            broken = math.isnan(low) or math.isnan(high)
            nan = (math.nan, math.nan)
            ends[index] = nan if broken else (min(least, low), max(most, high))
            self._sampled.append(sampled)
        return ends

    def sample(self) -> tuple[SumAndSlope, int]:
        """Return `sum_and_slope` of every stride-th entry, and their number on this rank."""
        joined: dict[float, list[Any]] = {}
        for z, c in self._sampled:
            joined.setdefault(c, []).append(z)
        pieces = [(np.concatenate(z), c) for c, z in joined.items()]

        def sum_and_slope(v: float) -> list[float]:
            return self._reduce([(self._kernels.sum_and_count(z, v * c), c) for z, c in pieces])

        return sum_and_slope, sum(len(z) for z, _ in pieces)

    def sampled(self) -> tuple[Tensor, Tensor]:
        """Return every stride-th entry on this rank, and its cost, in fp64."""
        pairs = [(torch.from_numpy(z).double(), c) for z, c in self._sampled]
        z = torch.cat([z for z, _ in pairs] or [_NOTHING])
        return z, torch.cat([torch.full_like(z, c) for z, c in pairs] or [_NOTHING])

    def weighted_sum(self, v: float, keep: float, extent: Extent, *, exact: bool) -> float:
        """Σ c·clip(z - v·c, 0, 1), always in fp64."""
        sums = self._map_pieces(lambda z, c: c * self._kernels.clipped_sum(z, v * c))
        return self._total(torch.tensor([math.fsum(sums)], dtype=torch.float64))[0]

    def sum_and_slope(self, v: float) -> list[float]:
        """Σ c·s and minus its slope, in fp64."""
        found = self._map_pieces(lambda z, c: (self._kernels.sum_and_count(z, v * c), c))
        return self._reduce(found)

    def write_(self, shift: Shift) -> None:
        """z ← s, in place."""
        a, b, share = shift
        kernels = self._kernels
        if share == 1:
            self._map_pieces(lambda z, c: kernels.write(z, a * c))
        else:
            self._map_pieces(lambda z, c: kernels.write_mixed(z, a * c, b * c, share))
        # PyTorch does not notice these writes, but autograd relies on the version of a tensor.
        tensors = [site.z for site in self._sites if not site.z.is_inference()]
        torch.autograd.graph.increment_version(tensors)

    def _reduce(self, found: list[tuple[tuple[float, int], float]]) -> list[float]:
        """Sum the results of all pieces, exactly rounded, and over all ranks."""
        total = math.fsum(c * s for (s, _), c in found)
        slope = math.fsum(c**2 * between for (_, between), c in found)
        return self._total(torch.tensor([total, slope], dtype=torch.float64))

    def _map_pieces(self, work: Callable[[Any, float], Any]) -> list[Any]:
        """Return work(z, c) of every piece, in order.

        A thread has the pieces that begin in its part of all entries.
        """

        def part(begin: int, end: int) -> list[Any]:
            first, last = (bisect_left(self._starts, x, hi=len(self._pieces)) for x in (begin, end))
            return [work(z, c) for z, c in self._pieces[first:last]]

        return [one for part in map_parts(self._starts[-1], part) for one in part]


def kernels_over(sites: Sequence[Entries]) -> Any:
    """Return the kernels if they work on these entries, else None.

    They need dense fp32 tensors in CPU memory and one cost per tensor.
    """
    simple = all(
        site.z.dtype == torch.float32 and site.z.is_contiguous() and not isinstance(site.c, Tensor)
        for site in sites
    )
    if not simple:
        return None
    return kernels_for("projection.projection_kernels", *(site.z for site in sites))


def extremes(values: Sequence[Cost], *, empty: float) -> list[tuple[float, float]]:
    """Return (min, max) of each, NaN if it contains NaN; waits once for the device."""
    tensors = [t for t in values if isinstance(t, Tensor)]
    pairs = [torch.stack(t.aminmax()) if len(t) else t.new_full((2,), empty) for t in tensors]
    found = iter(torch.stack([pair.double() for pair in pairs]).tolist() if pairs else [])
    return [tuple(next(found)) if isinstance(t, Tensor) else (t, t) for t in values]


def float32(x: float) -> float:
    """Round x to fp32, at most to its largest finite number."""
    return float(struct.unpack("<f", struct.pack("<f", min(x, _FLOAT32_MAX)))[0])


def _clip(
    z: Tensor, c: Cost, v: float, *, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """clip(z - v·c, 0, 1), in fp64 if ``exact``.

    v is never rounded to fp32, because this alone could violate the budget.
    """
    if exact or isinstance(c, Tensor) or z.dtype == torch.float64:
        s = z.to(torch.float64, copy=True)
        s = (s.sub_(c, alpha=v) if isinstance(c, Tensor) else s.sub_(v * c)).clamp_(0, 1)
        return s if out is None else out.copy_(s)
    # v·c = high + low, two fp32 numbers: as accurate as fp64 for each entry, at half the cost.
    high = float32(v * c)
    low = v * c - high
    s = torch.sub(z, high, out=out)
    return (s.sub_(low) if low else s).clamp_(0, 1)
