"""Draw accuracy against sparsity, a line per method, from committed records.

    python benchmarks/leaderboard_plot.py docs/results/records docs/images/leaderboard.png

Needs matplotlib (`pip install -c constraints.txt -e '.[bench]'`). Where there are several trainings
among the records, the one with most runs is drawn; a point is the mean over seeds, the band reaches
from the worst to the best of them. Dashed: the dense network.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from probmask.analysis.comparison import Cell, Setting, compare
from probmask.analysis.records import find_records

_OURS = "probmask"
_INK, _MUTED, _ACCENT = "#1f2430", "#9aa3b2", "#d1495b"
_HALO = [withStroke(linewidth=2.5, foreground="white")]  # of names that lines go through
_APART = 0.028  # of the height: between two labels


def draw(setting: Setting, path: Path) -> None:
    """Write the picture."""
    lines = _lines(setting)
    levels = sorted({cell.sparsity for cells in lines.values() for cell in cells})
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for label, cells in sorted(lines.items(), key=lambda line: line[0] == _OURS):
        _draw_line(axes, label, cells, levels)
    _draw_dense(axes, setting)
    _name_lines(axes, lines, levels)
    axes.set_xticks(range(len(levels)), [f"{100 * level:g} %" for level in levels])
    axes.set_xlim(-0.15, len(levels) - 0.25)
    axes.set_xlabel("weights removed")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"{setting.title}: {', '.join(setting.details[:2])}", loc="left", color=_INK)
    axes.grid(axis="y", color="#e6e9ef")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _lines(setting: Setting) -> dict[str, list[Cell]]:
    """The cells of each method by sparsity, of methods that have more than one."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in sorted(setting.cells, key=lambda cell: cell.sparsity):
        if cell.cost == "params" and cell.sparsity > 0 and cell.verified:
            found[cell.label].append(cell)
    return {label: cells for label, cells in found.items() if len(cells) > 1}


def _draw_line(axes: Axes, label: str, cells: list[Cell], levels: list[float]) -> None:
    ours = label == _OURS
    x = [levels.index(cell.sparsity) for cell in cells]
    colour = _ACCENT if ours else _MUTED
    axes.plot(
        x,
        [cell.mean for cell in cells],
        color=colour,
        linewidth=2.6 if ours else 1.3,
        marker="o",
        markersize=5 if ours else 3,
        zorder=3 if ours else 2,
    )
    ends = [[run.accuracy for run in cell.runs] for cell in cells]
    axes.fill_between(
        x, [min(e) for e in ends], [max(e) for e in ends], color=colour, alpha=0.15, linewidth=0
    )


def _name_lines(axes: Axes, lines: dict[str, list[Cell]], levels: list[float]) -> None:
    """Names at the right end of each line, moved apart where they would overlap."""
    lowest = float("-inf")
    bottom, top = axes.get_ylim()
    apart = _APART * (top - bottom)
    ends = sorted(lines.items(), key=lambda line: line[1][-1].mean)
    for label, cells in ends:
        x, y = levels.index(cells[-1].sparsity), cells[-1].mean
        height = max(y, lowest + apart) if x == len(levels) - 1 else y
        if x == len(levels) - 1:
            lowest = height
        ours = label == _OURS
        axes.annotate(
            label,
            (x, height),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9 if ours else 8,
            fontweight="bold" if ours else "normal",
            color=_ACCENT if ours else _INK,
            path_effects=_HALO,
        )


def _draw_dense(axes: Axes, setting: Setting) -> None:
    """What the network reaches with all of its weights, if somebody has trained it so."""
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
    """Read the records and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    settings = compare(find_records([options.records]))
    draw(
        max(settings, key=lambda setting: sum(len(c.runs) for c in setting.cells)), options.picture
    )


if __name__ == "__main__":
    main()
