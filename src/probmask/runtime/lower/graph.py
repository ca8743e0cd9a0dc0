"""From an exported program to a list of nodes: BatchNorm folded, what follows a layer fused."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from probmask.runtime.lower.exported_program import Signature, size_of
from probmask.runtime.lower.nodes import Form, Node, Pair

# PyTorch's views ask for strides that tensors of the kernels may not have.
_WHATEVER_THE_STRIDES: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


class Graph:
    """An exported program on its way to nodes, and what builders may ask of it."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.signature = Signature(program)
        self.constants = self.signature.constants
        self.nodes: dict[str, Node] = {}
        self.aliases: dict[str, str] = {}
        self.fx_nodes = {node.name: node for node in program.graph.nodes}

    def eager(self, node: fx.Node, reason: str) -> Node:
        """A node that PyTorch runs, with its constants in place."""
        names: list[str] = []

        def take(argument: fx.Node) -> Any:
            name = self.resolve(argument.name)
            if argument.op == "get_attr":  # the graph of a branch
                return Constant(self.program.graph_module.get_submodule(str(argument.target)))
            if name in self.constants:
                return Constant(self.constants[name])
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
        return self.resolve(argument.name)

    def constant(self, argument: Any) -> Tensor | None:
        """The tensor that the argument always has; None if there is none or it varies."""
        if not isinstance(argument, fx.Node):
            return None
        return self.constants.get(self.resolve(argument.name))

    def form_of(self, name: str) -> Form | None:
        """The form of a node's output, if a kernel can read it."""
        node = self.nodes.get(name)
        return node.form if node is not None else None

    def used_once(self, name: str) -> bool:
        """Whether one node uses it; what stands for it (a clone) is looked through."""
        users = list(self.fx_nodes[name].users)
        count = 0
        while users:
            user = users.pop()
            if user.name in self.aliases and self.resolve(user.name) == self.resolve(name):
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

    def resolve(self, name: str) -> str:
        """Return the name of the node that an alias stands for."""
        while name in self.aliases:
            name = self.aliases[name]
        return name


class Constant:
    """A value that is the same at each call, in the place of an input or an output."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Input:
    def __init__(self, index: int) -> None:
        self.index = index


def _fill(item: Any, inputs: tuple[Any, ...]) -> Any:
    if isinstance(item, Constant):
        return item.value
    return inputs[item.index] if isinstance(item, _Input) else item


# None if there is no kernel, True if another node now does it.
Built = Node | bool | None


Builder = Callable[[Graph, fx.Node], Built]


def plain(value: Any, rank: int) -> Form | None:
    """A batch of images of the rank (2, 1 or 0), in single precision on the CPU."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != rank + 2:
        return None
    batch, *sizes = map(size_of, value.shape)
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(known) < len(sizes):
        return None
    channels, height, width = (known[0], *(1,) * (2 - rank), *known[1:])
    return Form((str(batch),), channels, height, width)


def plain_of_any_rank(value: Any) -> Form | None:
    """A batch of images, of sequences or of vectors."""
    known = isinstance(value, Tensor) and 2 <= value.dim() <= 4
    return plain(value, value.dim() - 2) if known else None


def rows(value: Any) -> Form | None:
    """A tensor whose last dimension are the channels, and all others are counted as images."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() < 2:
        return None
    *unit, features = map(size_of, value.shape)
    if not isinstance(features, int) or not features:
        return None
    return Form(tuple(str(size) for size in unit), features)


def tail(node: fx.Node, form: Form) -> tuple[int, ...]:
    """The output's shape without its leading dimensions."""
    return tuple(int(size) for size in node.meta["val"].shape[len(form.unit) :])


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operation by name, defaults filled in."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return defaults | given | dict(node.kwargs)


def as_pair(value: Any, rank: int) -> Pair:
    """For rows and columns; of rank 1 there is one row."""
    values = list(value) if isinstance(value, Sequence) else [value]
    values = values * rank if len(values) == 1 else values
    return (1, int(values[0])) if rank == 1 else (int(values[0]), int(values[1]))


def padding_of(value: Any, kernel: tuple[int, ...], dilation: Pair, rank: int) -> tuple[Pair, Pair]:
    """Zeros before and after the rows, and the columns."""
    if isinstance(value, str):
        sizes = [
            d * (k - 1) if value == "same" else 0 for k, d in zip(kernel, dilation, strict=True)
        ]
        first, second = ((size // 2, size - size // 2) for size in sizes)
        return first, second
    values = list(value) if isinstance(value, Sequence) else [value]
    values = values * rank if len(values) == 1 else values
    rows, columns = (0, int(values[0])) if rank == 1 else (int(values[0]), int(values[1]))
    return (rows, rows), (columns, columns)


def label_of(node: fx.Node) -> str:
    """What to call an operation before people."""
    name = getattr(node.target, "__name__", str(node.target))
    module = _module_name(node)
    return f"{module} ({name})" if module else f"{node.name} ({name})"


def _module_name(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    name: str = paths[-1] if paths else ""
    return name.removeprefix("L['self'].").removeprefix("L['self']")
