"""Print and draw the fraction of each layer that the methods keep, from records.

    python benchmarks/layer_shares.py docs/results/training_length docs/results/paper_claims \
        --updates 58968 --methods pbw 'probmask*' --image layers.png

Prints a table in Markdown: all layers, or a summary if there are many. With ``--image`` it also
draws the fractions, a panel per sparsity; that needs matplotlib (`pip install -c constraints.txt -e
'.[bench]'`). Figures are means over seeds. A layer that keeps no weight is shown as 0, and in the
plot at the bottom.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from probmask.analysis.records import Run, filter_runs, find_records

Row = tuple[float, str]  # sparsity and method
INK = "#1f2430"
_MOST_COLUMNS = 6
_PANELS_PER_ROW = 3


def kept_by_layer(runs: Sequence[Run]) -> dict[Row, dict[str, tuple[float, int]]]:
    """Return the mean number of kept weights and the size of each layer, by sparsity and method."""
    grouped: dict[Row, list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.sparsity, run.label), []).append(run)
    return {
        row: {
            layer["name"].removesuffix(".weight"): (
                statistics.fmean(run.record["layers"][index]["kept"] for run in grouped[row]),
                layer["size"],
            )
            for index, layer in enumerate(grouped[row][0].record["layers"])
        }
        for row in sorted(grouped)
    }


def print_table(found: Mapping[Row, Mapping[str, tuple[float, int]]]) -> None:
    """Print the fraction and number of the kept weights, a row per sparsity and method."""
    names = list(next(iter(found.values())))
    summarized = len(names) > _MOST_COLUMNS
    headings = ["first layer", "last layer", "least of all", "empty layers"]
    headings = headings if summarized else names
    print(f"| sparsity | method | {' | '.join(headings)} |")
    print(f"|---:|---|{'---:|' * len(headings)}")
    for (sparsity, label), layers in found.items():
        shares = list(layers.values())
        if summarized:
            least = min(shares, key=lambda share: share[0] / share[1])
            cells = [_share(*share) for share in (shares[0], shares[-1], least)]
            cells.append(str(sum(kept < 1 for kept, _ in shares)))
        else:
            cells = [_share(*share) for share in shares]
        print(f"| {100 * sparsity:g} % | {label} | {' | '.join(cells)} |")


def _share(kept: float, size: int) -> str:
    return f"{100 * kept / size:.3g} % ({kept:,.0f})"


def draw(found: Mapping[Row, Mapping[str, tuple[float, int]]], path: Path) -> None:
    """Draw the fractions on a logarithmic scale, a panel per sparsity and a line per method."""
    from matplotlib.figure import Figure

    levels = sorted({sparsity for sparsity, _ in found})
    labels = sorted({label for _, label in found})
    names = list(next(iter(found.values())))
    least = min(1 / size for layers in found.values() for _, size in layers.values())
    width = min(len(levels), _PANELS_PER_ROW)
    height = math.ceil(len(levels) / width)
    figure = Figure(figsize=(3.6 * width, 3.4 * height), dpi=150, layout="constrained")
    panels = list(figure.subplots(height, width, squeeze=False, sharey=True).flat)
    for axes in panels[len(levels) :]:
        axes.set_visible(False)
    for axes, level in zip(panels, levels, strict=False):
        for index, label in enumerate(labels):
            if (level, label) in found:
                layers = found[level, label].values()
                axes.plot(
                    range(len(names)),
                    [max(kept / size, least / 2) for kept, size in layers],
                    color=f"C{index}",
                    marker="osD^vPX*"[index % 8],
                    markersize=5,
                    linewidth=1.4,
                    label=label,
                )
        axes.axhline(1 - level, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_yscale("log")
        if len(names) > _MOST_COLUMNS:
            axes.set_xticks(range(0, len(names), 3), range(1, len(names) + 1, 3))
            axes.set_xlabel("layer")
        else:
            axes.set_xticks(range(len(names)), names)
        axes.set_title(f"{100 * level:g} % pruned", loc="left", color=INK)
        axes.grid(axis="y", color="#e6e9ef")
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("fraction of the layer that is kept", fontsize=10)
    handles = {h.get_label(): h for axes in panels for h in axes.get_legend_handles_labels()[0]}
    figure.legend(
        handles=[handles[label] for label in labels],
        loc="outside lower center",
        ncols=min(len(labels), 5),
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the records, print the table and draw the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--updates", type=int, metavar="N")
    parser.add_argument("--methods", nargs="+", default=(), metavar="LABEL")
    parser.add_argument("--image", type=Path, metavar="PNG")
    options = parser.parse_args(arguments)
    runs = filter_runs(
        find_records(options.records), updates=options.updates, methods=options.methods
    )
    found = kept_by_layer([run for run in runs if run.sparsity > 0])
    print_table(found)
    if options.image is not None:
        draw(found, options.image)


if __name__ == "__main__":
    main()
