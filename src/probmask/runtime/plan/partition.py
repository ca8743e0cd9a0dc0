"""The partition of a network: which nodes run on the kernels, and the steps that follow from it.

`Choices` also say which nodes run for one image at a time. They are derived from the measured time
of each node, and can be saved to a file. A step is a run of nodes in the same place.
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
from probmask.runtime.lower.nodes import Form, Network, Node, Recurrent

# Number of images in a group.
LANES = 16
# Layers whose planes have at most this many positions may process groups of images.
_SMALL_PLANE = 64
# Cost of going from PyTorch to the kernels or back: seconds per crossing, and per element copied.
_CROSSING, _PER_ELEMENT = 6e-6, 0.5e-9


@dataclass(frozen=True)
class Choices:
    """The nodes that run on the kernels, and where each step changes to groups of images.

    Attributes:
        sparse: Names of the nodes that run on the kernels.
        ungrouped: For the first node of a step, the number of the step's nodes that run for one
            image at a time. The others run for groups. Default: all nodes of the step.
        model: Whether the model itself runs, as a whole, in PyTorch.
        undivided: First nodes of the steps whose layers are not divided among threads.
    """

    sparse: frozenset[str]
    ungrouped: Mapping[str, int]
    model: bool = False
    undivided: frozenset[str] = frozenset()

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
            "model": self.model,
            "undivided": sorted(self.undivided),
        }
        write_atomically(path, json.dumps(content, indent=2).encode(), overwrite=overwrite)


def read_choices(path: str | os.PathLike[str], network: Network) -> Choices:
    """Read saved choices. Raise if they belong to another network or processor."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        sparse = frozenset(str(name) for name in content["sparse"])
        ungrouped = {str(name): int(count) for name, count in content["lone"].items()}
        measured_on = str(content["processor"])
        model = bool(content.get("model", False))
        undivided = frozenset(str(name) for name in content.get("undivided", ()))
    except OSError as error:
        raise InputError(f"choices={path}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"choices={path}: not a file that Engine.choices.save wrote ({error!r})."
        ) from error
    unknown = sorted((sparse | undivided | set(ungrouped)) - candidates(network))
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
    return Choices(sparse, ungrouped, model, undivided)


def processor() -> str:
    """Return the processor's name in LLVM, which kernels are compiled for."""
    return f"{platform.machine()} {llvm.get_host_cpu_name()}"


@dataclass(frozen=True)
class Timing:
    """Seconds that a node takes for the whole batch.

    Attributes:
        sparse: On the kernels, one image at a time; None if the node has no kernel.
        grouped: On the kernels, for groups of images; None if the node cannot process groups.
        dense: In PyTorch, or in NumPy for a node without a kernel; None if it was not timed.
    """

    sparse: float | None
    grouped: float | None
    dense: float | None

    @property
    def on_kernels(self) -> float | None:
        """The faster way on the kernels."""
        times = [seconds for seconds in (self.sparse, self.grouped) if seconds is not None]
        return min(times, default=None)


def candidates(network: Network) -> set[str]:
    """Return the names of the nodes that have a kernel."""
    return {node.name for node in network.nodes if node.form is not None}


def all_on_kernels(network: Network) -> Choices:
    """Return the choices with every node that has a kernel on the kernels; vectors in groups."""
    sparse = candidates(network)
    steps = [step for step in steps_of(network, sparse) if step.sparse]
    ungrouped = {step.nodes[0].name: first_vector(step.nodes) for step in steps}
    return Choices(frozenset(sparse), ungrouped)


def first_small(nodes: Sequence[Node]) -> int:
    """Return the index from which on nodes may process groups: their planes are small.

    A recurrent layer takes groups whatever its number of steps, and so do the nodes after it.
    """
    recurrent = next((i for i, node in enumerate(nodes) if _is_recurrent(node)), len(nodes))
    return max(first_grouped(nodes), min(recurrent, _first_of_at_most(nodes, _SMALL_PLANE)))


def first_vector(nodes: Sequence[Node]) -> int:
    """Return the index from which on all nodes have a single position and can process groups.

    For vectors and recurrent layers, groups are always faster: their elements fill the registers.
    """
    return max(first_grouped(nodes), _first_of_at_most(nodes, 1))


def _first_of_at_most(nodes: Sequence[Node], positions: int) -> int:
    """Return the first index from which no plane has more than ``positions`` positions."""
    for i in range(len(nodes), 0, -1):
        node = nodes[i - 1]
        forms = () if _is_recurrent(node) else (node.form, *node.input_forms)
        if any(form is not None and form.positions > positions for form in forms):
            return i
    return 0


def _is_recurrent(node: Node) -> bool:
    return isinstance(node, Recurrent)


def first_grouped(nodes: Sequence[Node]) -> int:
    """Return the index from which on all nodes can process groups."""
    return max((i + 1 for i, node in enumerate(nodes) if not node.takes_groups), default=0)


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
        costs = {False: (timing.dense or 0.0) if timing is not None else 0.0}
        if timing is not None and timing.on_kernels is not None:
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


@dataclass(frozen=True)
class ExternalTensor:
    """A tensor outside of the arena that a step on the kernels reads or writes."""

    name: str
    form: Form
    # Shape without the leading dimensions.
    trailing: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """Nodes that run one after the other, on the kernels if ``sparse``, otherwise in PyTorch.

    ``inputs`` and ``outputs`` are the PyTorch tensors that a sparse step reads and writes. They are
    empty for a step in PyTorch.
    """

    nodes: tuple[Node, ...]
    sparse: bool
    inputs: tuple[ExternalTensor, ...] = ()
    outputs: tuple[ExternalTensor, ...] = ()


def steps_of(network: Network, sparse: set[str]) -> list[Step]:
    """Divide the network into steps: nodes named in ``sparse`` run on the kernels.

    The order is greedy: a node that can join the current step runs before one that cannot.
    """
    waiting = list(network.nodes)
    computed = set(network.inputs)
    steps: list[tuple[bool, list[Node]]] = []
    forms: dict[str, Form] = {}  # of the tensors in the current step, if it is on the kernels
    while waiting:
        ready = [node for node in waiting if computed.issuperset(node.inputs)]
        here = steps[-1][0] if steps else False
        chosen = next((n for n in ready if _can_join(n, n.name in sparse, here, forms)), None)
        if chosen is None:
            chosen = ready[0]
            steps.append((chosen.name in sparse, []))
            forms = {}
        elif not steps:
            steps.append((chosen.name in sparse, []))
        steps[-1][1].append(chosen)
        waiting.remove(chosen)
        computed.add(chosen.name)
        if steps[-1][0]:
            assert chosen.form is not None
            forms.update(zip(chosen.inputs, chosen.input_forms, strict=True))
            forms[chosen.name] = chosen.form
    return _with_boundaries(network, steps)


def _can_join(node: Node, sparse: bool, here: bool, forms: dict[str, Form]) -> bool:
    """Return whether a node can join the current step.

    It has to run in the same place, on the same images, and see every tensor in the same form.
    """
    if sparse != here:
        return False
    if not sparse or not forms:
        return True
    assert node.form is not None
    leading = next(iter(forms.values())).leading
    if node.form.leading != leading or any(form.leading != leading for form in node.input_forms):
        return False
    pairs = zip(node.inputs, node.input_forms, strict=True)
    return all(forms.get(name, form) == form for name, form in pairs)


def _with_boundaries(network: Network, steps: Sequence[tuple[bool, list[Node]]]) -> list[Step]:
    """Add the tensors that each sparse step reads from other steps, and those that others read."""
    nodes = {node.name: node for node in network.nodes}
    complete = []
    for i, (sparse, members) in enumerate(steps):
        if not sparse:
            complete.append(Step(tuple(members), sparse))
            continue
        own = {node.name for node in members}
        read_later = set(network.outputs).union(
            *(node.inputs for _, others in steps[i + 1 :] for node in others)
        )
        inputs: dict[str, ExternalTensor] = {}
        for node in members:
            for name, form in zip(node.inputs, node.input_forms, strict=True):
                if name not in own and name not in inputs:
                    trailing = nodes[name].trailing if name in nodes else ()
                    inputs[name] = ExternalTensor(name, form, trailing)
        outputs = tuple(
            ExternalTensor(node.name, node.form, node.trailing)
            for node in members
            if node.name in read_later and node.form is not None
        )
        complete.append(Step(tuple(members), sparse, tuple(inputs.values()), outputs))
    return complete


def choose_ungrouped(step: Step, timings: dict[str, Timing]) -> int:
    """Return the number of the step's nodes to run for one image at a time, before groups."""
    nodes = step.nodes
    first = first_small(nodes)
    single = [timings[node.name].sparse or 0.0 for node in nodes]
    grouped = [timings[node.name].grouped for node in nodes]
    if any(seconds is None for seconds in grouped[first:]):
        return len(nodes)
    costs = {
        cut: sum(single[:cut]) + sum(seconds or 0.0 for seconds in grouped[cut:])
        for cut in range(first, len(nodes) + 1)
    }
    return min(costs, key=lambda cut: costs[cut])
