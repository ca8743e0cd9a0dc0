"""Tables and plot of docs/results/inference_speed.md, from the measurements of `inference.py`."""

from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Target speedups over the best dense engine, by network, batch size and sparsity.
GOALS = {
    ("resnet32", 1): {"0.9": 3, "0.95": 5, "0.98": 9, "0.99": 12},
    ("resnet32", 64): {"0.9": 3, "0.95": 5, "0.98": 10, "0.99": 15},
    ("vgg19", 1): {"0.9": 3, "0.95": 6, "0.98": 12, "0.99": 20},
    ("vgg19", 64): {"0.9": 3, "0.95": 6, "0.98": 12, "0.99": 20},
    ("resnet50", 1): {"0.9": 2.5, "0.95": 4.5, "0.98": 9, "0.99": 14},
    ("mobilenetv1", 1): {"0.9": 2, "0.95": 3, "0.98": 5, "0.99": 6},
    **{("minilm", n): {"0.8": 1.3, "0.9": 2.2, "0.95": 3.5, "0.98": 5} for n in (1, 8)},
    **{("vit", n): {"0.8": 1.2, "0.9": 2, "0.95": 3, "0.98": 4.5} for n in (1, 8)},
    **{("lstm", n): {"0.8": 1.5, "0.9": 2.5, "0.95": 4, "0.98": 7} for n in (1, 16)},
    ("unet", 1): {"0.8": 1.5, "0.9": 3, "0.95": 5, "0.98": 9},
    ("convnext", 1): {"0.8": 1.3, "0.9": 2.2, "0.95": 3.5, "0.98": 5},
}


def print_all(rows: list[Row]) -> None:
    """Print tables of medians, fastest calls, target speedups and DeepSparse."""
    print("\nMedians:\n")
    print_times(rows)
    print("\nFastest calls:\n")
    print_times([{**row, **row["fastest"]} for row in rows])
    with_goals = [
        row
        for row in rows
        if GOALS.get((row["network"], row["batch"]), {}).keys() & row["sparse_ms"].keys()
    ]
    if with_goals:
        print("\nTarget speedups (target: median):\n")
        _print_goals(with_goals)
    if any("deepsparse_ms" in row for row in rows):
        print("\nDeepSparse, medians (in parentheses the speedup of probmask over it):\n")
        _print_deepsparse([row for row in rows if "deepsparse_ms" in row])


def print_times(rows: list[Row]) -> None:
    """Print the milliseconds of all engines, and the speedup of the sparse one."""
    dense = list(dict.fromkeys(key for row in rows for key in row["dense_ms"]))
    sparse = _sparsities(rows, "sparse_ms")
    lines = []
    for row in rows:
        cells = [f"{row['dense_ms'][key]:.2f}" if key in row["dense_ms"] else "" for key in dense]
        for key in sparse:
            ms, ratio = row["sparse_ms"].get(key), row["times_faster"].get(key)
            cells.append("" if ms is None else f"{ms:.2f} ({ratio:.1f}×)")
        lines.append((_name(row), cells))
    _print([*(f"{key} ms" for key in dense), *map(_percent, sparse)], lines)


def _print_goals(rows: list[Row]) -> None:
    sparse = _sparsities(rows, "sparse_ms")
    lines = []
    for row in rows:
        goals = GOALS[row["network"], row["batch"]]
        cells = []
        for key in sparse:
            found = row["times_faster"].get(key)
            if key not in goals or found is None:
                cells.append("")
                continue
            verdict = "reached" if found >= goals[key] else "missed"
            cells.append(f"{goals[key]:g}×: {found:.1f}, {verdict}")
        lines.append((_name(row), cells))
    _print([_percent(key) for key in sparse], lines)


def _print_deepsparse(rows: list[Row]) -> None:
    sparse = _sparsities(rows, "deepsparse_ms")
    lines = []
    for row in rows:
        pairs = [(row["deepsparse_ms"].get(key), row["sparse_ms"].get(key)) for key in sparse]
        cells = [f"{a:.2f} ({a / b:.1f}×)" if a and b else "" for a, b in pairs]
        lines.append((_name(row), cells))
    _print([_percent(key) for key in sparse], lines)


def _print(heads: list[str], lines: list[tuple[str, list[str]]]) -> None:
    print(f"| network, batch | {' | '.join(heads)} |")
    print(f"|---|{'---:|' * len(heads)}")
    for name, cells in lines:
        print(f"| {name} | {' | '.join(cells)} |")


def _sparsities(rows: list[Row], of: str) -> list[str]:
    return sorted({key for row in rows for key in row.get(of, {})}, key=float)


def _name(row: Row) -> str:
    threads = f", {row['threads']} threads" if row["threads"] > 1 else ""
    return f"{row['network']}, {row['batch']}{threads}"


def _percent(key: str) -> str:
    return f"{100 * float(key):g} %"


def plot(rows: list[Row], path: Path) -> None:
    """Plot the speedups of probmask and, dotted, of DeepSparse against sparsity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for row in rows:
        best = min(row["dense_ms"].values())
        for ms, style, label in (
            (row["sparse_ms"], "-", f"{_name(row).replace(', ', ', batch ', 1)}"),
            (row.get("deepsparse_ms", {}), ":", None),
        ):
            points = sorted((float(key), best / value) for key, value in ms.items())
            places = [f"{100 * sparsity:g} %" for sparsity, _ in points]
            color = axes.get_lines()[-1].get_color() if label is None else None
            heights = [height for _, height in points]
            axes.plot(places, heights, style, marker="o", markersize=4, color=color, label=label)
    if any("deepsparse_ms" in row for row in rows):
        axes.plot([], [], ":", color="gray", label="DeepSparse, same colors")
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(yscale="log", xlabel="sparsity", ylabel="times faster than the best dense engine")
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150, bbox_inches="tight")
