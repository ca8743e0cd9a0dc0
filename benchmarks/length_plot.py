"""Draw accuracy against the number of updates, a line per method, from committed records.

    python benchmarks/length_plot.py docs/results/training_length docs/images/training_length.png

Needs matplotlib (`pip install -c constraints.txt -e '.[bench]'`). A row of plots per network, a
column per sparsity. `line_plot` explains the lines; the gray dashed line is the dense network.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from line_plot import INK, Point, draw_lines
from probmask.analysis.identity import method_label
from probmask.analysis.records import Run, find_records


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the plots and write them to a file."""
    networks = sorted({(run.model, run.data) for run in runs})
    levels = sorted({run.sparsity for run in runs if run.sparsity > 0})
    figure = Figure(figsize=(8 * len(levels), 5.2 * len(networks)), dpi=150, layout="constrained")
    grid = figure.subplots(len(networks), len(levels), squeeze=False)
    for row, network in zip(grid, networks, strict=True):
        for axes, level in zip(row, levels, strict=True):
            here = [run for run in runs if (run.model, run.data) == network]
            _draw_panel(axes, here, level)
            title = f"{network[0]} on {network[1]}, {100 * level:g} % of the weights pruned"
            axes.set_title(title, loc="left", color=INK)
    figure.savefig(path)


def _draw_panel(axes: Axes, runs: Sequence[Run], level: float) -> None:
    lengths = sorted({run.record["updates"] for run in runs})
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.sparsity in (0, level):
            found[method_label(run.record["method"])][run.record["updates"]].append(run.accuracy)
    lines = {
        label: [Point(lengths.index(n), tuple(values[n])) for n in sorted(values)]
        for label, values in found.items()
    }
    dense = lines.pop("dense", [])
    axes.plot([p.x for p in dense], [p.mean for p in dense], color=INK, dashes=(4, 3), linewidth=1)
    draw_lines(axes, lines, [f"{n:,}" for n in lengths])
    axes.set_xlabel("updates")


def main() -> None:
    """Read the records and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("image", type=Path)
    options = parser.parse_args()
    draw(find_records([options.records]), options.image)


if __name__ == "__main__":
    main()
