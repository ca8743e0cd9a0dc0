"""The passes of the projection by compiled kernels: one read of the entries each, in fp64."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.core.budget_passes import Entries, Extent, Passes, Shift, Total
from probmask.core.compiled import in_parts, kernels_for

# Entries that are summed in one go: few enough to stay in cache, and the same ones however many
# threads there are, so that ranks with different numbers of them agree on every bit.
_PIECE = 1 << 16


def kernels_over(sites: Sequence[Entries]) -> Any:
    """The kernels if they can work on these: fp32 in the CPU's memory, one cost per tensor."""
    simple = all(
        site.z.dtype == torch.float32 and site.z.is_contiguous() and not isinstance(site.c, Tensor)
        for site in sites
    )
    return kernels_for("budget_kernels", *(site.z for site in sites)) if simple else None


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
