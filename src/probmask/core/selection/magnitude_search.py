"""Search for the magnitude at which a budget of kept weights ends, by compiled passes.

This follows Floyd and Rivest. The caller or a sample predicts the magnitude. One pass over all
weights marks the values above a window around the prediction, and lists the few inside the window.
If the magnitude is inside, the list completes the masks. If it is outside, the counts and a sample
give a better prediction. After three such windows, two histograms, of the upper and of the lower
bits of the magnitudes, find it in any case, and a last pass writes the masks. The result does not
depend on the predictions.

The bits of a nonnegative float, read as an integer, have the order of the floats. "Bits" below
means this integer.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from probmask.core.kernel_runner import Span, map_spans, storage_vectors
from probmask.core.shrinkage import Growth

# The sample has at least _SAMPLE entries, in runs of one cache line each. Every step-th run is
# taken. The steps are prime: a step with a factor in common with the shape of a weight would
# always sample the same input channels.
_SAMPLE, _RUN, _STEPS = 1 << 15, 16, (61, 43, 29, 19, 13, 7, 5, 2, 1)
# Number of fp32 values in the window: 0.2 to 0.4 % of the prediction to either side. From _LARGE
# weights on it is twice as wide, because a second pass would take longer than counting more values.
_WINDOW, _LARGE = 1 << 16, 1 << 22
_WINDOWS = 3  # windows before the histograms; usually one or two are enough
_LISTED = 64  # one of this many values may be listed; 0.4 % of normally distributed ones are inside
_FEW = 16  # beyond this many ties in a tensor, a second pass collects their places
_INFINITY = 0x7F800000  # bits of fp32 infinity; larger bits are NaN
_LARGEST = 0x7FFFFFFF  # of all bits
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class Magnitudes:
    """The values |w| scale of a dense fp32 tensor in CPU memory."""

    def __init__(self, kernels: Any, weight: Tensor, scale: float) -> None:
        self.weight = weight
        self._kernels, self._x, self._scale = kernels, _array(weight), np.float32(scale)

    def mark_window(self, begin: int, end: int, window: Any, out: Any, *lists: Any) -> "_Counts":
        """Mark the values above a window, and list those inside."""
        x = self._x[begin:end]
        return _Counts(*self._kernels.mark_window(x, self._scale, *window, out, *lists))

    def count_upper(self, begin: int, end: int, counts: Any) -> None:
        """Add the histogram of the upper bits."""
        self._kernels.count_upper(self._x[begin:end], self._scale, counts)

    def count_lower(self, begin: int, end: int, upper: int, counts: Any) -> None:
        """Add the histogram of the lower bits of the values with these upper bits."""
        self._kernels.count_lower(self._x[begin:end], self._scale, np.int32(upper), counts)

    def mark(self, begin: int, end: int, cut: Any, out: Any, places: Any) -> tuple[int, int]:
        """Mark the values above the cut; return the number equal and the largest bits below."""
        equal, below = self._kernels.mark(self._x[begin:end], self._scale, cut, out, places)
        return int(equal), int(below)

    def sample(self, step: int) -> Any:
        """Return the values of every step-th run of entries."""
        with np.errstate(over="ignore"):
            return np.abs(_every_run(self._x, step)) * self._scale

    def values(self) -> Any:
        """Return all values, in the shape of the tensor."""
        return np.abs(self.weight.numpy()) * self._scale


class Growths:
    """The values u scale, with the growth u of a dense fp32 tensor in CPU memory, for p = 3."""

    def __init__(self, kernels: Any, weight: Tensor, growth: Growth, scale: float) -> None:
        self.weight = weight
        self._kernels = kernels
        start = growth.initial
        if storage_vectors(weight, start) is None:
            start = torch.empty_like(weight).copy_(start)  # in the memory order of the weight
        self._x, self._start = _array(weight), _array(start)
        self._factor, self._scale = np.float32(growth.factor.item()), np.float32(scale)

    def mark_window(self, begin: int, end: int, window: Any, out: Any, *lists: Any) -> "_Counts":
        """Mark the values above a window, and list those inside."""
        part = self._part(begin, end)
        return _Counts(*self._kernels.mark_growth_window(*part, *window, out, *lists))

    def count_upper(self, begin: int, end: int, counts: Any) -> None:
        """Add the histogram of the upper bits."""
        self._kernels.count_upper(self._grown(begin, end), np.float32(1), counts)

    def count_lower(self, begin: int, end: int, upper: int, counts: Any) -> None:
        """Add the histogram of the lower bits of the values with these upper bits."""
        grown = self._grown(begin, end)
        self._kernels.count_lower(grown, np.float32(1), np.int32(upper), counts)

    def mark(self, begin: int, end: int, cut: Any, out: Any, places: Any) -> tuple[int, int]:
        """Mark the values above the cut; return the number equal and the largest bits below."""
        equal, below = self._kernels.mark_growth(*self._part(begin, end), cut, out, places)
        return int(equal), int(below)

    def sample(self, step: int) -> Any:
        """Return the values of every step-th run of entries."""
        x, start = (np.ascontiguousarray(_every_run(each, step)) for each in (self._x, self._start))
        out = np.empty_like(x)
        self._kernels.growths(x, start, self._factor, self._scale, out)
        return out

    def values(self) -> Any:
        """Return all values, in the shape of the tensor."""
        out = torch.empty_like(self.weight)
        _array(out)[:] = self._grown(0, len(self._x))
        return out.numpy()

    def _part(self, begin: int, end: int) -> tuple[Any, ...]:
        return self._x[begin:end], self._start[begin:end], self._factor, self._scale

    def _grown(self, begin: int, end: int) -> Any:
        out = np.empty(end - begin, np.float32)
        self._kernels.growths(*self._part(begin, end), out)
        return out


class MagnitudeSearch:
    """One search through the values of several tensors."""

    def __init__(self, kernels: Any, entries: Sequence[Magnitudes | Growths]) -> None:
        self._kernels = kernels
        self._entries = entries
        self._weights = [each.weight for each in entries]
        self._sizes = [weight.numel() for weight in self._weights]
        self._bins = _WINDOW if sum(self._sizes) < _LARGE else 2 * _WINDOW

    def masks(
        self, keep: int, into: Sequence[Tensor] | None = None, near: float = 0.0
    ) -> tuple[list[Tensor], float] | None:
        """Return the masks of the ``keep`` largest weights and the threshold, or None for NaN."""
        masks = self._mask_tensors(into)
        arrays = [_array(mask) for mask in masks]
        found = self._search_windows(keep, near, arrays) or self._search_histograms(keep, arrays)
        if found is None:
            return None
        cut, rest, pruned = found.cut, found.rest, found.below
        value = np.array(cut, np.int32).view(np.float32)
        for k, equal in enumerate(found.equal):
            taken = min(equal, rest)
            if taken == equal == len(found.places[k]):
                arrays[k][found.places[k]] = True
            elif taken:
                places = np.nonzero(self._entries[k].values() == value)  # in row-major order
                masks[k].numpy()[tuple(index[:taken] for index in places)] = True
            rest -= taken
            pruned = max(pruned, cut if taken < equal else -1)
        least, most = (float(np.array(bits, np.int32).view(np.float32)) for bits in (cut, pruned))
        return masks, most + keep / sum(self._sizes) * (least - most)

    def _mask_tensors(self, into: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the tensors of ``into`` with the memory order of their weight; else new ones."""
        if into is None:
            return [torch.empty_like(weight, dtype=torch.bool) for weight in self._weights]
        torch.autograd.graph.increment_version(into)  # invalidates graphs that saved the old masks
        return [
            mask
            if storage_vectors(weight, mask) is not None
            else torch.empty_like(weight, dtype=torch.bool)
            for weight, mask in zip(self._weights, into, strict=True)
        ]

    def _search_windows(self, keep: int, near: float, masks: list[Any]) -> "_Marked | None":
        """Find the smallest kept value in a window, and write the masks.

        Returns None if no window contains it, if a window contains many values, or if there is a
        NaN.
        """
        predicted = 0 < near <= _LARGEST_FLOAT
        guess = int(np.float32(near).view(np.int32)) if predicted else self._predict(keep)
        for _ in range(_WINDOWS):
            base = min(max(0, guess - self._bins // 2), _INFINITY + 1 - self._bins)
            spans = self._mark_window(base, masks)
            above, inside = (sum(span.counts[i] for span in spans) for i in range(2))
            if max(span.counts.largest for span in spans) > _INFINITY:
                return None
            if above < keep <= above + inside:
                return self._complete(spans, keep - above, masks)
            # The number of values above each edge of the window is now known. The sample only
            # needs to predict the distance from the nearer edge, with a much smaller error.
            edge, known = (base + self._bins, above) if keep <= above else (base, above + inside)
            guess = self._predict(keep - known, below=edge)
        return None

    def _mark_window(self, base: int, masks: list[Any]) -> "list[_Span]":
        """Write True to the masks above the window that begins at ``base``, False elsewhere."""
        window = np.int32(base), np.int32(base + self._bins)

        def part(spans: list[Span]) -> list[_Span]:
            found = []
            for k, begin, end in spans:
                room = (end - begin) // _LISTED + _LISTED
                places, bits = np.empty(room, np.int64), np.empty(room, np.int32)
                out = masks[k][begin:end]
                counts = self._entries[k].mark_window(begin, end, window, out, places, bits)
                listed = slice(min(counts.inside, room))
                found.append(_Span(k, counts, begin + places[listed], bits[listed]))
            return found

        return [span for part in map_spans(self._sizes, part) for span in part]

    def _complete(self, spans: "Sequence[_Span]", keep: int, masks: list[Any]) -> "_Marked | None":
        """Write True to the masks for values above the keep-th largest one of the window.

        Returns None if not all values of the window are listed.
        """
        bits = np.concatenate([span.bits for span in spans])
        if len(bits) < sum(span.counts.inside for span in spans):
            return None
        cut = np.partition(bits, len(bits) - keep)[len(bits) - keep]
        rest = keep - int(np.count_nonzero(bits > cut))
        below = bits[bits < cut]
        if not len(below):  # the largest pruned value is below the window
            return self._mark(int(cut), rest, masks)
        places: list[list[int]] = [[] for _ in masks]
        for span in spans:
            masks[span.tensor][span.places[span.bits > cut]] = True
            places[span.tensor] += span.places[span.bits == cut].tolist()
        return _Marked(int(cut), rest, [len(each) for each in places], places, int(below.max()))

    def _predict(self, count: int, below: int = _LARGEST) -> int:
        """Return the bits that ``count`` values below ``below`` exceed, as the sample predicts it.

        If the count is negative, they are above ``below``.
        """
        sample = self._sample
        above = len(sample) - int(np.searchsorted(sample, below))
        from_top = int(above + count * len(sample) / sum(self._sizes))
        return int(sample[min(max(0, len(sample) - 1 - from_top), len(sample) - 1)])

    @cached_property
    def _sample(self) -> Any:
        """The sorted bits of a sample of the magnitudes."""
        largest_step = max(1, sum(self._sizes) // _SAMPLE)
        step = next(step for step in _STEPS if step <= largest_step)
        runs = [each.sample(step) for each in self._entries]
        return np.sort(np.concatenate(runs).view(np.int32))

    def _search_histograms(self, keep: int, masks: list[Any]) -> "_Marked | None":
        """Do the same as `_search_windows` for any distribution of finite values, else None."""
        low = self._kernels.LOW
        upper = self._histogram(1 << 31 - low, lambda each, *part: each.count_upper(*part))
        # These upper bits belong to infinity and NaN. `select_top` handles both.
        if upper[_INFINITY >> low :].any():
            return None
        first, rest = _bin_of(upper, keep)
        lower = self._histogram(
            1 << low, lambda each, begin, end, counts: each.count_lower(begin, end, first, counts)
        )
        last, rest = _bin_of(lower, rest)
        return self._mark(first << low | last, rest, masks)

    def _histogram(self, bins: int, count: Callable[..., None]) -> Any:
        def part(spans: list[Span]) -> Any:
            counts = np.zeros(bins, np.int32)
            for k, begin, end in spans:
                count(self._entries[k], begin, end, counts)
            return counts

        return _sum_of_parts(map_spans(self._sizes, part))

    def _mark(self, cut: int, rest: int, masks: list[Any]) -> "_Marked":
        """Write True to the masks where the bits are above ``cut``, False elsewhere."""
        bits = np.int32(cut)

        def part(spans: list[Span]) -> list[tuple[int, int, int, Any]]:
            found = []
            for k, begin, end in spans:
                places = np.empty(_FEW, np.int64)
                equal, below = self._entries[k].mark(begin, end, bits, masks[k][begin:end], places)
                found.append((k, equal, below, begin + places[:equal]))
            return found

        all_places: list[list[int]] = [[] for _ in masks]
        all_equal, all_below = [0] * len(masks), -1
        results = (x for part in map_spans(self._sizes, part) for x in part)
        for k, equal, below, places in results:
            all_equal[k] += equal
            all_places[k] += places.tolist()
            all_below = max(all_below, below)
        return _Marked(cut, rest, all_equal, all_places, all_below)


class _Counts(NamedTuple):
    """Numbers of values above a window and inside, and the largest bits of all values."""

    above: int
    inside: int
    largest: int


class _Span(NamedTuple):
    """The values of a part of one tensor in a window: their places in memory and their bits."""

    tensor: int
    counts: _Counts
    places: Any
    bits: Any


class _Marked(NamedTuple):
    """Masks that lack only values equal to the cut, of which ``rest`` are to be kept.

    ``cut`` are the bits of the smallest kept value. ``equal`` is the number of entries of each
    tensor that equal it. ``places`` are their positions in memory; for tensors with many of them,
    the list may be incomplete. ``below`` are the largest bits below the cut, or -1.
    """

    cut: int
    rest: int
    equal: list[int]
    places: list[list[int]]
    below: int


def _every_run(x: Any, step: int) -> Any:
    """Return every step-th run of entries."""
    whole = len(x) // (step * _RUN) * step * _RUN
    return x[:whole].reshape(-1, step, _RUN)[:, 0].ravel() if whole else x[::step]


def _array(x: Tensor) -> Any:
    """Return the entries as a NumPy array in memory order."""
    vectors = storage_vectors(x)
    assert vectors is not None
    return vectors[0].numpy()


def _bin_of(counts: Any, keep: int) -> tuple[int, int]:
    """Return the bin of the keep-th entry from the top, and the number of its entries to keep."""
    from_top = np.cumsum(counts[::-1])
    place = int(np.searchsorted(from_top, keep))
    before = int(from_top[place - 1]) if place else 0
    return len(counts) - 1 - place, keep - before


def _sum_of_parts(counts: Sequence[Any]) -> Any:
    """Return the sum of the counts of all threads."""
    return counts[0] if len(counts) == 1 else np.sum(counts, 0)
