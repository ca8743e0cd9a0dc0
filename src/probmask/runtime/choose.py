"""Which layers run sparse and which in PyTorch, and which run image by image: by measuring."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.runtime.native import Runner
from probmask.runtime.nodes import Network, Node
from probmask.runtime.program import build
from probmask.runtime.schedule import Step, schedule

# Images side by side in a group, for layers whose planes are small.
LANES = 16
# Planes of at most so many positions may be computed in groups.
_SMALL = 64
# Seconds that the measuring of one operation may take, more or less.
_BUDGET = 2e-3
# Going from PyTorch to the kernels and back: seconds for the call, and per number copied.
_CROSSING, _PER_NUMBER = 15e-6, 0.5e-9


@dataclass(frozen=True)
class Timing:
    """Seconds of a node for the whole batch: on the kernels, in groups (if it can), in PyTorch."""

    sparse: float
    grouped: float | None
    dense: float


def candidates(network: Network) -> set[str]:
    """The nodes that have a kernel."""
    return {node.name for node in network.nodes if node.form is not None}


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


def first_small(nodes: Sequence[Node]) -> int:
    """The first node from which on all planes are small."""
    for i in range(len(nodes), 0, -1):
        forms = (nodes[i - 1].form, *nodes[i - 1].input_forms)
        if any(form is not None and form.positions > _SMALL for form in forms):
            return i
    return 0


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


def choose_sparse(network: Network, timings: dict[str, Timing]) -> set[str]:
    """The nodes to run on the kernels: the cheapest way through the network, crossings included."""
    order = network.nodes
    sizes = {n.name: n.form.size if n.form is not None else 0 for n in order}
    living = _living(network)
    # For each place of the last node: the cost so far, and the choices that led there.
    best: dict[bool, tuple[float, list[bool]]] = {False: (0.0, [])}
    for i, node in enumerate(order):
        crossing = _CROSSING + _PER_NUMBER * sum(sizes.get(name, 0) for name in living[i])
        timing = timings.get(node.name)
        options = {False: timing.dense if timing is not None else 0.0}
        if timing is not None:
            fastest = (
                timing.sparse if timing.grouped is None else min(timing.sparse, timing.grouped)
            )
            options[True] = fastest
        following = {}
        for here, cost in options.items():
            ways = [
                (spent + cost + (crossing if before != here else 0.0), [*path, here])
                for before, (spent, path) in best.items()
            ]
            following[here] = min(ways, key=lambda way: way[0])
        best = following
    _, path = min(best.values(), key=lambda way: way[0])
    return {node.name for node, sparse in zip(order, path, strict=True) if sparse}


def _living(network: Network) -> list[set[str]]:
    """Before each node: the tensors that it or a later one reads."""
    living, needed = [], set(network.outputs)
    for node in reversed(network.nodes):
        needed = (needed - {node.name}) | set(node.inputs)
        living.append(set(needed))
    return living[::-1]


def choose_lone(step: Step, timings: dict[str, Timing]) -> int:
    """How many nodes of the step to run image by image, before groups take over."""
    nodes = step.nodes
    first = first_small(nodes)
    alone = [timings[node.name].sparse for node in nodes]
    grouped = [timings[node.name].grouped for node in nodes]
    if any(seconds is None for seconds in grouped[first:]):
        return len(nodes)
    costs = {
        cut: sum(alone[:cut]) + sum(seconds or 0.0 for seconds in grouped[cut:])
        for cut in range(first, len(nodes) + 1)
    }
    return min(costs, key=lambda cut: costs[cut])
