"""Steps: runs of nodes that execute in the same place, on the kernels or in PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass

from probmask.runtime.lower.nodes import Form, Network, Node


@dataclass(frozen=True)
class ExternalTensor:
    """A PyTorch tensor that a step on the kernels reads or writes."""

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
