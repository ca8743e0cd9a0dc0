"""The graph of an exported program while it is lowered: its signature, nodes and operations."""

import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from probmask.errors import InputError
from probmask.messages import one_line
from probmask.runtime.lower.known import Known
from probmask.runtime.lower.nodes import Fallback, Form, Node, Pair
from probmask.runtime.lower.views import VARYING, Axis, Factor, View, concrete, merged

_CONSTANT = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# Views need strides that tensors from the kernels may not have. Reshapes do not.
_ANY_STRIDES: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


class Signature:
    """The inputs, constants and outputs of a program, by the names of its graph's nodes."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.inputs: tuple[str, ...] = ()
        self.constants: dict[str, Tensor] = {}
        for spec in program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                self.inputs = (*self.inputs, spec.arg.name)
            elif spec.kind in _CONSTANT:
                self.constants[spec.arg.name] = _stored_tensor(program, spec.target)
            else:
                raise InputError(
                    f"runtime.compile: the model uses {spec.target}, a {spec.kind.name.lower()}; "
                    "only tensors are supported."
                )
        self.out_spec = program.call_spec.out_spec
        # Nodes of the graph, or values that are not tensors.
        self.outputs: list[Any] = []
        # Inputs that `forward` changes in place, and the nodes that compute their new values.
        self.changed_inputs: dict[str, Any] = {}
        returned = program.graph.output_node().args[0]
        assert isinstance(returned, tuple | list)
        for spec, node in zip(program.graph_signature.output_specs, returned, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                self.outputs.append(node)
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                assert spec.target is not None
                self.changed_inputs[spec.target] = node
            else:
                raise InputError(
                    f"runtime.compile: the model's forward changes {spec.target!r}, but an engine "
                    "keeps nothing between calls. Run the model in PyTorch, or compile the part "
                    "that changes nothing."
                )


def _stored_tensor(program: torch.export.ExportedProgram, name: str | None) -> Tensor:
    assert name is not None
    # Non-persistent buffers are among the constants.
    value = program.state_dict.get(name, program.constants.get(name))
    assert isinstance(value, Tensor)
    return value.detach()


class Graph:
    """An exported program, its constants, and the nodes built so far.

    ``aliases`` maps names of the exported graph to the nodes that now compute their values.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.signature = Signature(program)
        self.constants = self.signature.constants
        self.nodes: dict[str, Node] = {}
        self.aliases: dict[str, str] = {}
        # Values that are elements of another node's output, in another order.
        self.views: dict[str, View] = {}
        # Operations that only move the elements of a node's output.
        self.moves: set[str] = set()
        # Values of the program, by the name of the node that holds them in the order of a root.
        self.values: dict[str, str] = {}
        # Constants that are repeated for each image, with a batch of one.
        self.shared: dict[str, Tensor] = {}
        # Values that depend on the inputs by a comparison at most, and the inputs they are from.
        self.known: dict[str, Known] = {}
        # Sizes of inputs that have to be equal to another size.
        self.equal_sizes: dict[str, str] = {}
        # The outputs of recurrent layers that are read: views of the layer's node, by their number.
        self.recurrent: dict[str, dict[int, View]] = {}
        self.fx_nodes = {node.name: node for node in program.graph.nodes}

    def eager(self, node: fx.Node, reason: str) -> Fallback:
        """Return a node that runs the operation in PyTorch, with its constants filled in."""
        names: list[str] = []

        def replace(argument: fx.Node) -> Constant | _Input:
            name = self.resolve(argument.name)
            if argument.op == "get_attr":  # the subgraph of a branch
                branch = self.program.graph_module.get_submodule(str(argument.target))
                return Constant(_without_tracer(branch))
            if name in self.constants:
                return Constant(self.constants[name])
            names.append(name)
            return _Input(len(names) - 1)

        args, kwargs = fx.map_arg((node.args, node.kwargs), replace)  # type: ignore[arg-type]
        target: Any = _ANY_STRIDES.get(node.target, node.target)
        call = _EagerCall(target, args, kwargs)
        return Fallback(node.name, tuple(names), call, label_of(node), reason=reason)

    def source(self, argument: Any) -> str:
        """Return the name of the node that computes an argument."""
        return self.resolve(argument.name)

    def constant(self, argument: Any) -> Tensor | None:
        """Return the value of a constant argument, or None if it is missing or varies."""
        if not isinstance(argument, fx.Node):
            return None
        return self.constants.get(self.resolve(argument.name))

    def shared_constant(self, argument: Any) -> Tensor | None:
        """Return the value of a constant argument that is the same for all images."""
        if not isinstance(argument, fx.Node):
            return None
        return self.shared.get(argument.name, self.constant(argument))

    def view_of(self, argument: Any) -> View | None:
        """Return how a value lies in planes, or None if no kernel can read it so."""
        if not isinstance(argument, fx.Node) or argument.name in self.shared:
            return None
        source = self.resolve(argument.name)
        known = self.views.get(argument.name, self.views.get(source))
        if known is not None:
            return replace(known, root=self.resolve(known.root))
        value = argument.meta.get("val")
        if source in self.constants or not isinstance(value, Tensor):
            return None
        form = self.form_of(source) or token_form(value)
        if form is None:
            return self._with_batch_first(source, value)
        if len(form.leading) != 1 or value.dtype != torch.float32:
            return None
        return whole_view(source, form).reshaped([concrete(size) for size in value.shape])

    def _with_batch_first(self, source: str, value: Tensor) -> View | None:
        """Return how a tensor from PyTorch lies in planes whose batch is not its first dimension.

        A node is added that moves the batch to the front.
        """
        sizes = [concrete(size) for size in value.shape]
        if VARYING not in sizes[1:-1]:
            return None
        batch = sizes.index(VARYING)
        order = [batch, *(dim for dim in range(len(sizes)) if dim != batch)]
        form = token_form(value.permute(order))
        if form is None:
            return None
        name = f"{source}_batch_first"
        if name not in self.nodes:
            self.nodes[name] = Fallback(
                name, (source,), BatchFirst(order), f"{source} (order)", reason="a view"
            )
        moved = whole_view(name, form).reshaped([sizes[dim] for dim in order])
        return moved.permuted([order.index(dim) for dim in range(len(sizes))]) if moved else None

    def form_of_root(self, view: View) -> Form:
        """Return the form of a view's root: that of its node, or that of a tensor from PyTorch."""
        form = self.form_of(view.root)
        if form is None and view.positions > 1 and not view.tokens:
            form = image_form_of_any_rank(self.fx_nodes[view.root].meta["val"])
        if form is not None:
            return form
        return Form((view.leading,), view.channels, 1, view.positions, tokens=view.positions > 1)

    def form_of(self, name: str) -> Form | None:
        """Return the form of a node's output, or None if no kernel can read it."""
        node = self.nodes.get(name)
        return node.form if node is not None else None

    def used_once(self, name: str) -> bool:
        """Return whether exactly one operation reads a value; aliases and views are not counted."""
        if name not in self.fx_nodes:
            if name not in self.values:
                return False
            name = self.values[name]
        users = list(self.fx_nodes[name].users)
        count = 0
        while users:
            user = users.pop()
            if user.name in self.moves or (
                user.name in self.aliases and self.resolve(user.name) == self.resolve(name)
            ):
                users.extend(user.users)
            else:
                count += 1
        return count == 1

    def rename(self, node: Node, name: str) -> None:
        """Let a node also compute the operation ``name``, and run in its place."""
        del self.nodes[node.name]
        self.aliases[node.name] = name
        node.name = name
        self.nodes[name] = node

    def resolve(self, name: str) -> str:
        """Return the name of the node that an alias stands for."""
        while name in self.aliases:
            name = self.aliases[name]
        return name


# What a builder returns: a node, True if another node now computes the operation, or None if no
# kernel can.
Built = Node | Literal[True] | None
Builder = Callable[[Graph, fx.Node], Built]


@dataclass(frozen=True)
class Constant:
    """A value that is the same at each call."""

    value: Any


@dataclass(frozen=True)
class _Input:
    index: int


@dataclass(frozen=True)
class BatchFirst:
    """Moves the batch to the front."""

    order: list[int]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tensor with its dimensions in another order."""
        return x.permute(self.order)


class _EagerCall:
    """An operation in PyTorch with its arguments: constants, and places for its inputs."""

    def __init__(self, target: Any, args: Any, kwargs: Any) -> None:
        self.target = target
        self._flat, self._spec = pytree.tree_flatten((args, kwargs))
        places = [(i, item.index) for i, item in enumerate(args) if isinstance(item, _Input)]
        # Rebuilding the arguments takes as long as a small operation. Usually all inputs are
        # arguments of their own, so that the others can be kept.
        self._simple = len(places) == sum(isinstance(item, _Input) for item in self._flat)
        self._places = places if self._simple else []
        if self._simple:
            self._args, self._kwargs = pytree.tree_map_only(
                Constant, operator.attrgetter("value"), (list(args), kwargs)
            )

    def __call__(self, *inputs: Any) -> Any:
        if self._simple:
            given = self._args.copy()
            for place, index in self._places:
                given[place] = inputs[index]
            return self.target(*given, **self._kwargs)
        filled = [_fill(item, inputs) for item in self._flat]
        args, kwargs = pytree.tree_unflatten(filled, self._spec)
        return self.target(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle the operation by its name: PyTorch cannot pickle operations.

        The same holds for memory formats, with the protocol of `torch.save`.
        """
        for item in self._flat:
            _check_branch(item)
        named = [
            _Format(str(item)) if isinstance(item, torch.memory_format) else item
            for item in self._flat
        ]
        args, kwargs = pytree.tree_unflatten(named, self._spec)
        name = str(self.target)
        if isinstance(self.target, torch._ops.HigherOrderOperator):
            name = f"higher_order.{name}"
        elif not isinstance(self.target, torch._ops.OpOverload):
            return _restored_call, (self.target, args, kwargs)
        return _restored_call, (name, args, kwargs)


@dataclass(frozen=True)
class _Format:
    """A memory format in a pickle."""

    name: str

    @property
    def value(self) -> Any:
        return getattr(torch, self.name.removeprefix("torch."))


def _restored_call(target: Any, args: Any, kwargs: Any) -> _EagerCall:
    """Return a call from its pickle, which holds the name of an operation of `torch.ops`."""
    args, kwargs = pytree.tree_map_only(_Format, lambda item: item.value, (args, kwargs))
    if not isinstance(target, str):
        return _EagerCall(target, args, kwargs)
    try:
        return _EagerCall(operator.attrgetter(target)(torch.ops), args, kwargs)
    except AttributeError as error:
        raise InputError(
            f"the engine uses the operation torch.ops.{target}, which this process does not know; "
            "import the module that registers it first."
        ) from error


def _without_tracer(module: nn.Module) -> nn.Module:
    """Return the graph of a branch without the tracer of `torch.export`: it prevents pickling."""
    if not isinstance(module, fx.GraphModule):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _check_branch(item: Any) -> None:
    """Raise if a branch cannot be pickled; PyTorch notices it only when it loads the pickle."""
    if not isinstance(item, Constant) or not isinstance(item.value, nn.Module):
        return
    try:
        pickle.loads(pickle.dumps(item.value))  # noqa: S301
    except Exception as error:
        raise InputError(
            "the engine cannot be pickled: PyTorch cannot pickle a branch of its network "
            f"({one_line(error)[:200]}). Compile the model in each process instead."
        ) from error


def _fill(item: Any, inputs: tuple[Any, ...]) -> Any:
    if isinstance(item, Constant):
        return item.value
    return inputs[item.index] if isinstance(item, _Input) else item


def image_form(value: Any, rank: int) -> Form | None:
    """Return the form of a float32 batch of volumes (rank 3), images, sequences or vectors (0).

    The slices of a volume are channels of an image.
    """
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != rank + 2:
        return None
    batch, *sizes = map(size_of, value.shape)
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(known) < len(sizes):
        return None
    channels, (height, width) = known[0], (*(1,) * (2 - rank), *known[1:])[-2:]
    slices = known[1] if rank == 3 else 1
    return Form((str(batch),), channels * slices, height, width)


def image_form_of_any_rank(value: Any) -> Form | None:
    """Return the form of a float32 batch of volumes, images, sequences or vectors."""
    known = isinstance(value, Tensor) and 2 <= value.dim() <= 5
    return image_form(value, value.dim() - 2) if known else None


def row_form(value: Any) -> Form | None:
    """Return the form of a float32 tensor whose last dimension is the channels."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() < 2:
        return None
    *leading, features = map(size_of, value.shape)
    if not isinstance(features, int) or not features:
        return None
    return Form(tuple(str(size) for size in leading), features)


def token_form(value: Any) -> Form | None:
    """Return the form of a float32 tensor of batch, positions of any dimensions, channels."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() < 2:
        return None
    batch, *sizes = map(size_of, value.shape)
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(known) < len(sizes) or concrete(value.shape[0]) not in (VARYING, batch):
        return None
    positions = prod(known[:-1])
    return Form((str(batch),), known[-1], 1, positions, tokens=positions > 1)


def whole_view(name: str, form: Form) -> View:
    """Return the view of a whole root, with the dimensions batch, positions and channels.

    Channels come before positions if the tensor has them so.
    """
    leading = form.leading[0]
    view = View(name, form.channels, form.positions, leading, form.tokens, ())
    batch = merged([Factor(view.batch, Axis.BATCH, 1)])
    channels = merged([Factor(form.channels, Axis.CHANNEL, 1)])
    positions = merged([Factor(form.positions, Axis.POSITION, 1)])
    order = (positions, channels) if form.tokens else (channels, positions)
    return replace(view, dimensions=(batch, *order))


def size_of(size: Any) -> int | str:
    """Return a size as an integer, or its name if it may vary.

    PyTorch also uses a symbol for a size that turned out to have a single value.
    """
    name = str(size)
    return int(name) if name.isdecimal() else name


def trailing_shape(node: fx.Node, form: Form) -> tuple[int, ...]:
    """Return the shape of the output without its leading dimensions."""
    return tuple(int(size) for size in node.meta["val"].shape[len(form.leading) :])


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operation by name, including defaults."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return defaults | given | dict(node.kwargs)


Triple = tuple[int, int, int]


def as_triple(value: Any, rank: int, missing: int = 1) -> Triple:
    """Return a setting for slices, rows and columns; those that ``rank`` lacks are ``missing``."""
    values = list(value) if isinstance(value, Sequence) else [value]
    values = values * rank if len(values) == 1 else values
    slices, rows, columns = [missing] * (3 - rank) + [int(number) for number in values]
    return slices, rows, columns


def as_pair(value: Any, rank: int) -> Pair:
    """Return a setting for rows and columns; at rank 1 there is one row."""
    return as_triple(value, rank)[1:]


def padding_of(value: Any, kernel: Triple, dilation: Triple, rank: int) -> tuple[Pair, Pair, Pair]:
    """Return the padding before and after the slices, the rows and the columns."""
    if isinstance(value, str):
        sizes = [
            d * (k - 1) if value == "same" else 0 for k, d in zip(kernel, dilation, strict=True)
        ]
        first, second, third = ((size // 2, size - size // 2) for size in sizes)
        return first, second, third
    slices, rows, columns = as_triple(value, rank, missing=0)
    return (slices, slices), (rows, rows), (columns, columns)


def label_of(node: fx.Node) -> str:
    """Return a human-readable name of an operation."""
    name = getattr(node.target, "__name__", str(node.target))
    if computes_size(node):  # PyTorch names no module for these, or one of its own
        return f"sizes ({name})"
    module = _module_name(node)
    return f"{module} ({name})" if module else f"{node.name} ({name})"


def computes_size(node: fx.Node) -> bool:
    """Return whether the result of an operation is a number, such as a size that may vary."""
    return isinstance(
        node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _module_name(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    name: str = paths[-1] if paths else ""
    return name.removeprefix("L['self'].").removeprefix("L['self']")
