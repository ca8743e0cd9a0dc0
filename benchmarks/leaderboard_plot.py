"""Draw accuracy against sparsity, a line per method, from committed records.

    python benchmarks/leaderboard_plot.py docs/results/records docs/images/leaderboard.png

Needs matplotlib (`pip install -c constraints.txt -e '.[bench]'`). If the records are of several
settings, the one with the most runs is drawn. `line_plot` explains the lines. The dashed line is
the dense network.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from line_plot import INK, Point, draw_lines
from probmask.analysis.comparison import Cell, Setting, compare
from probmask.analysis.records import find_records


def draw(setting: Setting, path: Path) -> None:
    """Draw the plot and write it to a file."""
    found = _lines(setting)
    levels = sorted({cell.sparsity for cells in found.values() for cell in cells})
    lines = {
        label: [Point(levels.index(c.sparsity), tuple(r.accuracy for r in c.runs)) for c in cells]
        for label, cells in found.items()
    }
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    _draw_dense(axes, setting)
    draw_lines(axes, lines, [f"{100 * level:g} %" for level in levels])
    axes.set_xlabel("weights pruned")
    axes.set_title(f"{setting.title}: {', '.join(setting.details[:2])}", loc="left", color=INK)
    figure.savefig(path)


def _lines(setting: Setting) -> dict[str, list[Cell]]:
    """Return the cells of each method by sparsity, for methods with more than one sparsity."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in sorted(setting.cells, key=lambda cell: cell.sparsity):
        if cell.cost == "params" and cell.sparsity > 0 and cell.verified:
            found[cell.label].append(cell)
    return {label: cells for label, cells in found.items() if len(cells) > 1}


def _draw_dense(axes: Axes, setting: Setting) -> None:
    """Draw the accuracy of the dense network if there is a record of it."""
    for cell in setting.cells:
        if cell.label == "dense":
            axes.axhline(cell.mean, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            axes.annotate(
                "dense",
                (1, cell.mean),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=INK,
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
