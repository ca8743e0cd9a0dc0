"""What was chosen for a network on a machine, and its file."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.runtime.lower.nodes import Network, Node
from probmask.runtime.plan.steps import Step


@dataclass(frozen=True)
class Choices:
    """The nodes that run on the sparse kernels, and where each step on them begins with groups.

    ``lone`` maps the first node of a step to the number of its nodes that run image by image.
    """

    sparse: frozenset[str]
    lone: Mapping[str, int]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write them as JSON, with the processor that they were measured on."""
        content = {
            "processor": processor(),
            "sparse": sorted(self.sparse),
            "lone": dict(sorted(self.lone.items())),
        }
        write_atomically(path, json.dumps(content, indent=2).encode(), overwrite=overwrite)


def read_choices(path: str | os.PathLike[str], network: Network) -> Choices:
    """Read saved choices, and refuse those of another network or another processor."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        sparse = frozenset(str(name) for name in content["sparse"])
        lone = {str(name): int(count) for name, count in content["lone"].items()}
        measured_on = str(content["processor"])
    except OSError as error:
        raise InputError(f"choices={path}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"choices={path}: is not a file that Engine.choices.save wrote ({error!r})."
        ) from error
    known = {node.name for node in network.nodes if node.form is not None}
    unknown = sorted((sparse | set(lone)) - known)
    if unknown:
        raise InputError(
            f"choices={path}: was made for another network, with a node {unknown[0]!r}; compile "
            "without choices and save them anew."
        )
    if measured_on != processor():
        raise InputError(
            f"choices={path}: was measured on {measured_on}, this is {processor()}; compile "
            "without choices and save them anew."
        )
    return Choices(sparse, lone)


def processor() -> str:
    """The processor as LLVM knows it: what code is compiled for."""
    return f"{platform.machine()} {llvm.get_host_cpu_name()}"


# Images side by side in a group, for layers whose planes are small.
LANES = 16


# Planes of at most so many positions may be computed in groups.
_SMALL = 64


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


def first_small(nodes: Sequence[Node]) -> int:
    """The first node from which on all planes are small."""
    for i in range(len(nodes), 0, -1):
        forms = (nodes[i - 1].form, *nodes[i - 1].input_forms)
        if any(form is not None and form.positions > _SMALL for form in forms):
            return i
    return 0


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
