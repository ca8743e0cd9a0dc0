"""What the search for a budget's shift v asks of all entries, in plain operations."""

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

from probmask.core.kernel_runner import in_parts, kernels_for

# Entries handled at a time: they stay in cache, and dispatch costs little beside the arithmetic.
_CHUNK = 1 << 19
# Entries that are summed in one go: few enough to stay in cache, and the same ones however many
# threads there are, so that ranks with different numbers of them agree on every bit.
_PIECE = 1 << 16
_FLOAT32_MAX = torch.finfo(torch.float32).max

Cost = Tensor | float
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


class Passes(ABC):
    """Sums over the entries of all ranks, as functions of v; and the pass that applies it.

    ``always_exact``: every sum is in fp64, for it costs no more.
    """

    always_exact: bool

    @abstractmethod
    def extremes(self, stride: int) -> list[tuple[float, float]]:
        """(min, max) of each tensor, NaN if that is among the entries.

        Every stride-th entry is wanted by `sample` later.
        """

    @abstractmethod
    def sample(self) -> tuple[Callable[[float], list[float]], int]:
        """`spent` of every stride-th entry, and how many these are on this rank."""

    @abstractmethod
    def kept(self, v: float, keep: float, extent: Extent, *, exact: bool) -> float:
        """Σ c·clip(z - v·c, 0, 1), in fp64 if exact."""

    @abstractmethod
    def spent(self, v: float) -> list[float]:
        """Σ c·clip(z - v·c, 0, 1), and by how much it falls per unit of v: Σ c² where 0 < s < 1."""

    @abstractmethod
    def write_(self, shift: Shift) -> None:
        """Overwrite z by s."""


class PlainPasses(Passes):
    """By PyTorch, on any device, for any costs."""

    always_exact = False  # fp64 takes longer, and fp32 is good enough to start with

    def __init__(self, sites: Sequence[Entries], total: Total) -> None:
        self._sites, self._total = sites, total
        self._stride = 1
        self._chunks: list[tuple[Tensor, Cost]] = []
        for site in sites:
            z = torch.split(site.z, _CHUNK)
            c = torch.split(site.c, _CHUNK) if isinstance(site.c, Tensor) else [site.c] * len(z)
            self._chunks += zip(z, c, strict=True)

    def extremes(self, stride: int) -> list[tuple[float, float]]:
        """(min, max) of each tensor, by one wait for the device."""
        self._stride = stride
        return extremes([site.z for site in self._sites], empty=0.0)

    def sample(self) -> tuple[Callable[[float], list[float]], int]:
        """`spent` of every stride-th entry, and how many there are here."""
        step = self._stride
        # Joined, many small tensors take no longer than one.
        pieces = [site.z[::step].double() for site in self._sites] or [torch.zeros(0).double()]
        z = torch.cat(pieces)
        inside = z > 0  # the others are 0 at every v ≥ 0
        each = [torch.as_tensor(s.c, dtype=z.dtype, device=z.device) for s in self._sites]
        unit = all(not isinstance(site.c, Tensor) and site.c == 1 for site in self._sites)
        c: Cost = 1.0
        if not unit:
            spread = zip(each, self._sites, strict=True)
            c = torch.cat([t.expand(len(site.z))[::step] for t, site in spread])[inside]
        few = PlainPasses([Entries(z[inside], z[inside], c, "")], self._total)
        return few.spent, len(z)

    def kept(self, v: float, keep: float, extent: Extent, *, exact: bool) -> float:
        """Σ c·clip(z - v·c, 0, 1); by fewer operations where c = 1 allows it."""
        simple = extent.unit and (exact or v == float32(v))
        # Σ clip(z, v, v+1) - n·v is the same sum, unless cancellation makes it worse.
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

    def spent(self, v: float) -> list[float]:
        """The same in fp64, and its slope."""
        sums = []
        for z, c in self._chunks:
            s = _clip(z, c, v, exact=True)
            sums.append(torch.stack(((s * c).sum(), (s.frac_().ceil_() * c**2).sum())))
        return self._total(torch.stack(sums).sum(0) if sums else torch.zeros(2).double())

    def write_(self, shift: Shift) -> None:
        """Overwrite z by s."""
        a, b, share = shift
        for z, c in self._chunks:
            if share == 1:
                _clip(z, c, a, out=z)
            else:
                z.copy_(_clip(z, c, a) * share + _clip(z, c, b) * (1 - share))


class CompiledPasses(Passes):
    """By Numba, each thread on its own pieces."""

    always_exact = True

    def __init__(self, kernels: Any, sites: Sequence[Entries], total: Total) -> None:
        self._kernels, self._total = kernels, total
        self._sites = sites
        self._sampled: list[tuple[Any, float]] = []
        self._pieces: list[tuple[Any, float]] = []
        self._owners: list[int] = []  # which site each is a piece of
        for index, site in enumerate(sites):
            z, c = site.z.numpy(), float(site.c)
            pieces = [(z[begin : begin + _PIECE], c) for begin in range(0, len(z), _PIECE)]
            self._pieces += pieces
            self._owners += [index] * len(pieces)
        sizes = [len(z) for z, _ in self._pieces]
        self._starts = [0, *np.cumsum(sizes).tolist()]

    def extremes(self, stride: int) -> list[tuple[float, float]]:
        """(min, max) of each tensor; the entries of the sample on the way."""

        def look(z: Any, c: float) -> tuple[float, float, tuple[Any, float]]:
            low, high = self._kernels.survey(z)
            return low, high, (z[::stride].copy(), c)  # now that the piece is in cache

        ends = [(0.0, 0.0) if len(site.z) == 0 else (math.inf, -math.inf) for site in self._sites]
        self._sampled = []
        for index, (low, high, sampled) in zip(self._owners, self._each(look), strict=True):
            least, most = ends[index]
            broken = math.isnan(low) or math.isnan(high)
            nan = (math.nan, math.nan)
            ends[index] = nan if broken else (min(least, low), max(most, high))
            self._sampled.append(sampled)
        return ends

    def sample(self) -> tuple[Callable[[float], list[float]], int]:
        """`spent` of every stride-th entry, and how many there are here."""
        joined: dict[float, list[Any]] = {}
        for z, c in self._sampled:
            joined.setdefault(c, []).append(z)
        pieces = [(np.concatenate(z), c) for c, z in joined.items()]

        def spent(v: float) -> list[float]:
            return self._spent([(self._kernels.spent(z, v * c), c) for z, c in pieces])

        return spent, sum(len(z) for z, _ in pieces)

    def kept(self, v: float, keep: float, extent: Extent, *, exact: bool) -> float:
        """Σ c·clip(z - v·c, 0, 1), always in fp64."""
        sums = self._each(lambda z, c: c * self._kernels.kept(z, v * c))
        return self._total(torch.tensor([math.fsum(sums)], dtype=torch.float64))[0]

    def spent(self, v: float) -> list[float]:
        """The same, and its slope."""
        return self._spent(self._each(lambda z, c: (self._kernels.spent(z, v * c), c)))

    def write_(self, shift: Shift) -> None:
        """Overwrite z by s."""
        a, b, share = shift
        kernels = self._kernels
        if share == 1:
            self._each(lambda z, c: kernels.write(z, a * c))
        else:
            self._each(lambda z, c: kernels.write_mixed(z, a * c, b * c, share))
        # PyTorch does not see such writes; whoever asks for a tensor's version has to.
        tensors = [site.z for site in self._sites if not site.z.is_inference()]
        torch.autograd.graph.increment_version(tensors)

    def _spent(self, found: list[tuple[tuple[float, int], float]]) -> list[float]:
        kept = math.fsum(c * s for (s, _), c in found)
        slope = math.fsum(c**2 * between for (_, between), c in found)
        return self._total(torch.tensor([kept, slope], dtype=torch.float64))

    def _each(self, work: Callable[[Any, float], Any]) -> list[Any]:
        """Of every piece, in their order; a thread has those that begin in its part of all."""

        def part(begin: int, end: int) -> list[Any]:
            first, last = (bisect_left(self._starts, x, hi=len(self._pieces)) for x in (begin, end))
            return [work(z, c) for z, c in self._pieces[first:last]]

        return [one for part in in_parts(self._starts[-1], part) for one in part]


def kernels_over(sites: Sequence[Entries]) -> Any:
    """The kernels if they can work on these: fp32 in the CPU's memory, one cost per tensor."""
    simple = all(
        site.z.dtype == torch.float32 and site.z.is_contiguous() and not isinstance(site.c, Tensor)
        for site in sites
    )
    return (
        kernels_for("projection.projection_kernels", *(site.z for site in sites))
        if simple
        else None
    )


def extremes(values: Sequence[Cost], *, empty: float) -> list[tuple[float, float]]:
    """(min, max) of each, NaN if that is among the entries; waits for the device only once."""
    tensors = [t for t in values if isinstance(t, Tensor)]
    pairs = [torch.stack(t.aminmax()) if len(t) else t.new_full((2,), empty) for t in tensors]
    found = iter(torch.stack([pair.double() for pair in pairs]).tolist() if pairs else [])
    return [tuple(next(found)) if isinstance(t, Tensor) else (t, t) for t in values]


def float32(x: float) -> float:
    """The fp32 number next to it, as far as there are any."""
    return float(struct.unpack("<f", struct.pack("<f", min(x, _FLOAT32_MAX)))[0])


def _clip(
    z: Tensor, c: Cost, v: float, *, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """clip(z - v·c, 0, 1), in fp64 if exact; v rounded to fp32 could already break the budget."""
    if exact or isinstance(c, Tensor) or z.dtype == torch.float64:
        s = z.to(torch.float64, copy=True)
        s = (s.sub_(c, alpha=v) if isinstance(c, Tensor) else s.sub_(v * c)).clamp_(0, 1)
        return s if out is None else out.copy_(s)
    # v·c = high + low, two fp32 numbers: as good as fp64 for each entry, at half the cost.
    high = float32(v * c)
    low = v * c - high
    s = torch.sub(z, high, out=out)
    return (s.sub_(low) if low else s).clamp_(0, 1)
