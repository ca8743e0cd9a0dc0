"""The time that each node takes, and the table that `Engine.explain` prints."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.messages import printable
from probmask.runtime.lower.nodes import Convolution, Network, Node
from probmask.runtime.plan.partition import (
    LANES,
    Choices,
    Step,
    Timing,
    candidates,
    first_small,
    steps_of,
)
from probmask.runtime.plan.program import build_program
from probmask.runtime.run.kernel_step import Runner

# Approximate time for measuring one operation, in seconds.
_BUDGET = 2e-3


def measure(network: Network, examples: Sequence[Tensor]) -> dict[str, Timing]:
    """Time each node, on the tensors that the examples lead to."""
    values: dict[str, Any] = dict(zip(network.inputs, examples, strict=True))
    dense = {node.name: _time_dense(node, values) for node in network.nodes}
    timings = {name: Timing(None, None, seconds) for name, seconds in dense.items()}
    for step in steps_of(network, candidates(network)):
        if step.sparse:
            sparse, grouped = _time_step(step, values)
            for node in step.nodes:
                name = node.name
                timings[name] = Timing(sparse[name], grouped.get(name), dense[name])
    return timings


def _time_dense(node: Node, values: dict[str, Any]) -> float:
    """Run a node in PyTorch and add its result to the values; time all runs but the first."""
    inputs = [values[name] for name in node.inputs]
    values[node.name] = node.call(*inputs)
    return shortest(lambda: node.call(*inputs), budget=4 * _BUDGET, least=2)


def shortest(function: Callable[[], Any], *, budget: float, least: int = 1) -> float:
    """Return the shortest of several runs, in seconds."""
    # With one thread, count the time of this thread only, not that of other programs.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best, spent, runs = float("inf"), 0.0, 0
    while runs < least or (spent < budget and runs < 100):
        started = clock()
        function()
        taken = clock() - started
        best, spent, runs = min(best, taken), spent + taken, runs + 1
    return best


def _time_step(step: Step, values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each node, one image at a time and in groups."""
    inputs = [values[external.name].contiguous() for external in step.inputs]
    images = inputs[0].shape[: len(step.inputs[0].form.leading)].numel()
    sparse = _time_program(step, inputs, images, lanes=1, ungrouped=len(step.nodes))
    if images < LANES:
        return sparse, {}
    small = first_small(step.nodes)
    return sparse, _time_program(step, inputs, images, lanes=LANES, ungrouped=small)


def _time_program(
    step: Step, inputs: list[Tensor], images: int, *, lanes: int, ungrouped: int
) -> dict[str, float]:
    """Return the seconds of each node for all images; with lanes, only of the grouped nodes."""
    program = build_program(step, threads=1, lanes=lanes, ungrouped=ungrouped)
    if lanes > 1 and program.group == 1:
        return {}
    outputs = [
        torch.empty(images, external.form.size, dtype=torch.float32, device="cpu")
        for external in step.outputs
    ]
    addresses = np.array([t.data_ptr() for t in (*inputs, *outputs)], np.int64)
    seconds = Runner(program).time_operations(addresses, budget=_BUDGET)
    names = {node.name for node in (step.nodes[ungrouped:] if lanes > 1 else step.nodes)}
    times = dict.fromkeys(names, 0.0)
    for owner, taken in zip(program.owners, seconds, strict=True):
        if owner in names:
            times[owner] += taken * images / lanes
    return times


def describe(
    network: Network, choices: Choices, timings: dict[str, Timing]
) -> list[dict[str, Any]]:
    """Return, for each node, where it runs and why, and its times in milliseconds."""
    return [_describe(node, choices, timings[node.name]) for node in network.nodes]


def _describe(node: Node, choices: Choices, timing: Timing) -> dict[str, Any]:
    sparse = node.name in choices.sparse
    on_kernels = timing.on_kernels
    return {
        "node": node.name,
        "layer": node.label,
        "output": "×".join(map(str, node.trailing)) if node.form is not None else "",
        "density": node.density if isinstance(node, Convolution) else None,
        "runs": "model" if choices.model else "kernels" if sparse else "PyTorch",
        "why": _reason(node, choices, timing),
        "kernels_ms": None if on_kernels is None else 1e3 * on_kernels,
        "pytorch_ms": 1e3 * timing.dense,
    }


def _reason(node: Node, choices: Choices, timing: Timing) -> str:
    if choices.model:
        return "the model as a whole is faster"
    if timing.on_kernels is None:
        return node.reason or "no kernel"
    faster = timing.on_kernels < timing.dense
    if node.name in choices.sparse:
        return "faster" if faster else "its neighbors run on the kernels"
    return "its neighbors run in PyTorch" if faster else "faster in PyTorch"


def print_table(
    rows: list[dict[str, Any]], call: float, compile_seconds: float, threads: int
) -> None:
    """Print the rows, the rest of a call that takes ``call`` milliseconds, and its total.

    Times are in microseconds if the call takes less than a millisecond.
    """
    unit, time = ("ms", _milliseconds) if call >= 1 else ("µs", _microseconds)
    headings = ("layer", "output", "kept", "runs in", f"kernels {unit}", f"PyTorch {unit}", "why")
    cells = [headings, *(_cells(row, time) for row in rows), *_rest(rows, call, time)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    for row in cells:
        aligned = [
            cell.rjust(width) if i in (2, 4, 5) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())
    dense = sum(row["pytorch_ms"] for row in rows)
    print(
        f"\n{time(call)} {unit} per call; {time(dense)} {unit} for all operations in PyTorch, one "
        f"by one; {threads} thread{'s' * (threads > 1)}; compiled in {compile_seconds:.1f} s"
    )


def _rest(
    rows: list[dict[str, Any]], call: float, time: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """Return the row of the time that no operation takes: copies between them, and the call."""
    if any(row["runs"] == "model" for row in rows):
        return []
    used = sum(row["kernels_ms" if row["runs"] == "kernels" else "pytorch_ms"] for row in rows)
    why = "copies of inputs and outputs, the call, and caches that other layers have filled"
    on_kernels = any(row["runs"] == "kernels" for row in rows)
    times = (time(call - used), "") if on_kernels else ("", time(call - used))
    return [("(the rest of a call)", "", "", "", *times, why)]


def _cells(row: dict[str, Any], time: Callable[[float], str]) -> tuple[str, ...]:
    density = "" if row["density"] is None else f"{100 * row['density']:.2f} %"
    times = ("" if row[key] is None else time(row[key]) for key in ("kernels_ms", "pytorch_ms"))
    return (printable(row["layer"]), row["output"], density, row["runs"], *times, row["why"])


def _milliseconds(value: float) -> str:
    return f"{value:.3f}"


def _microseconds(milliseconds: float) -> str:
    return f"{1e3 * milliseconds:.2f}"
