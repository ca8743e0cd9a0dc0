"""Which operations have kernels, and the nodes that they become."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from probmask.runtime.arguments import (
    arguments_of,
    as_array,
    as_pair,
    bias_or_zeros,
    label_of,
    lengths_of,
    padded_sizes_of,
    padding_of,
    scale_and_shift,
    windows_of,
)
from probmask.runtime.eager import EagerConvolution, apply_, as_affine, undefined
from probmask.runtime.fields import Curve
from probmask.runtime.nodes import (
    Activate,
    Clamp,
    Combine,
    Concatenate,
    Convolution,
    Form,
    Node,
    Pair,
    Pool,
    Reshape,
)

if TYPE_CHECKING:
    from probmask.runtime.lower import Lowering

_aten = torch.ops.aten


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


def _convolution(to: "Lowering", node: fx.Node) -> _Built:
    arguments = arguments_of(node)
    x, weight, bias = arguments["input"], to.constant(arguments["weight"]), arguments["bias"]
    rank = node.meta["val"].dim() - 2
    before, after = _plain(x.meta["val"], rank), _plain(node.meta["val"], rank)
    if weight is None or before is None or after is None or rank not in (1, 2):
        return None
    if bias is not None and to.constant(bias) is None:
        return None
    stride, dilation = (as_pair(arguments[key], rank) for key in ("stride", "dilation"))
    kernel = (1,) * (2 - rank) + tuple(weight.shape[2:])
    padding = padding_of(arguments["padding"], kernel, dilation, rank)
    layer = Convolution(
        node.name,
        (to.source(x),),
        undefined,
        label_of(node),
        form=after,
        input_forms=(before,),
        tail=_tail(node, after),
        weight=as_array(weight).reshape(*weight.shape[:2], *kernel),
        bias=bias_or_zeros(to.constant(bias) if bias is not None else None, len(weight)),
        rank=rank,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=arguments["groups"],
    )
    layer.call = EagerConvolution(layer)
    return layer


def _linear(to: "Lowering", node: fx.Node) -> _Built:
    arguments = arguments_of(node)
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
        undefined,
        label_of(node),
        form=after,
        input_forms=(before,),
        tail=_tail(node, after),
        weight=as_array(weight)[:, :, None, None],
        bias=bias_or_zeros(to.constant(bias) if bias is not None else None, len(weight)),
        rank=0,
    )
    layer.call = EagerConvolution(layer)
    return layer


def _normalized(to: "Lowering", node: fx.Node) -> _Built:
    """The first result of a BatchNorm: folded into the convolution before it, or one of its own."""
    norm, index = node.args
    if not isinstance(norm, fx.Node) or norm.target is not _BATCH_NORM or index != 0:
        return None
    x, weight, bias, mean, variance, _, epsilon = norm.args
    statistics = [to.constant(part) for part in (weight, bias, mean, variance)]
    if statistics[2] is None or statistics[3] is None or not isinstance(x, fx.Node):
        return None
    scale, shift = scale_and_shift(*statistics, epsilon=float(epsilon))  # type: ignore[arg-type]
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
        undefined,
        label_of(norm),
        form=form,
        input_forms=(form,),
        tail=_tail(node, form),
        weight=scale.astype(np.float32).reshape(-1, 1, 1, 1),
        bias=shift.astype(np.float32),
        rank=value.dim() - 2,
        groups=form.channels,
    )
    layer.call = as_affine(layer)
    return layer


def _batch_norm(_: "Lowering", node: fx.Node) -> _Built:
    """Nothing by itself, if only its first result is used: `_normalized` makes it."""
    only_first = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    known = all(isinstance(part, fx.Node) for part in node.args[3:5])
    return True if only_first and known and len(node.users) == 1 else None


def _activation(after: Clamp) -> Callable[["Lowering", fx.Node], _Built]:
    def build(to: "Lowering", node: fx.Node) -> _Built:
        return _activated(to, node, Clamp(after.low, after.high, after.curve))

    return build


def _hardtanh(to: "Lowering", node: fx.Node) -> _Built:
    arguments = arguments_of(node)
    low, high = float(arguments["min_val"]), float(arguments["max_val"])
    return _activated(to, node, Clamp(low, high)) if low <= 0 <= high else None


def _gelu(to: "Lowering", node: fx.Node) -> _Built:
    tanh = arguments_of(node)["approximate"] == "tanh"
    return _activated(to, node, Clamp(curve=Curve.GELU_TANH if tanh else Curve.GELU))


def _activated(to: "Lowering", node: fx.Node, after: Clamp) -> _Built:
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
        label_of(node),
        form=form,
        input_forms=(form,),
        tail=_tail(node, form),
        after=after,
    )


def _add(to: "Lowering", node: fx.Node) -> _Built:
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


def _multiply(to: "Lowering", node: fx.Node) -> _Built:
    pair = _same_forms(to, node)
    return None if pair is None else _combine(to, node, pair, product=True)


def _same_forms(to: "Lowering", node: fx.Node) -> tuple[str, str] | None:
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


def _combine(to: "Lowering", node: fx.Node, pair: tuple[str, str], *, product: bool) -> Node:
    form = to.form_of(pair[0]) or to.form_of(pair[1])
    assert form is not None
    made = Combine(
        node.name,
        pair,
        undefined,
        label_of(node),
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


def _max_pool(to: "Lowering", node: fx.Node) -> _Built:
    arguments = arguments_of(node)
    rank = node.meta["val"].dim() - 2
    if as_pair(arguments["dilation"], rank) != (1, 1):
        return None
    return _pool(to, node, rank, windows_of(arguments, node, rank), largest=True)


def _average_pool(to: "Lowering", node: fx.Node) -> _Built:
    arguments = arguments_of(node)
    rank = node.meta["val"].dim() - 2
    windows = windows_of(arguments, node, rank)
    forced = arguments.get("divisor_override")
    if forced is not None:
        sizes = [np.ones(len(windows[0])), np.full(len(windows[1]), float(forced))]
    elif arguments["count_include_pad"]:
        sizes = padded_sizes_of(arguments, node, rank)
    else:
        sizes = [np.array([end - start for start, end in axis], float) for axis in windows]
    return _pool(to, node, rank, windows, largest=False, sizes=sizes)


def _adaptive(to: "Lowering", node: fx.Node) -> _Built:
    rank = node.meta["val"].dim() - 2
    sizes = zip(lengths_of(node.args[0], rank), lengths_of(node, rank), strict=True)
    windows = [
        [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)] for size, out in sizes
    ]
    return _pool(to, node, rank, windows, largest=False)


def _mean(to: "Lowering", node: fx.Node) -> _Built:
    """The mean of all positions of a channel."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    rank = x.meta["val"].dim() - 2
    dims = {d % (rank + 2) for d in node.args[1] or ()} if len(node.args) > 1 else set()  # type: ignore[union-attr]
    if rank not in (1, 2) or dims != set(range(2, rank + 2)) or node.kwargs.get("dtype"):
        return None
    windows = [[(0, length)] for length in lengths_of(x, rank)]
    return _pool(to, node, rank, windows, largest=False)


def _pool(
    to: "Lowering",
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
        label_of(node),
        form=after,
        input_forms=(before,),
        tail=_tail(node, after),
        largest=largest,
        rows=tuple(windows[0]),
        columns=tuple(windows[1]),
        divisors=(1 / np.multiply.outer(sizes[0], sizes[1])).astype(np.float32),
    )


def _concatenate(to: "Lowering", node: fx.Node) -> _Built:
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
        label_of(node),
        form=form,
        input_forms=tuple(known),
        tail=_tail(node, form),
    )


def _reshape(to: "Lowering", node: fx.Node) -> _Built:
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
        label_of(node),
        form=form,
        input_forms=(before,),
        tail=tail,
    )


def _identity(to: "Lowering", node: fx.Node) -> _Built:
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


_BATCH_NORM = _aten._native_batch_norm_legit_no_training.default
BUILDERS: dict[Any, Callable[["Lowering", fx.Node], _Built]] = {
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
