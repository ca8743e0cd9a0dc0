"""From a PyTorch model to a list of nodes, by way of `torch.export`."""

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from probmask.errors import InputError
from probmask.runtime.fields import Curve
from probmask.runtime.nodes import (
    INFINITY,
    Activate,
    Clamp,
    Combine,
    Concatenate,
    Convolution,
    Form,
    Network,
    Node,
    Pair,
    Pool,
    Reshape,
)

_aten = torch.ops.aten


def export(model: nn.Module, examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Export the model for any batch size, or for that of the examples if it allows no other."""
    wide = tuple(_of_two(example) for example in examples)
    dynamic = tuple({0: torch.export.Dim.AUTO} if x.dim() else {} for x in wide)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, wide, dynamic_shapes=dynamic)
            if not _any_batch(program):
                program = torch.export.export(model, examples)
        except Exception:
            try:
                program = torch.export.export(model, examples)
            except Exception as error:
                reason = " ".join(str(error).split())[:300]
                raise InputError(
                    f"runtime.compile({type(model).__name__}): torch.export cannot export it: "
                    f"{reason}"
                ) from error
        functional: torch.export.ExportedProgram = program.run_decompositions({})
    return functional


def _any_batch(program: torch.export.ExportedProgram) -> bool:
    """Whether the size of some first dimension was left open."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(v, Tensor) and v.dim() and not isinstance(v.shape[0], int) for v in values
    )


def _of_two(example: Tensor) -> Tensor:
    """A batch of at least two: one of one image would be taken for a constant size."""
    if not example.dim() or len(example) >= 2:
        return example
    return example.expand(2, *example.shape[1:]).contiguous()


def lower(program: torch.export.ExportedProgram) -> Network:
    """Turn the exported program into nodes: BatchNorm folded, what follows a layer fused."""
    return _Lowering(program).network()


class _Lowering:
    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.constants = _constants(program)
        self.nodes: dict[str, Node] = {}
        self.aliases: dict[str, str] = {}
        self.fx = {node.name: node for node in program.graph.nodes}

    def network(self) -> Network:
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
        build = _BUILDERS.get(node.target)
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

        return Node(node.name, tuple(names), call, _label(node), reason=reason)

    # What the builders of single operations use.

    def source(self, argument: Any) -> str:
        return self._resolve(argument.name)

    def constant(self, argument: Any) -> Tensor | None:
        """The tensor that the argument always has; None if there is none or it varies."""
        return self.constants.get(argument.name) if isinstance(argument, fx.Node) else None

    def form_of(self, name: str) -> Form | None:
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


def _label(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    module = _module_name(node)
    return f"{module} ({name})" if module else f"{node.name} ({name})"


def _module_name(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    name: str = paths[-1] if paths else ""
    return name.removeprefix("L['self'].").removeprefix("L['self']")


# Forms


def _plain(value: Any, rank: int) -> Form | None:
    """A batch of images of the rank (2, 1 or 0), in single precision on the CPU."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != rank + 2:
        return None
    batch, *sizes = value.shape
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    channels, height, width = (sizes[0], *(1,) * (2 - rank), *sizes[1:])
    return Form((str(batch),), channels, height, width)


def _rows(value: Any) -> Form | None:
    """A tensor whose last dimension are the channels, and all others are counted as images."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() < 2:
        return None
    *unit, features = value.shape
    if not isinstance(features, int) or not features:
        return None
    return Form(tuple(str(size) for size in unit), features)


def _tail(node: fx.Node, form: Form) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape[len(form.unit) :])


# Builders: None if there is no kernel, True if another node now does it.

_Built = Node | bool | None


def _convolution(to: _Lowering, node: fx.Node) -> _Built:
    arguments = _arguments(node)
    x, weight, bias = arguments["input"], to.constant(arguments["weight"]), arguments["bias"]
    rank = node.meta["val"].dim() - 2
    before, after = _plain(x.meta["val"], rank), _plain(node.meta["val"], rank)
    if weight is None or before is None or after is None or rank not in (1, 2):
        return None
    if bias is not None and to.constant(bias) is None:
        return None
    stride, dilation = (_pair(arguments[key], rank) for key in ("stride", "dilation"))
    kernel = (1,) * (2 - rank) + tuple(weight.shape[2:])
    padding = _padding(arguments["padding"], kernel, dilation, rank)
    layer = Convolution(
        node.name,
        (to.source(x),),
        _undefined,
        _label(node),
        form=after,
        input_forms=(before,),
        tail=_tail(node, after),
        weight=_array(weight).reshape(*weight.shape[:2], *kernel),
        bias=_bias(to.constant(bias) if bias is not None else None, len(weight)),
        rank=rank,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=arguments["groups"],
    )
    layer.call = EagerConvolution(layer)
    return layer


def _linear(to: _Lowering, node: fx.Node) -> _Built:
    arguments = _arguments(node)
    x, weight, bias = arguments["input"], to.constant(arguments["weight"]), arguments["bias"]
    before, after = _rows(x.meta["val"]), _rows(node.meta["val"])
    if weight is None or before is None or after is None:
        return None
    if bias is not None and to.constant(bias) is None:
        return None
    source = to.source(x)
    known = to.form_of(source)
    if known is not None and known.unit == before.unit and known.size == before.channels:
        before = known
    layer = Convolution(
        node.name,
        (source,),
        _undefined,
        _label(node),
        form=after,
        input_forms=(before,),
        tail=_tail(node, after),
        weight=_array(weight)[:, :, None, None],
        bias=_bias(to.constant(bias) if bias is not None else None, len(weight)),
        rank=0,
    )
    layer.call = EagerConvolution(layer)
    return layer


def _normalized(to: _Lowering, node: fx.Node) -> _Built:
    """The first result of a BatchNorm: folded into the convolution before it, or one of its own."""
    norm, index = node.args
    if not isinstance(norm, fx.Node) or norm.target is not _BATCH_NORM or index != 0:
        return None
    x, weight, bias, mean, variance, _, epsilon = norm.args
    statistics = [to.constant(part) for part in (weight, bias, mean, variance)]
    if statistics[2] is None or statistics[3] is None or not isinstance(x, fx.Node):
        return None
    scale, shift = _scale_and_shift(*statistics, epsilon=float(epsilon))  # type: ignore[arg-type]
    source = to.source(x)
    layer = to.nodes.get(source)
    if (
        isinstance(layer, Convolution)
        and to.used_once(source)
        and layer.after.is_nothing
        and layer.rank
    ):
        layer.weight = (layer.weight * scale[:, None, None, None]).astype(np.float32)
        layer.bias = (layer.bias * scale + shift).astype(np.float32)
        layer.call = EagerConvolution(layer)
        to.rename(layer, node.name)
        return True
    value = node.meta["val"]
    form = _plain(value, value.dim() - 2) if 2 <= value.dim() <= 4 else None
    if form is None:
        return None
    layer = Convolution(
        node.name,
        (source,),
        _undefined,
        _label(norm),
        form=form,
        input_forms=(form,),
        tail=_tail(node, form),
        weight=scale.astype(np.float32).reshape(-1, 1, 1, 1),
        bias=shift.astype(np.float32),
        rank=value.dim() - 2,
        groups=form.channels,
    )
    layer.call = _as_affine(layer)
    return layer


def _batch_norm(_: _Lowering, node: fx.Node) -> _Built:
    """Nothing by itself, if only its first result is used: `_normalized` makes it."""
    only_first = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    known = all(isinstance(part, fx.Node) for part in node.args[3:5])
    return True if only_first and known and len(node.users) == 1 else None


def _activation(after: Clamp) -> Callable[[_Lowering, fx.Node], _Built]:
    def build(to: _Lowering, node: fx.Node) -> _Built:
        return _activated(to, node, Clamp(after.low, after.high, after.curve))

    return build


def _hardtanh(to: _Lowering, node: fx.Node) -> _Built:
    arguments = _arguments(node)
    low, high = float(arguments["min_val"]), float(arguments["max_val"])
    return _activated(to, node, Clamp(low, high)) if low <= 0 <= high else None


def _gelu(to: _Lowering, node: fx.Node) -> _Built:
    tanh = _arguments(node)["approximate"] == "tanh"
    return _activated(to, node, Clamp(curve=Curve.GELU_TANH if tanh else Curve.GELU))


def _activated(to: _Lowering, node: fx.Node, after: Clamp) -> _Built:
    source = to.source(node.args[0])
    layer = to.nodes.get(source)
    if (
        isinstance(layer, Convolution | Combine)
        and to.used_once(source)
        and layer.after.is_nothing
        and (isinstance(layer, Convolution) or after.curve is Curve.NONE)
    ):
        layer.after = after  # its call looks there
        to.rename(layer, node.name)
        return True
    form = to.form_of(source)
    if form is None:
        return None
    return Activate(
        node.name,
        (source,),
        lambda x: apply_(x.clone(), after),
        _label(node),
        form=form,
        input_forms=(form,),
        tail=_tail(node, form),
        after=after,
    )


def _add(to: _Lowering, node: fx.Node) -> _Built:
    if node.kwargs.get("alpha", 1) != 1:
        return None
    pair = _same_forms(to, node)
    if pair is None:
        return None
    for own, other in (pair[::-1], pair):
        layer = to.nodes.get(own)
        if (
            isinstance(layer, Convolution)
            and own != other
            and to.used_once(own)
            and layer.after.is_nothing
            and len(layer.inputs) == 1
        ):
            assert layer.form is not None
            layer.inputs = (*layer.inputs, other)
            layer.input_forms = (*layer.input_forms, layer.form)
            to.rename(layer, node.name)
            return True
    return _combine(to, node, pair, product=False)


def _multiply(to: _Lowering, node: fx.Node) -> _Built:
    pair = _same_forms(to, node)
    return None if pair is None else _combine(to, node, pair, product=True)


def _same_forms(to: _Lowering, node: fx.Node) -> tuple[str, str] | None:
    """The names of two tensors of one form; one that comes from PyTorch takes the other's."""
    first, second = node.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    values = [argument.meta["val"] for argument in (first, second)]
    if not all(isinstance(v, Tensor) and v.dtype == torch.float32 for v in values):
        return None
    if tuple(values[0].shape) != tuple(values[1].shape):
        return None
    names = to.source(first), to.source(second)
    if any(name in to.constants for name in names):
        return None
    forms = {form for form in map(to.form_of, names) if form is not None}
    return names if len(forms) == 1 else None


def _combine(to: _Lowering, node: fx.Node, pair: tuple[str, str], *, product: bool) -> Node:
    form = to.form_of(pair[0]) or to.form_of(pair[1])
    assert form is not None
    made = Combine(
        node.name,
        pair,
        _undefined,
        _label(node),
        form=form,
        input_forms=(form, form),
        tail=_tail(node, form),
        product=product,
    )
    made.call = _combined(made)
    return made


def _combined(node: Combine) -> Callable[[Tensor, Tensor], Tensor]:
    function = torch.mul if node.product else torch.add
    return lambda x, y: apply_(function(x, y), node.after)


def _max_pool(to: _Lowering, node: fx.Node) -> _Built:
    arguments = _arguments(node)
    rank = node.meta["val"].dim() - 2
    if _pair(arguments["dilation"], rank) != (1, 1):
        return None
    return _pool(to, node, rank, _windows(arguments, node, rank), largest=True)


def _average_pool(to: _Lowering, node: fx.Node) -> _Built:
    arguments = _arguments(node)
    rank = node.meta["val"].dim() - 2
    windows = _windows(arguments, node, rank)
    forced = arguments.get("divisor_override")
    if forced is not None:
        sizes = [np.ones(len(windows[0])), np.full(len(windows[1]), float(forced))]
    elif arguments["count_include_pad"]:
        sizes = _padded_sizes(arguments, node, rank)
    else:
        sizes = [np.array([end - start for start, end in axis], float) for axis in windows]
    return _pool(to, node, rank, windows, largest=False, sizes=sizes)


def _adaptive(to: _Lowering, node: fx.Node) -> _Built:
    rank = node.meta["val"].dim() - 2
    sizes = zip(_lengths(node.args[0], rank), _lengths(node, rank), strict=True)
    windows = [
        [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)] for size, out in sizes
    ]
    return _pool(to, node, rank, windows, largest=False)


def _mean(to: _Lowering, node: fx.Node) -> _Built:
    """The mean of all positions of a channel."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    rank = x.meta["val"].dim() - 2
    dims = {d % (rank + 2) for d in node.args[1] or ()} if len(node.args) > 1 else set()  # type: ignore[union-attr]
    if rank not in (1, 2) or dims != set(range(2, rank + 2)) or node.kwargs.get("dtype"):
        return None
    windows = [[(0, length)] for length in _lengths(x, rank)]
    return _pool(to, node, rank, windows, largest=False)


def _pool(
    to: _Lowering,
    node: fx.Node,
    rank: int,
    windows: list[list[Pair]],
    *,
    largest: bool,
    sizes: list[Any] | None = None,
) -> _Built:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    before = _plain(x.meta["val"], rank) if rank in (1, 2) else None
    if before is None or any(end <= start for axis in windows for start, end in axis):
        return None
    after = Form(before.unit, before.channels, len(windows[0]), len(windows[1]))
    sizes = sizes or [np.array([end - start for start, end in axis], float) for axis in windows]
    eager = to._eager(node, "")
    return Pool(
        node.name,
        (to.source(x),),
        eager.call,
        _label(node),
        form=after,
        input_forms=(before,),
        tail=_tail(node, after),
        largest=largest,
        rows=tuple(windows[0]),
        columns=tuple(windows[1]),
        divisors=(1 / np.multiply.outer(sizes[0], sizes[1])).astype(np.float32),
    )


def _concatenate(to: _Lowering, node: fx.Node) -> _Built:
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    value = node.meta["val"]
    if dim not in (1, 1 - value.dim()):
        return None
    names = [to.source(part) for part in parts]
    forms = [to.form_of(name) for name in names]
    form = _plain(value, value.dim() - 2) if 2 <= value.dim() <= 4 else None
    if form is None or any(other is None or other.flat for other in forms):
        return None
    known = [other for other in forms if other is not None]
    if any((f.unit, f.height, f.width) != (form.unit, form.height, form.width) for f in known):
        return None
    return Concatenate(
        node.name,
        tuple(names),
        lambda *tensors: torch.cat(tensors, 1),
        _label(node),
        form=form,
        input_forms=tuple(known),
        tail=_tail(node, form),
    )


def _reshape(to: _Lowering, node: fx.Node) -> _Built:
    """Channels, rows and columns made one dimension, or a dimension of one position dropped."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    source = to.source(x)
    before = to.form_of(source)
    value = node.meta["val"]
    if before is None or len(before.unit) != 1 or str(value.shape[0]) != before.unit[0]:
        return None
    tail = tuple(value.shape[1:])
    if tail == (before.size,):
        form = Form(
            before.unit, before.channels, before.height, before.width, flat=before.positions > 1
        )
    elif before.positions == 1 and tail in ((before.channels, 1, 1), (before.channels, 1)):
        form = before
    else:
        return None
    return Reshape(
        node.name,
        (source,),
        lambda x: x.reshape(len(x), *tail),
        _label(node),
        form=form,
        input_forms=(before,),
        tail=tail,
    )


def _identity(to: _Lowering, node: fx.Node) -> _Built:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if x.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if node.target is _aten.dropout.default and node.args[2]:
        return None
    # A copy of what PyTorch computed may be there for its strides.
    if node.target is not _aten.dropout.default and to.form_of(to.source(x)) is None:
        return None
    to.aliases[node.name] = to.source(x)
    return True


# Arguments


def _arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operation by name, defaults filled in."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return defaults | given | dict(node.kwargs)


def _pair(value: Any, rank: int) -> Pair:
    """For rows and columns; of rank 1 there is one row."""
    values = list(value) if isinstance(value, Sequence) else [value]
    values = values * rank if len(values) == 1 else values
    return (1, int(values[0])) if rank == 1 else (int(values[0]), int(values[1]))


def _padding(value: Any, kernel: tuple[int, ...], dilation: Pair, rank: int) -> tuple[Pair, Pair]:
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


def _lengths(node: Any, rank: int) -> Pair:
    sizes = tuple(node.meta["val"].shape[-2:]) if rank == 2 else (1, node.meta["val"].shape[-1])
    return int(sizes[0]), int(sizes[1])


def _axes(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[tuple[int, ...]]:
    """Per axis: kernel, stride, padding, size before and after."""
    kernel = _pair(arguments["kernel_size"], rank)
    stride = _pair(arguments["stride"] or arguments["kernel_size"], rank)
    ((top, _), (left, _)) = _padding(arguments["padding"], kernel, (1, 1), rank)
    before, after = _lengths(node.args[0], rank), _lengths(node, rank)
    return list(zip(kernel, stride, (top, left), before, after, strict=True))


def _windows(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[list[Pair]]:
    return [
        [(max(0, o * s - p), min(size, o * s - p + k)) for o in range(out)]
        for k, s, p, size, out in _axes(arguments, node, rank)
    ]


def _padded_sizes(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[Any]:
    """Of each window, how much of it lies in the image or its padding."""
    return [
        np.array([min(size + p, o * s - p + k) - (o * s - p) for o in range(out)], float)
        for k, s, p, size, out in _axes(arguments, node, rank)
    ]


# Numbers


def _array(tensor: Tensor) -> Any:
    return tensor.to(torch.float32).cpu().numpy()


def _bias(tensor: Tensor | None, channels: int) -> Any:
    return np.zeros(channels, np.float32) if tensor is None else _array(tensor)


def _scale_and_shift(
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, *, epsilon: float
) -> tuple[Any, Any]:
    """A BatchNorm as x · scale + shift, in double precision."""
    scale = 1 / np.sqrt(variance.double().cpu().numpy() + epsilon)
    if weight is not None:
        scale = scale * weight.double().cpu().numpy()
    shift = -mean.double().cpu().numpy() * scale
    if bias is not None:
        shift = shift + bias.double().cpu().numpy()
    return scale, shift


# PyTorch's side


def _undefined(*_: Any) -> Any:
    raise AssertionError("a node without its call")


def apply_(x: Tensor, after: Clamp) -> Tensor:
    """Apply what follows a layer, in place where PyTorch can."""
    if after.curve is not Curve.NONE:
        return _CURVES[after.curve](x)
    if after.low == 0 and after.high == INFINITY:
        return x.relu_()
    return x if after.is_nothing else x.clamp_(after.low, after.high)


class EagerConvolution:
    """A convolution node in PyTorch: the dense kernel that the sparse one competes with."""

    def __init__(self, node: Convolution) -> None:
        self.node = node
        shape = node.weight.shape
        kernel = {0: shape[:2], 1: (*shape[:2], shape[3]), 2: shape}[node.rank]
        self.weight = torch.from_numpy(np.ascontiguousarray(node.weight)).reshape(kernel)
        self.bias = torch.from_numpy(node.bias)
        (top, bottom), (left, right) = node.padding
        self.even = top == bottom and left == right
        self.pad = (left, right, top, bottom) if node.rank == 2 else (left, right)
        self.settings: tuple[Any, ...] = (node.stride, (top, left), node.dilation, node.groups)
        if node.rank == 1:
            self.settings = (node.stride[1], left, node.dilation[1], node.groups)
        if not self.even:
            self.settings = (self.settings[0], 0, *self.settings[2:])

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Convolve, add, apply."""
        if self.node.rank == 0:
            out = nn.functional.linear(x, self.weight, self.bias)
        else:
            x = x if self.even else nn.functional.pad(x, self.pad)
            convolve = nn.functional.conv2d if self.node.rank == 2 else nn.functional.conv1d
            out = convolve(x, self.weight, self.bias, *self.settings)
        if residual is not None:
            out += residual
        return apply_(out, self.node.after)


def _as_affine(node: Convolution) -> Callable[[Tensor], Tensor]:
    """A BatchNorm of its own."""
    ones = (1,) * node.rank
    scale = torch.from_numpy(node.weight.reshape(-1, *ones))
    shift = torch.from_numpy(node.bias.reshape(-1, *ones))
    return lambda x: apply_(torch.addcmul(shift, x, scale), node.after)


_CURVES: dict[Curve, Callable[[Tensor], Tensor]] = {
    Curve.SILU: nn.functional.silu,
    Curve.GELU: nn.functional.gelu,
    Curve.GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
    Curve.HARDSWISH: nn.functional.hardswish,
}

_BATCH_NORM = _aten._native_batch_norm_legit_no_training.default
_BUILDERS: dict[Any, Callable[[_Lowering, fx.Node], _Built]] = {
    _aten.conv1d.default: _convolution,
    _aten.conv1d.padding: _convolution,
    _aten.conv2d.default: _convolution,
    _aten.conv2d.padding: _convolution,
    _aten.linear.default: _linear,
    _BATCH_NORM: _batch_norm,
    operator.getitem: _normalized,
    _aten.relu.default: _activation(Clamp(low=0.0)),
    _aten.relu6.default: _activation(Clamp(low=0.0, high=6.0)),
    _aten.hardtanh.default: _hardtanh,
    _aten.silu.default: _activation(Clamp(curve=Curve.SILU)),
    _aten.hardswish.default: _activation(Clamp(curve=Curve.HARDSWISH)),
    _aten.gelu.default: _gelu,
    _aten.add.Tensor: _add,
    _aten.mul.Tensor: _multiply,
    _aten.max_pool1d.default: _max_pool,
    _aten.max_pool2d.default: _max_pool,
    _aten.avg_pool1d.default: _average_pool,
    _aten.avg_pool2d.default: _average_pool,
    _aten.adaptive_avg_pool1d.default: _adaptive,
    _aten.adaptive_avg_pool2d.default: _adaptive,
    _aten.mean.dim: _mean,
    _aten.cat.default: _concatenate,
    _aten.view.default: _reshape,
    _aten.reshape.default: _reshape,
    _aten.flatten.using_ints: _reshape,
    _aten.squeeze.dims: _reshape,
    _aten.dropout.default: _identity,
    _aten.clone.default: _identity,
    _aten.contiguous.default: _identity,
}
