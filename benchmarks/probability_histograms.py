"""Print and draw how the probabilities of ProbMask are distributed over the training, from records.

    python benchmarks/probability_histograms.py docs/results/training_length \
        docs/results/paper_claims --updates 58968 --methods 'probmask*' --image probabilities.png

The table, in Markdown, has a row where the budget reaches its final value, and a row for the last
histogram: just before the masks are frozen, or at the end. Its numbers are multiples of K, the
number of weights to keep. A probability is undecided between 0.05 and 0.95. With ``--image`` the
script draws the histograms at several moments and the undecided probabilities over the training, a
row per run; that needs matplotlib (`pip install -c constraints.txt -e '.[bench]'`).
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probmask.analysis.records import Run, filter_runs, find_records

_HEADINGS = (
    "method",
    "sparsity",
    "seed",
    "updates",
    "of",
    "temperature",
    "at least 0.95",
    "undecided",
    "of these, above 0.5",
)
_DRAWN = 5  # histograms per run
INK = "#1f2430"


def lines_with_histograms(run: Run) -> list[Mapping[str, Any]]:
    """Return the lines of the history that have a histogram of the probabilities."""
    return [line for line in run.history if "prob" in line.get("histograms", {})]


def moments(run: Run) -> list[Mapping[str, Any]]:
    """Return the first line with the final budget, and the last line with a histogram.

    The budget is read from the sum of the probabilities: a line of the log has already the budget
    of the update that follows.
    """
    lines = lines_with_histograms(run)
    most = 1.001 * run.record["kept"] / run.record["size"]
    first = next((line for line in lines if 1 - line["expected_sparsity"] <= most), lines[-1])
    return [first] if first is lines[-1] else [first, lines[-1]]


def print_table(runs: Sequence[Run]) -> None:
    """Print how many probabilities are decided, at two moments of each run."""
    print(f"| {' | '.join(_HEADINGS)} |")
    print(f"|---|{'---:|' * (len(_HEADINGS) - 1)}")
    for run in runs:
        for line in moments(run):
            counts, keep = line["histograms"]["prob"]["counts"], run.record["kept"]
            high = round(0.95 * len(counts))
            cells = [
                run.label,
                f"{100 * run.sparsity:g} %",
                str(run.seed),
                f"{line['step']:,}",
                f"{run.record['updates']:,}",
                f"{line['temperature']:.3f}",
                f"{sum(counts[high:]) / keep:.2f} K",
                f"{line['undecided_per_kept']:.2f} K",
                f"{sum(counts[len(counts) // 2 : high]) / keep:.2f} K",
            ]
            print(f"| {' | '.join(cells)} |")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the histograms of each run, and its undecided probabilities over the training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4 * len(runs)), dpi=150, layout="constrained")
    for (left, right), run in zip(figure.subplots(len(runs), 2, squeeze=False), runs, strict=True):
        lines = lines_with_histograms(run)
        _draw_histograms(left, run, lines)
        _draw_undecided(right, run, lines)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e6e9ef")
    figure.savefig(path)


def _draw_histograms(axes: Any, run: Run, lines: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib import colormaps

    final = run.record["kept"] / run.record["size"]
    falling = [line for line in lines if line["expected_sparsity"] > 0.1]
    chosen = [falling[round(i * (len(falling) - 1) / (_DRAWN - 1))] for i in range(_DRAWN)]
    for index, line in enumerate(chosen):
        counts = line["histograms"]["prob"]["counts"]
        edges = [i / len(counts) for i in range(len(counts) + 1)]
        axes.stairs(
            [count / run.record["kept"] for count in counts],
            edges,
            color=colormaps["viridis_r"](0.12 + 0.85 * index / (_DRAWN - 1)),
            linewidth=1.6,
            label=f"{line['step']:,} updates, sum {(1 - line['expected_sparsity']) / final:.3g} K, "
            f"τ = {line['temperature']:.2f}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("probability")
    axes.set_ylabel("number, multiples of K")
    axes.set_title(f"{run.label}, {100 * run.sparsity:g} %", loc="left", color=INK, fontsize=10)
    axes.legend(frameon=False, fontsize=7, loc="upper center")


def _draw_undecided(axes: Any, run: Run, lines: Sequence[Mapping[str, Any]]) -> None:
    keep, size = run.record["kept"], run.record["size"]
    steps = [line["step"] for line in lines]
    undecided = [line["undecided_per_kept"] for line in lines]
    high = [line["histograms"]["prob"]["counts"][-1] / keep for line in lines]
    axes.plot(steps, undecided, color="#d1495b", label="undecided: 0.05 to 0.95")
    axes.plot(steps, high, color="#2f6fb7", label="0.95 and above")
    axes.plot(
        steps,
        [(1 - line["expected_sparsity"]) * size / keep for line in lines],
        color=INK,
        linewidth=1,
        linestyle=(0, (4, 3)),
        label="sum of all probabilities",
    )
    axes.set_yscale("log")
    axes.set_xlim(0, run.record["updates"])
    axes.set_xlabel("updates")
    axes.legend(frameon=False, fontsize=8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the records, print the table and draw the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--updates", type=int, metavar="N")
    parser.add_argument("--methods", nargs="+", default=("probmask*",), metavar="LABEL")
    parser.add_argument("--image", type=Path, metavar="PNG")
    options = parser.parse_args(arguments)
    found = filter_runs(
        find_records(options.records), updates=options.updates, methods=options.methods
    )
    runs = [run for run in found if run.method == "probmask" and lines_with_histograms(run)]
    runs.sort(key=lambda run: (run.sparsity, run.label, run.record["updates"], run.seed))
    print_table(runs)
    if options.image is not None:
        draw(runs, options.image)


if __name__ == "__main__":
    main()
