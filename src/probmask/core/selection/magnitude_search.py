"""The largest weights of all tensors, and the threshold between them and the rest.

The value at which the budget ends is found as by Floyd and Rivest: a sample tells about where it
is, and a pass counts what is above that, and every value close to it; if it was not close enough,
once more. If the sample misleads altogether, two histograms, of the upper and of the lower bits of
the magnitudes, find the value in any case. A last pass writes the masks. Exact, and the same as
`select_top` gives.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from probmask.core.kernel_runner import Span, in_parts_of
from probmask.core.memory import as_stored

# The sample holds at least so many entries, in runs that are one line of the cache each, of which
# one in so many is taken: no step that has a factor in common with the shapes of weights, or it
# would always meet the same input channels.
_SAMPLE, _RUN, _STEPS = 1 << 15, 16, (61, 43, 29, 19, 13, 7, 5, 2, 1)
# fp32 values that are counted around a guess: 0.2 to 0.4 % of it to either side. Twice as many
# where a second pass would take longer than to count them.
_WINDOW, _LARGE = 1 << 16, 1 << 22
_GUESSES = 3  # as a rule one or two are enough
_FEW = 16  # equal values whose places are noted on the way; of more, it has to be looked again
_INFINITY = 0x7F800000  # the bits of the largest fp32 value; what is above is no number


class MagnitudeSearch:
    """One cut through these weights; None if some are NaN."""

    def __init__(self, kernels: Any, weights: Sequence[Tensor], scales: Sequence[float]) -> None:
        self._kernels = kernels
        self._weights = weights
        self._entries = [
            (_stored(weight), np.float32(scale))
            for weight, scale in zip(weights, scales, strict=True)
        ]
        self._sizes = [weight.numel() for weight in weights]
        self._bins = _WINDOW if sum(self._sizes) < _LARGE else 2 * _WINDOW

    def masks(
        self, keep: int, into: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], float] | None:
        """The masks of so many, and the threshold."""
        found = self._near(keep) or self._anywhere(keep)
        if found is None:
            return None
        cut, rest = found
        masks = self._room(into)
        marked = self._mark(np.int32(cut), [_stored(mask) for mask in masks])
        value, removed = np.array(cut, np.int32).view(np.float32), marked.below
        for k, equal in enumerate(marked.equal):
            taken = min(equal, rest)
            if taken == equal <= _FEW:
                _stored(masks[k])[marked.places[k]] = True
            elif taken:
                weight, scale = self._weights[k].numpy(), self._entries[k][1]
                places = np.nonzero(np.abs(weight) * scale == value)  # in row-major order
                masks[k].numpy()[tuple(index[:taken] for index in places)] = True
            rest -= taken
            removed = max(removed, cut if taken < equal else -1)
        least, most = (float(np.array(bits, np.int32).view(np.float32)) for bits in (cut, removed))
        return masks, most + keep / sum(self._sizes) * (least - most)

    def _room(self, into: Sequence[Tensor] | None) -> list[Tensor]:
        """These tensors as far as they lie in memory as the weights do; else new ones."""
        if into is None:
            return [torch.empty_like(weight, dtype=torch.bool) for weight in self._weights]
        torch.autograd.graph.increment_version(into)  # a graph that has saved one has to know
        return [
            torch.empty_like(weight, dtype=torch.bool) if as_stored(weight, mask) is None else mask
            for weight, mask in zip(self._weights, into, strict=True)
        ]

    def _near(self, keep: int) -> tuple[int, int] | None:
        """The bits of the least value kept, how many of it; None if no guess hits, or for NaNs."""
        sample = self._sample()
        ratio = len(sample) / sum(self._sizes)
        from_top = keep * ratio
        for _ in range(_GUESSES):
            guess = int(sample[min(max(0, len(sample) - 1 - int(from_top)), len(sample) - 1)])
            base = min(max(0, guess - self._bins // 2), _INFINITY + 1 - self._bins)
            counts, above, top = self._window(base)
            inside = int(counts.sum())
            if top > _INFINITY:
                return None
            if above < keep <= above + inside:
                place, rest = _reach(counts, keep - above)
                return base + place, rest
            # It is on this side of an edge above which the number is known by now: the sample has
            # to tell no more than how far from it, and errs by far less.
            edge, known = (base + self._bins, above) if keep <= above else (base, above + inside)
            from_top = len(sample) - int(np.searchsorted(sample, edge)) + (keep - known) * ratio
        return None

    def _sample(self) -> Any:
        """The bits of some of the values, sorted."""
        wanted = max(1, sum(self._sizes) // _SAMPLE)
        step = next(step for step in _STEPS if step <= wanted)
        runs = []
        for x, scale in self._entries:
            whole = len(x) // (step * _RUN) * step * _RUN
            sampled = x[:whole].reshape(-1, step, _RUN)[:, 0].ravel() if whole else x[::step]
            with np.errstate(over="ignore"):
                runs.append(np.abs(sampled) * scale)
        return np.sort(np.concatenate(runs).view(np.int32))

    def _window(self, base: int) -> tuple[Any, int, int]:
        """How often each value from these bits on occurs, how many are above, the largest bits."""

        def part(spans: list[Span]) -> tuple[Any, int, int]:
            counts, above, top = np.zeros(self._bins, np.int32), 0, 0
            for k, begin, end in spans:
                x, scale = self._entries[k]
                more, most = self._kernels.count_window(x[begin:end], scale, base, counts)
                above, top = above + int(more), max(top, int(most))
            return counts, above, top

        counts, above, top = zip(*in_parts_of(self._sizes, part), strict=True)
        return np.sum(counts, 0), sum(above), max(top)

    def _anywhere(self, keep: int) -> tuple[int, int] | None:
        """The same wherever it is; None if there are NaNs."""
        low = self._kernels.LOW
        upper = self._histogram(1 << 31 - low, self._kernels.count_first)
        # Infinity is the first entry of its digit, NaNs are the others.
        if upper[_INFINITY >> low :].any():
            return None
        first, rest = _reach(upper, keep)
        lower = self._histogram(1 << low, self._kernels.count_second, np.int32(first))
        last, rest = _reach(lower, rest)
        return first << low | last, rest

    def _histogram(self, bins: int, count: Any, *digit: Any) -> Any:
        def part(spans: list[Span]) -> Any:
            counts = np.zeros(bins, np.int32)
            for k, begin, end in spans:
                x, scale = self._entries[k]
                count(x[begin:end], scale, *digit, counts)
            return counts

        return np.sum(in_parts_of(self._sizes, part), 0)

    def _mark(self, cut: Any, masks: list[Any]) -> "_Marked":
        """Set what is above; tell what equals the cut, and the largest below it."""

        def part(spans: list[Span]) -> list[tuple[int, int, int, Any]]:
            found = []
            for k, begin, end in spans:
                x, scale = self._entries[k]
                places = np.empty(_FEW, np.int64)
                same, below = self._kernels.mark(
                    x[begin:end], scale, cut, masks[k][begin:end], places
                )
                found.append((k, int(same), int(below), begin + places[:same]))
            return found

        places: list[list[int]] = [[] for _ in masks]
        equal, lower = [0] * len(masks), -1
        for k, same, below, found in (x for part in in_parts_of(self._sizes, part) for x in part):
            equal[k] += same
            places[k] += found.tolist()
            lower = max(lower, below)
        return _Marked(equal, places, lower)


class _Marked(NamedTuple):
    """Of each tensor, how many equal the cut, and where they are: all, if they are `_FEW` at most.

    ``below`` are the bits of the largest value below the cut, or -1.
    """

    equal: list[int]
    places: list[list[int]]
    below: int


def _stored(x: Tensor) -> Any:
    """The entries as they lie in memory."""
    vectors = as_stored(x)
    assert vectors is not None
    return vectors[0].numpy()


def _reach(counts: Any, keep: int) -> tuple[int, int]:
    """The bin that holds the keep-th entry from the top, and how many are wanted of it."""
    from_top = np.cumsum(counts[::-1])
    place = int(np.searchsorted(from_top, keep))
    before = int(from_top[place - 1]) if place else 0
    return len(counts) - 1 - place, keep - before
