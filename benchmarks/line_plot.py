"""Plots of accuracy with a line per method, as the scripts of this directory draw them.

A point is the mean over seeds, and the band extends from the worst to the best seed. Ours is drawn
thick, the best other methods have their own colors, and all others are gray.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

_OURS = "probmask-tied"
INK = "#1f2430"
_MUTED, _ACCENT = "#b4bbc7", "#d1495b"
_OTHERS = ("#2f6fb7", "#2a9d8f", "#c77d0a", "#7b5ea7")  # colors of the best other methods
_HALO = [withStroke(linewidth=2.5, foreground="white")]  # keeps labels legible over lines
_LABEL_GAP = 0.028  # between two labels, as a fraction of the height
_LABEL_OFFSET = 0.12  # from the end of a line to its label, in ticks


class Point(NamedTuple):
    """The accuracies of all seeds at the tick ``x``."""

    x: int
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.accuracies)


def draw_lines(axes: Axes, lines: Mapping[str, Sequence[Point]], ticks: Sequence[str]) -> None:
    """Draw a labeled line per method, with ticks at the integers from 0."""
    colors = _colors(lines)
    for label, points in sorted(lines.items(), key=lambda line: colors[line[0]] != _MUTED):
        _draw_line(axes, points, colors[label], ours=label == _OURS)
    _label_lines(axes, lines, colors)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlim(-0.15, len(ticks) - 0.25)
    axes.set_ylabel("test accuracy, %")
    axes.grid(axis="y", color="#e6e9ef")
    axes.spines[["top", "right"]].set_visible(False)


def _colors(lines: Mapping[str, Sequence[Point]]) -> dict[str, str]:
    """Return a color per method: ours, the best others by their mean accuracy, and the rest."""
    means = {label: statistics.fmean(p.mean for p in points) for label, points in lines.items()}
    others = sorted((label for label in lines if label != _OURS), key=means.__getitem__)[::-1]
    named = dict(zip(others, _OTHERS, strict=False))
    return {label: _ACCENT if label == _OURS else named.get(label, _MUTED) for label in lines}


def _draw_line(axes: Axes, points: Sequence[Point], color: str, *, ours: bool) -> None:
    x = [point.x for point in points]
    axes.plot(
        x,
        [point.mean for point in points],
        color=color,
        linewidth=2.6 if ours else 1.3,
        marker="o",
        markersize=5 if ours else 3,
        zorder=3 if ours else 2,
    )
    low, high = ([end(point.accuracies) for point in points] for end in (min, max))
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _label_lines(
    axes: Axes, lines: Mapping[str, Sequence[Point]], colors: Mapping[str, str]
) -> None:
    """Label each line at its right end, without overlaps."""
    bottom, top = axes.get_ylim()
    ends = sorted((points[-1].x, points[-1].mean, label) for label, points in lines.items())
    for x in sorted({x for x, _, _ in ends}):
        here = [(y, label) for place, y, label in ends if place == x]
        heights = _spread([y for y, _ in here], _LABEL_GAP * (top - bottom))
        for (y, label), height in zip(here, heights, strict=True):
            _label_line(axes, label, (x, y), height, colors[label])


def _label_line(
    axes: Axes, label: str, end: tuple[float, float], height: float, color: str
) -> None:
    """Draw a label next to the end of its line, and a thin line that connects the two."""
    (x, y), ours = end, label == _OURS
    axes.plot([x, x + _LABEL_OFFSET], [y, height], color=color, linewidth=0.6, zorder=1)
    axes.annotate(
        label,
        (x + _LABEL_OFFSET, height),
        xytext=(2, 0),
        textcoords="offset points",
        va="center",
        fontsize=9 if ours else 8,
        fontweight="bold" if ours else "normal",
        color=INK if color == _MUTED else color,
        path_effects=_HALO,
    )


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move increasing heights as little as possible, so that they are at least `gap` apart."""
    # Heights minus rank * gap must not decrease; groups that would do so get their mean.
    groups: list[list[float]] = []
    for rank, height in enumerate(heights):
        groups.append([height - rank * gap])
        while len(groups) > 1 and statistics.fmean(groups[-2]) > statistics.fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    level = [statistics.fmean(group) for group in groups for _ in group]
    return [height + rank * gap for rank, height in enumerate(level)]
