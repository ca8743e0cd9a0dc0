"""From an exported program to a list of nodes: BatchNorm folded, what follows a layer fused."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from probmask.runtime.arguments import label_of
from probmask.runtime.building import BUILDERS
from probmask.runtime.exporting import size_of
from probmask.runtime.nodes import Form, Network, Node
from probmask.runtime.signature import Signature

# PyTorch's views ask for strides that tensors of the kernels may not have.
_WHATEVER_THE_STRIDES: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


def lower(program: torch.export.ExportedProgram) -> Network:
    """Turn the exported program into nodes: BatchNorm folded, what follows a layer fused."""
    return Lowering(program).network()


class Lowering:
    """An exported program on its way to nodes, and what builders may ask of it."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.signature = Signature(program)
        self.constants = self.signature.constants
        self.nodes: dict[str, Node] = {}
        self.aliases: dict[str, str] = {}
        self.fx = {node.name: node for node in program.graph.nodes}

    def network(self) -> Network:
        """All nodes that the outputs need."""
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._add(node)
        outputs = [self._resolved(output) for output in self.signature.outputs]
        changed = {
            name: self._resolve(output.name)
            for name, output in self.signature.changed_inputs.items()
        }
        names = tuple(dict.fromkeys([*_computed(outputs), *changed.values()]))
        inputs = [self.fx[name] for name in self.signature.inputs]
        return Network(
            nodes=_needed(list(self.nodes.values()), names),
            inputs=self.signature.inputs,
            outputs=names,
            pack_outputs=_Pack(outputs, self.signature.out_spec),
            changed_inputs=changed,
            input_shapes=tuple(_sizes(node.meta["val"]) for node in inputs),
            input_dtypes=tuple(node.meta["val"].dtype for node in inputs),
        )

    def _resolved(self, output: Any) -> Any:
        """The name of what computes an output, or what the output always is."""
        if not isinstance(output, fx.Node):
            return _Held(output)
        name = self._resolve(output.name)
        return _Held(self.constants[name]) if name in self.constants else name

    def _add(self, node: fx.Node) -> None:
        if self._is_constant(node):
            self.constants[node.name] = self.eager(node, "").call()
            return
        build = BUILDERS.get(node.target) if not self._reads_constants(node) else None
        made = build(self, node) if build is not None else None
        if made is True:  # it became part of another node
            return
        if made is None:
            made = self.eager(node, "no kernel" if build is None else "no kernel for this form")
        assert isinstance(made, Node)
        self.nodes[made.name] = made

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether it computes one tensor of constants alone, the same at each call."""
        sources = [self._resolve(argument.name) for argument in node.all_input_nodes]
        chance = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        known = bool(sources) and all(name in self.constants for name in sources)
        return known and not chance and isinstance(node.meta.get("val"), Tensor)

    def _reads_constants(self, node: fx.Node) -> bool:
        """Whether its first argument, what a kernel would read, never varies."""
        first = node.args[0] if node.args else None
        return isinstance(first, fx.Node) and self._resolve(first.name) in self.constants

    # What the builders of single operations use.

    def eager(self, node: fx.Node, reason: str) -> Node:
        """A node that PyTorch runs, with its constants in place."""
        names: list[str] = []

        def take(argument: fx.Node) -> Any:
            name = self._resolve(argument.name)
            if argument.op == "get_attr":  # the graph of a branch
                return _Held(self.program.graph_module.get_submodule(str(argument.target)))
            if name in self.constants:
                return _Held(self.constants[name])
            names.append(name)
            return _Input(len(names) - 1)

        args, kwargs = fx.map_arg((node.args, node.kwargs), take)
        flat, spec = pytree.tree_flatten((args, kwargs))
        target: Any = _WHATEVER_THE_STRIDES.get(node.target, node.target)

        def call(*inputs: Any) -> Any:
            filled = [_fill(item, inputs) for item in flat]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return target(*args, **kwargs)

        return Node(node.name, tuple(names), call, label_of(node), reason=reason)

    def source(self, argument: Any) -> str:
        """The name of the node whose output this is."""
        return self._resolve(argument.name)

    def constant(self, argument: Any) -> Tensor | None:
        """The tensor that the argument always has; None if there is none or it varies."""
        if not isinstance(argument, fx.Node):
            return None
        return self.constants.get(self._resolve(argument.name))

    def form_of(self, name: str) -> Form | None:
        """The form of a node's output, if a kernel can read it."""
        node = self.nodes.get(name)
        return node.form if node is not None else None

    def used_once(self, name: str) -> bool:
        """Whether one node uses it; what stands for it (a clone) is looked through."""
        users = list(self.fx[name].users)
        count = 0
        while users:
            user = users.pop()
            if user.name in self.aliases and self._resolve(user.name) == self._resolve(name):
                users.extend(user.users)
            else:
                count += 1
        return count == 1

    def rename(self, node: Node, name: str) -> None:
        """The node now also computes what ``name`` stood for, and runs in its place."""
        del self.nodes[node.name]
        self.aliases[node.name] = name
        node.name = name
        self.nodes[name] = node

    def _resolve(self, name: str) -> str:
        while name in self.aliases:
            name = self.aliases[name]
        return name


class _Held:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Input:
    def __init__(self, index: int) -> None:
        self.index = index


def _fill(item: Any, inputs: tuple[Any, ...]) -> Any:
    if isinstance(item, _Held):
        return item.value
    return inputs[item.index] if isinstance(item, _Input) else item


class _Pack:
    """Hands outputs back in the shape that the model gives them, constants in their places."""

    def __init__(self, outputs: list[Any], spec: Any) -> None:
        self.outputs, self.spec = outputs, spec

    def __call__(self, values: dict[str, Any]) -> Any:
        given: set[str] = set()
        leaves = []
        for output in self.outputs:
            value = output.value if isinstance(output, _Held) else values[output]
            # Nobody may change the network's own tensors, or one output through another.
            if isinstance(value, Tensor) and (isinstance(output, _Held) or output in given):
                value = value.clone()
            given.update(_computed([output]))
            leaves.append(value)
        return pytree.tree_unflatten(leaves, self.spec)


def _computed(outputs: list[Any]) -> list[str]:
    return [output for output in outputs if isinstance(output, str)]


def _needed(nodes: list[Node], outputs: tuple[str, ...]) -> list[Node]:
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if node.name in wanted:
            kept.append(node)
            wanted.update(node.inputs)
    return kept[::-1]


def _sizes(value: Tensor) -> tuple[int | str, ...]:
    return tuple(map(size_of, value.shape))
