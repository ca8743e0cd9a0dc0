"""A part of the network as a table for the compiled driver: places of tensors, weights, masks."""

from collections.abc import Sequence
from dataclasses import dataclass

from probmask.runtime.lower.nodes import (
    Form,
    Network,
    Node,
)


@dataclass(frozen=True)
class Outside:
    """A tensor that comes from PyTorch or goes there."""

    name: str
    form: Form
    tail: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """Nodes that run one after the other in one place; ``form`` is None in PyTorch."""

    nodes: tuple[Node, ...]
    sparse: bool
    inputs: tuple[Outside, ...] = ()
    outputs: tuple[Outside, ...] = ()


def schedule(network: Network, sparse: set[str]) -> list[Step]:
    """Order the nodes in as few steps as a simple rule finds: stay where you are while you can."""
    waiting = list(network.nodes)
    known = set(network.inputs)
    steps: list[tuple[bool, list[Node]]] = []
    forms: dict[str, Form] = {}  # of what the current step on the kernels holds
    while waiting:
        ready = [node for node in waiting if known.issuperset(node.inputs)]
        here = steps[-1][0] if steps else False
        chosen = next((n for n in ready if _may_follow(n, n.name in sparse, here, forms)), None)
        if chosen is None:
            chosen = ready[0]
            steps.append((chosen.name in sparse, []))
            forms = {}
        elif not steps:
            steps.append((chosen.name in sparse, []))
        steps[-1][1].append(chosen)
        waiting.remove(chosen)
        known.add(chosen.name)
        if steps[-1][0]:
            assert chosen.form is not None
            forms.update(zip(chosen.inputs, chosen.input_forms, strict=True))
            forms[chosen.name] = chosen.form
    return _with_borders(network, steps)


def _may_follow(node: Node, sparse: bool, here: bool, forms: dict[str, Form]) -> bool:
    """Whether the node can join the current step: same place, same images, same view of them."""
    if sparse != here:
        return False
    if not sparse or not forms:
        return True
    assert node.form is not None
    unit = next(iter(forms.values())).unit
    if node.form.unit != unit or any(form.unit != unit for form in node.input_forms):
        return False
    pairs = zip(node.inputs, node.input_forms, strict=True)
    return all(forms.get(name, form) == form for name, form in pairs)


def _with_borders(network: Network, steps: Sequence[tuple[bool, list[Node]]]) -> list[Step]:
    nodes = {node.name: node for node in network.nodes}
    made = []
    for i, (sparse, members) in enumerate(steps):
        if not sparse:
            made.append(Step(tuple(members), sparse))
            continue
        own = {node.name for node in members}
        later = set(network.outputs).union(
            *(node.inputs for _, others in steps[i + 1 :] for node in others)
        )
        inputs: dict[str, Outside] = {}
        for node in members:
            for name, form in zip(node.inputs, node.input_forms, strict=True):
                if name not in own and name not in inputs:
                    tail = nodes[name].tail if name in nodes else ()
                    inputs[name] = Outside(name, form, tail)
        outputs = tuple(
            Outside(node.name, node.form, node.tail)
            for node in members
            if node.name in later and node.form is not None
        )
        made.append(Step(tuple(members), sparse, tuple(inputs.values()), outputs))
    return made
