"""Draw accuracy against the number of updates, a line per method, from committed records.

    python benchmarks/length_plot.py docs/results/training_length docs/results/paper_claims \
        --image docs/images/training_length.png

Needs matplotlib (`pip install -c constraints.txt -e '.[bench]'`). A plot per network and
sparsity. `line_plot` explains the lines; the dashed line is the dense network. A plot
begins a few points below the best method of the shortest training: what is lower is in the table.
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

_BELOW_BEST = 6.0  # points below the best method of the shortest training that a plot shows


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the plots and write them to a file."""
    lengths = defaultdict(set)
    for run in runs:
        lengths[run.model, run.data, run.sparsity].add(run.record["updates"])
    panels = sorted(key for key, found in lengths.items() if key[2] > 0 and len(found) > 1)
    figure = Figure(figsize=(7 * len(panels), 5.6), dpi=130, layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (model, data, level) in zip(row, panels, strict=True):
        _draw_panel(axes, [run for run in runs if (run.model, run.data) == (model, data)], level)
        title = f"{model} on {data}, {100 * level:g} % of the weights pruned"
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
    means = [point.mean for line in lines.values() for point in line]
    at_first = max(line[0].mean for line in lines.values() if line[0].x == 0)
    top = max(means + [point.mean for point in dense])
    axes.set_ylim(max(min(means), at_first - _BELOW_BEST) - 0.5, top + 0.5)
    axes.plot([p.x for p in dense], [p.mean for p in dense], color=INK, dashes=(4, 3), linewidth=1)
    draw_lines(axes, lines, [f"{n:,}" for n in lengths])
    axes.set_xlabel("updates")


def main() -> None:
    """Read the records and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--image", type=Path, required=True)
    options = parser.parse_args()
    runs = find_records(options.records)
    compared = {label for label, count in _lengths_of(runs).items() if count > 1}
    draw([run for run in runs if method_label(run.record["method"]) in compared], options.image)


def _lengths_of(runs: Sequence[Run]) -> dict[str, int]:
    """Return for each method the number of lengths it was trained for."""
    found: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        found[method_label(run.record["method"])].add(run.record["updates"])
    return {label: len(lengths) for label, lengths in found.items()}


if __name__ == "__main__":
    main()
