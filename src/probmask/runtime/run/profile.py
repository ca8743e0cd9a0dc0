"""Which layers run sparse and which in PyTorch, and which run image by image: by measuring."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.runtime.lower.nodes import Convolution, Network, Node
from probmask.runtime.plan.choices import (
    LANES,
    Choices,
    Timing,
    candidates,
    first_small,
)
from probmask.runtime.plan.program import build
from probmask.runtime.plan.steps import Step, schedule
from probmask.runtime.run.runner import Runner

# Seconds that the measuring of one operation may take, more or less.
_BUDGET = 2e-3


def measure(network: Network, examples: Sequence[Tensor]) -> dict[str, Timing]:
    """Time each node that has a kernel, on the tensors that the examples lead to."""
    values: dict[str, Any] = dict(zip(network.inputs, examples, strict=True))
    dense = {node.name: _run_dense(node, values) for node in network.nodes}
    timings = {}
    for step in schedule(network, candidates(network)):
        if step.sparse:
            sparse, grouped = _time_step(step, values)
            for node in step.nodes:
                name = node.name
                timings[name] = Timing(sparse[name], grouped.get(name), dense[name])
    return timings


def _run_dense(node: Node, values: dict[str, Any]) -> float:
    """Run a node in PyTorch, and keep its result; the time of the second run or a later one."""
    inputs = [values[name] for name in node.inputs]
    values[node.name] = node.call(*inputs)
    if node.form is None:
        return 0.0
    return shortest(lambda: node.call(*inputs), budget=4 * _BUDGET, least=2)


def shortest(function: Callable[[], Any], *, budget: float, least: int = 1) -> float:
    """The shortest of several runs, in seconds."""
    # With one thread its own time counts, not that of others on the same processor.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best, spent, runs = float("inf"), 0.0, 0
    while runs < least or (spent < budget and runs < 100):
        started = clock()
        function()
        taken = clock() - started
        best, spent, runs = min(best, taken), spent + taken, runs + 1
    return best


def _time_step(step: Step, values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    inputs = [values[outside.name].contiguous() for outside in step.inputs]
    images = inputs[0].shape[: len(step.inputs[0].form.unit)].numel()
    sparse = _time_program(step, inputs, images, lanes=1, lone=len(step.nodes))
    if images < LANES:
        return sparse, {}
    lone = first_small(step.nodes)
    return sparse, _time_program(step, inputs, images, lanes=LANES, lone=lone)


def _time_program(
    step: Step, inputs: list[Tensor], images: int, *, lanes: int, lone: int
) -> dict[str, float]:
    """Seconds of each node for all images; of those from ``lone`` on, if in groups."""
    program = build(step.nodes, step.inputs, step.outputs, threads=1, lanes=lanes, lone=lone)
    if lanes > 1 and program.group == 1:
        return {}
    outputs = [
        torch.empty(images, outside.form.size, dtype=torch.float32, device="cpu")
        for outside in step.outputs
    ]
    addresses = np.array([t.data_ptr() for t in (*inputs, *outputs)], np.int64)
    seconds = Runner(program).time_operations(addresses, budget=_BUDGET)
    names = {node.name for node in (step.nodes[lone:] if lanes > 1 else step.nodes)}
    times = dict.fromkeys(names, 0.0)
    for owner, taken in zip(program.owners, seconds, strict=True):
        if owner in names:
            times[owner] += taken * images / lanes
    return times


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
