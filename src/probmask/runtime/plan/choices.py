"""Choices: which nodes run on the kernels, and which of them for one image at a time.

They are derived from the measured time of each node, and can be saved to a file.
"""

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

# Number of images in a group.
LANES = 16
# Layers whose planes have at most this many positions may process groups of images.
_SMALL_PLANE = 64
# Cost of going from PyTorch to the kernels or back: seconds per crossing, and per element copied.
_CROSSING, _PER_ELEMENT = 15e-6, 0.5e-9


@dataclass(frozen=True)
class Choices:
    """The nodes that run on the kernels, and where each step changes to groups of images.

    Attributes:
        sparse: Names of the nodes that run on the kernels.
        ungrouped: For the first node of a step, the number of the step's nodes that run for one
            image at a time. The others run for groups. Default: all nodes of the step.
    """

    sparse: frozenset[str]
    ungrouped: Mapping[str, int]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the choices as JSON, with the name of this processor.

        Args:
            path: File to write.
            overwrite: Whether to replace an existing file.

        Raises:
            InputError: If the file exists and ``overwrite`` is False, or cannot be written.

        Example:
            >>> import tempfile, torch, probmask
            >>> model, x = torch.nn.Linear(4, 2), torch.zeros(1, 4)
            >>> engine = probmask.runtime.compile(model, x, layers="sparse")
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     engine.choices.save(directory + "/choices.json")
            ...     other = probmask.runtime.compile(model, x, choices=directory + "/choices.json")
            >>> other.choices == engine.choices
            True
        """
        content = {
            "processor": processor(),
            "sparse": sorted(self.sparse),
            "lone": dict(sorted(self.ungrouped.items())),
        }
        write_atomically(path, json.dumps(content, indent=2).encode(), overwrite=overwrite)


def read_choices(path: str | os.PathLike[str], network: Network) -> Choices:
    """Read saved choices. Raise if they belong to another network or processor."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        sparse = frozenset(str(name) for name in content["sparse"])
        ungrouped = {str(name): int(count) for name, count in content["lone"].items()}
        measured_on = str(content["processor"])
    except OSError as error:
        raise InputError(f"choices={path}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"choices={path}: not a file that Engine.choices.save wrote ({error!r})."
        ) from error
    unknown = sorted((sparse | set(ungrouped)) - candidates(network))
    if unknown:
        raise InputError(
            f"choices={path}: made for another network, with a node {unknown[0]!r}. Compile "
            "without choices and save them again."
        )
    if measured_on != processor():
        raise InputError(
            f"choices={path}: measured on {measured_on}, but this is {processor()}. Compile "
            "without choices and save them again."
        )
    return Choices(sparse, ungrouped)


def processor() -> str:
    """Return the processor's name in LLVM, which kernels are compiled for."""
    return f"{platform.machine()} {llvm.get_host_cpu_name()}"


@dataclass(frozen=True)
class Timing:
    """Seconds that a node takes for the whole batch.

    Attributes:
        sparse: On the kernels, one image at a time.
        grouped: On the kernels, for groups of images; None if the node cannot process groups.
        dense: In PyTorch.
    """

    sparse: float
    grouped: float | None
    dense: float

    @property
    def on_kernels(self) -> float:
        """The faster way on the kernels."""
        return self.sparse if self.grouped is None else min(self.sparse, self.grouped)


def candidates(network: Network) -> set[str]:
    """Return the names of the nodes that have a kernel."""
    return {node.name for node in network.nodes if node.form is not None}


def first_small(nodes: Sequence[Node]) -> int:
    """Return the index from which on all nodes have small planes."""
    for i in range(len(nodes), 0, -1):
        forms = (nodes[i - 1].form, *nodes[i - 1].input_forms)
        if any(form is not None and form.positions > _SMALL_PLANE for form in forms):
            return i
    return 0


def choose_sparse(network: Network, timings: dict[str, Timing]) -> set[str]:
    """Return the nodes to run on the kernels: the cheapest path, including crossings.

    Dynamic programming over the nodes in order, with two states: on the kernels or in PyTorch.
    """
    order = network.nodes
    sizes = {n.name: n.form.size if n.form is not None else 0 for n in order}
    live = _live_tensors(network)
    # For each state of the last node: the cost so far, and the states that led there.
    best: dict[bool, tuple[float, list[bool]]] = {False: (0.0, [])}
    for i, node in enumerate(order):
        crossing = _CROSSING + _PER_ELEMENT * sum(sizes.get(name, 0) for name in live[i])
        timing = timings.get(node.name)
        costs = {False: timing.dense if timing is not None else 0.0}
        if timing is not None:
            costs[True] = timing.on_kernels
        following = {}
        for state, cost in costs.items():
            paths = [
                (spent + cost + (crossing if before != state else 0.0), [*path, state])
                for before, (spent, path) in best.items()
            ]
            following[state] = min(paths, key=lambda path: path[0])
        best = following
    _, path = min(best.values(), key=lambda path: path[0])
    return {node.name for node, sparse in zip(order, path, strict=True) if sparse}


def _live_tensors(network: Network) -> list[set[str]]:
    """Return, for each node, the tensors that it or a later node reads."""
    live, needed = [], set(network.outputs)
    for node in reversed(network.nodes):
        needed = (needed - {node.name}) | set(node.inputs)
        live.append(set(needed))
    return live[::-1]


def choose_ungrouped(step: Step, timings: dict[str, Timing]) -> int:
    """Return the number of the step's nodes to run for one image at a time, before groups."""
    nodes = step.nodes
    first = first_small(nodes)
    single = [timings[node.name].sparse for node in nodes]
    grouped = [timings[node.name].grouped for node in nodes]
    if any(seconds is None for seconds in grouped[first:]):
        return len(nodes)
    costs = {
        cut: sum(single[:cut]) + sum(seconds or 0.0 for seconds in grouped[cut:])
        for cut in range(first, len(nodes) + 1)
    }
    return min(costs, key=lambda cut: costs[cut])
