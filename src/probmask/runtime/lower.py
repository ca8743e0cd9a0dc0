"""From an exported program to a list of nodes: BatchNorm folded, what follows a layer fused."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from probmask.errors import InputError
from probmask.runtime.arguments import label_of
from probmask.runtime.builders import BUILDERS
from probmask.runtime.nodes import (
    Form,
    Network,
    Node,
)


def lower(program: torch.export.ExportedProgram) -> Network:
    """Turn the exported program into nodes: BatchNorm folded, what follows a layer fused."""
    return Lowering(program).network()


class Lowering:
    """An exported program on its way to nodes, and what builders may ask of it."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.constants = _constants(program)
        self.nodes: dict[str, Node] = {}
        self.aliases: dict[str, str] = {}
        self.fx = {node.name: node for node in program.graph.nodes}

    def network(self) -> Network:
        """All nodes that the outputs need."""
        inputs, outputs = [], []
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name not in self.constants:
                inputs.append(node)
            elif node.op == "call_function":
                self._add(node)
            elif node.op == "output":
                outputs = list(node.args[0])
        spec = self.program.call_spec.out_spec
        names = tuple(self._resolve(out.name) for out in outputs if isinstance(out, fx.Node))
        fixed = [out for out in outputs if not isinstance(out, fx.Node)]
        if fixed or any(name in self.constants for name in names) or spec is None:
            raise InputError("runtime.compile: the model returns a constant; it has to compute.")
        return Network(
            nodes=_needed(list(self.nodes.values()), names),
            inputs=tuple(node.name for node in inputs),
            outputs=names,
            pack_outputs=lambda values: pytree.tree_unflatten(values, spec),
            input_shapes=tuple(_sizes(node.meta["val"]) for node in inputs),
            input_dtypes=tuple(node.meta["val"].dtype for node in inputs),
        )

    def _add(self, node: fx.Node) -> None:
        build = BUILDERS.get(node.target)
        made = build(self, node) if build is not None else None
        if made is True:  # it became part of another node
            return
        if made is None:
            made = self._eager(node, "no kernel" if build is None else "no kernel for this form")
        assert isinstance(made, Node)
        self.nodes[made.name] = made

    def _eager(self, node: fx.Node, reason: str) -> Node:
        """A node that PyTorch runs, with its constants in place."""
        names: list[str] = []

        def take(argument: fx.Node) -> Any:
            name = self._resolve(argument.name)
            if name in self.constants:
                return _Held(self.constants[name])
            names.append(name)
            return _Input(len(names) - 1)

        args, kwargs = fx.map_arg((node.args, node.kwargs), take)
        flat, spec = pytree.tree_flatten((args, kwargs))
        target: Any = node.target

        def call(*inputs: Any) -> Any:
            filled = [_fill(item, inputs) for item in flat]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return target(*args, **kwargs)

        return Node(node.name, tuple(names), call, label_of(node), reason=reason)

    # What the builders of single operations use.

    def source(self, argument: Any) -> str:
        """The name of the node whose output this is."""
        return self._resolve(argument.name)

    def constant(self, argument: Any) -> Tensor | None:
        """The tensor that the argument always has; None if there is none or it varies."""
        return self.constants.get(argument.name) if isinstance(argument, fx.Node) else None

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
    def __init__(self, value: Tensor) -> None:
        self.value = value


class _Input:
    def __init__(self, index: int) -> None:
        self.index = index


def _fill(item: Any, inputs: tuple[Any, ...]) -> Any:
    if isinstance(item, _Held):
        return item.value
    return inputs[item.index] if isinstance(item, _Input) else item


def _constants(program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
            continue
        assert spec.target is not None
        value = program.state_dict.get(spec.target, program.constants.get(spec.target))
        if isinstance(value, Tensor):
            found[spec.arg.name] = value.detach()
    return found


def _needed(nodes: list[Node], outputs: tuple[str, ...]) -> list[Node]:
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if node.name in wanted:
            kept.append(node)
            wanted.update(node.inputs)
    return kept[::-1]


def _sizes(value: Tensor) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in value.shape)
