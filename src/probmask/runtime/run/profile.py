"""The time that each node takes, and the table that `Engine.explain` prints."""

import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from probmask.messages import printable
from probmask.runtime.lower.nodes import (
    Convolution,
    Network,
    Node,
    Recurrent,
    TransposedConvolution,
)
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
from probmask.runtime.run.kernel_step import KernelStep, Runner, Tensors
from probmask.runtime.run.threads import Threads

_WITH_WEIGHTS = (Convolution, TransposedConvolution, Recurrent)
# Approximate time for measuring one operation, in seconds.
_BUDGET = 2e-3


def measure(
    network: Network, values: dict[str, Any], tensors: Tensors, threads: int
) -> dict[str, Timing]:
    """Time each node by its ``call``, and on the kernels if it has one.

    ``values`` has the inputs; the results of the nodes are added. ``threads`` is the number of
    threads that calls use.
    """
    dense = {node.name: _time_call(node, values, threads) for node in network.nodes}
    timings = {name: Timing(None, None, seconds) for name, seconds in dense.items()}
    for step in steps_of(network, candidates(network)):
        if step.sparse:
            sparse, grouped = _time_step(step, values, tensors)
            for node in step.nodes:
                name = node.name
                timings[name] = Timing(sparse[name], grouped.get(name), dense[name])
    return timings


def time_kernels(network: Network, values: dict[str, Any], tensors: Tensors) -> dict[str, Timing]:
    """Time each node where it runs without PyTorch: on the kernels, or by its ``call``."""
    timings = {}
    for step in steps_of(network, candidates(network)):
        if not step.sparse:
            for node in step.nodes:
                timings[node.name] = Timing(None, None, _time_call(node, values, 1))
            continue
        sparse, grouped = _time_step(step, values, tensors)
        timings |= {n.name: Timing(sparse[n.name], grouped.get(n.name), None) for n in step.nodes}
        KernelStep(step, build_program(step, threads=1), None, Threads(1), tensors)(values)
    return timings


def _time_call(node: Node, values: dict[str, Any], threads: int) -> float:
    """Run a node by its call and add its result to the values; time all runs but the first."""
    inputs = [values[name] for name in node.inputs]
    values[node.name] = node.call(*inputs)
    return shortest(lambda: node.call(*inputs), budget=4 * _BUDGET, least=2, threads=threads)


def shortest(
    function: Callable[[], Any], *, budget: float, least: int = 1, threads: int = 1
) -> float:
    """Return the shortest of several runs, in seconds."""
    # With one thread, count the time of this thread only, not that of other programs.
    clock = time.thread_time if threads == 1 else time.perf_counter
    best, spent, runs = float("inf"), 0.0, 0
    while runs < least or (spent < budget and runs < 100):
        started = clock()
        function()
        taken = clock() - started
        best, spent, runs = min(best, taken), spent + taken, runs + 1
    return best


def _time_step(
    step: Step, values: dict[str, Any], tensors: Tensors
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each node, one image at a time and in groups."""
    inputs = [tensors.contiguous(values[external.name]) for external in step.inputs]
    images = prod(inputs[0].shape[: len(step.inputs[0].form.leading)])
    outputs = [tensors.empty((images, external.form.size)) for external in step.outputs]
    addresses = np.array([tensors.address(t) for t in (*inputs, *outputs)], np.int64)
    sparse = _time_program(step, addresses, images, lanes=1, ungrouped=len(step.nodes))
    if images < LANES:
        return sparse, {}
    small = first_small(step.nodes)
    return sparse, _time_program(step, addresses, images, lanes=LANES, ungrouped=small)


def _time_program(
    step: Step, addresses: Any, images: int, *, lanes: int, ungrouped: int
) -> dict[str, float]:
    """Return the seconds of each node for all images; with lanes, only of the grouped nodes."""
    program = build_program(step, threads=1, lanes=lanes, ungrouped=ungrouped)
    if lanes > 1 and program.group == 1:
        return {}
    seconds = Runner(program).time_operations(addresses, budget=_BUDGET)
    names = {node.name for node in (step.nodes[ungrouped:] if lanes > 1 else step.nodes)}
    times = dict.fromkeys(names, 0.0)
    for owner, taken in zip(program.owners, seconds, strict=True):
        if owner in names:
            times[owner] += taken * images / lanes
    return times


def describe(
    network: Network, choices: Choices, timings: dict[str, Timing], elsewhere: str = "PyTorch"
) -> list[dict[str, Any]]:
    """Return, for each node, where it runs and why, and its times in milliseconds.

    ``elsewhere`` names what runs the nodes that are not on the kernels.
    """
    return [_describe(node, choices, timings[node.name], elsewhere) for node in network.nodes]


def _describe(node: Node, choices: Choices, timing: Timing, elsewhere: str) -> dict[str, Any]:
    sparse = node.name in choices.sparse
    on_kernels = timing.on_kernels
    return {
        "node": node.name,
        "layer": node.label,
        "output": "×".join(map(str, node.trailing)) if node.form is not None else "",
        "density": node.density if isinstance(node, _WITH_WEIGHTS) else None,
        "runs": "model" if choices.model else "kernels" if sparse else elsewhere,
        "why": _reason(node, choices, timing),
        "kernels_ms": None if on_kernels is None else 1e3 * on_kernels,
        "pytorch_ms": None if timing.dense is None else 1e3 * timing.dense,
    }


def _reason(node: Node, choices: Choices, timing: Timing) -> str:
    if choices.model:
        return "the model as a whole is faster"
    if timing.on_kernels is None:
        return node.reason or "no kernel"
    if timing.dense is None:
        return ""
    faster = timing.on_kernels < timing.dense
    if node.name in choices.sparse:
        return "faster" if faster else "its neighbors run on the kernels"
    if not faster:
        return "faster in PyTorch"
    if not choices.sparse:
        return "the network as a whole is faster in PyTorch"
    return "its neighbors run in PyTorch"


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
    dense = [row["pytorch_ms"] for row in rows]
    known = [taken for taken in dense if taken is not None]
    all_dense = f" {time(sum(known))} {unit} for all operations in PyTorch, one by one;"
    print(
        f"\n{time(call)} {unit} per call;{all_dense if len(known) == len(dense) else ''} {threads} "
        f"thread{'s' * (threads > 1)}; compiled in {compile_seconds:.1f} s"
    )


def _rest(
    rows: list[dict[str, Any]], call: float, time: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """Return the row of the time that no operation takes: copies between them, and the call.

    If the model itself runs, its operations may take longer one by one than as a whole.
    """
    used = sum(row["kernels_ms" if row["runs"] == "kernels" else "pytorch_ms"] for row in rows)
    why = "copies of inputs and outputs, the call, and caches that other layers have filled"
    if any(row["runs"] == "model" for row in rows):
        why = "the call, and what the model computes faster than its operations one by one"
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
