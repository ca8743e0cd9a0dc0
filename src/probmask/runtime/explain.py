"""What runs where, as rows and as a table."""

from collections.abc import Callable
from typing import Any

from probmask.runtime.choices import Choices
from probmask.runtime.choose import Timing
from probmask.runtime.nodes import Convolution, Network, Node


def describe(
    network: Network, choices: Choices, timings: dict[str, Timing]
) -> list[dict[str, Any]]:
    """Of each node: what it is, where it runs and why, and milliseconds here and there."""
    return [_describe(node, choices, timings.get(node.name)) for node in network.nodes]


def _describe(node: Node, choices: Choices, timing: Timing | None) -> dict[str, Any]:
    sparse = node.name in choices.sparse
    kernels = None
    if timing is not None:
        kernels = timing.sparse if timing.grouped is None else min(timing.sparse, timing.grouped)
    return {
        "node": node.name,
        "layer": node.label,
        "output": "×".join(map(str, node.tail)) if node.form is not None else "",
        "density": node.density if isinstance(node, Convolution) else None,
        "runs": "kernels" if sparse else "PyTorch",
        "why": _why(node, sparse, kernels, timing),
        "kernels_ms": None if kernels is None else 1e3 * kernels,
        "pytorch_ms": None if timing is None else 1e3 * timing.dense,
    }


def _why(node: Node, sparse: bool, kernels: float | None, timing: Timing | None) -> str:
    if timing is None or kernels is None:
        return node.reason or "not measured"
    faster = kernels < timing.dense
    if sparse:
        return "faster" if faster else "its neighbours are on the kernels"
    return "its neighbours are in PyTorch" if faster else "faster there"


def print_table(rows: list[dict[str, Any]], compile_seconds: float, threads: int) -> None:
    """Print the rows, and the sum of what runs where; of small networks in microseconds."""
    used = sum(row["kernels_ms" if row["runs"] == "kernels" else "pytorch_ms"] or 0 for row in rows)
    dense = sum(row["pytorch_ms"] or 0 for row in rows)
    unit, time = ("ms", _milliseconds) if used >= 1 else ("µs", _microseconds)
    heads = ("layer", "output", "kept", "runs in", f"kernels {unit}", f"PyTorch {unit}", "why")
    cells = [heads, *(_cells(row, time) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    for row in cells:
        aligned = [
            cell.rjust(width) if i in (2, 4, 5) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())
    print(
        f"\n{time(used)} {unit} in all as chosen, {time(dense)} {unit} if all of it ran in PyTorch "
        f"(each layer by itself, one thread); {threads} thread{'s' * (threads > 1)}; "
        f"compiled in {compile_seconds:.1f} s"
    )


def _cells(row: dict[str, Any], time: Callable[[float], str]) -> tuple[str, ...]:
    density = "" if row["density"] is None else f"{100 * row['density']:.2f} %"
    times = ("" if row[key] is None else time(row[key]) for key in ("kernels_ms", "pytorch_ms"))
    return (row["layer"], row["output"], density, row["runs"], *times, row["why"])


def _milliseconds(value: float) -> str:
    return f"{value:.3f}"


def _microseconds(milliseconds: float) -> str:
    return f"{1e3 * milliseconds:.2f}"
