"""Draw accuracy against sparsity, a line per method, from committed records.

    python benchmarks/leaderboard_plot.py docs/results/records docs/images/leaderboard.png

Needs matplotlib (`pip install -c constraints.txt -e '.[bench]'`). If the records are of several
settings, the one with the most runs is drawn. A point is the mean over seeds, and the band extends
from the worst to the best seed. The best other methods have their own colors. The dashed line is
the dense network.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from probmask.analysis.comparison import Cell, Setting, compare
from probmask.analysis.records import find_records

_OURS = "probmask-tied"
_INK, _MUTED, _ACCENT = "#1f2430", "#b4bbc7", "#d1495b"
_OTHERS = ("#2f6fb7", "#2a9d8f", "#c77d0a", "#7b5ea7")  # colors of the best other methods
_HALO = [withStroke(linewidth=2.5, foreground="white")]  # keeps labels legible over lines
_LABEL_GAP = 0.028  # between two labels, as a fraction of the height
_LABEL_OFFSET = 0.12  # from the end of a line to its label, in ticks


def draw(setting: Setting, path: Path) -> None:
    """Draw the plot and write it to a file."""
    lines = _lines(setting)
    colors = _colors(lines)
    levels = sorted({cell.sparsity for cells in lines.values() for cell in cells})
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for label, cells in sorted(lines.items(), key=lambda line: colors[line[0]] != _MUTED):
        _draw_line(axes, cells, levels, colors[label], ours=label == _OURS)
    _draw_dense(axes, setting)
    _label_lines(axes, lines, levels, colors)
    axes.set_xticks(range(len(levels)), [f"{100 * level:g} %" for level in levels])
    axes.set_xlim(-0.15, len(levels) - 0.25)
    axes.set_xlabel("weights pruned")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"{setting.title}: {', '.join(setting.details[:2])}", loc="left", color=_INK)
    axes.grid(axis="y", color="#e6e9ef")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _lines(setting: Setting) -> dict[str, list[Cell]]:
    """Return the cells of each method by sparsity, for methods with more than one sparsity."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in sorted(setting.cells, key=lambda cell: cell.sparsity):
        if cell.cost == "params" and cell.sparsity > 0 and cell.verified:
            found[cell.label].append(cell)
    return {label: cells for label, cells in found.items() if len(cells) > 1}


def _colors(lines: dict[str, list[Cell]]) -> dict[str, str]:
    """Return a color per method: ours, the best others by their mean accuracy, and the rest."""
    means = {label: statistics.fmean(c.mean for c in cells) for label, cells in lines.items()}
    others = sorted((label for label in lines if label != _OURS), key=means.__getitem__)[::-1]
    named = dict(zip(others, _OTHERS, strict=False))
    return {label: _ACCENT if label == _OURS else named.get(label, _MUTED) for label in lines}


def _draw_line(
    axes: Axes, cells: list[Cell], levels: list[float], color: str, *, ours: bool
) -> None:
    x = [levels.index(cell.sparsity) for cell in cells]
    axes.plot(
        x,
        [cell.mean for cell in cells],
        color=color,
        linewidth=2.6 if ours else 1.3,
        marker="o",
        markersize=5 if ours else 3,
        zorder=3 if ours else 2,
    )
    ends = [[run.accuracy for run in cell.runs] for cell in cells]
    axes.fill_between(
        x, [min(e) for e in ends], [max(e) for e in ends], color=color, alpha=0.15, linewidth=0
    )


def _label_lines(
    axes: Axes, lines: dict[str, list[Cell]], levels: list[float], colors: dict[str, str]
) -> None:
    """Label each line at its right end, without overlaps."""
    bottom, top = axes.get_ylim()
    ends = sorted((cells[-1].sparsity, cells[-1].mean, label) for label, cells in lines.items())
    for level in levels:
        here = [(y, label) for sparsity, y, label in ends if sparsity == level]
        heights = _spread([y for y, _ in here], _LABEL_GAP * (top - bottom))
        for (y, label), height in zip(here, heights, strict=True):
            _label_line(axes, label, (levels.index(level), y), height, colors[label])


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
        color=_INK if color == _MUTED else color,
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


def _draw_dense(axes: Axes, setting: Setting) -> None:
    """Draw the accuracy of the dense network if there is a record of it."""
    for cell in setting.cells:
        if cell.label == "dense":
            axes.axhline(cell.mean, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            axes.annotate(
                "dense",
                (1, cell.mean),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=_INK,
            )


def main() -> None:
    """Read the records and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("image", type=Path)
    options = parser.parse_args()
    settings = compare(find_records([options.records]))
    draw(max(settings, key=lambda setting: sum(len(c.runs) for c in setting.cells)), options.image)


if __name__ == "__main__":
    main()
