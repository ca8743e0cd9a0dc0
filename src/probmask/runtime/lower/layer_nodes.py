"""Nodes of layers: convolution, linear layer, BatchNorm and pooling."""

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from probmask.runtime.lower.folding import BatchNorm, Folded
from probmask.runtime.lower.graph import (
    Builder,
    Built,
    Graph,
    arguments_of,
    as_pair,
    image_form,
    image_form_of_any_rank,
    label_of,
    padding_of,
    row_form,
    trailing_shape,
)
from probmask.runtime.lower.image_inputs import image_input
from probmask.runtime.lower.nodes import (
    Convolution,
    Form,
    Pair,
    Pool,
    TransposedConvolution,
    unset_call,
)
from probmask.runtime.lower.pytorch_calls import OnViews, pytorch_call, transposed_call
from probmask.runtime.lower.token_nodes import build_token_linear

# Products of weights and inputs below this cannot overflow, nor can sums of hundreds of them.
_MODERATE = 2.0**60
BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


def build_convolution(graph: Graph, node: fx.Node) -> Built:
    """Build a convolution with constant weights. An image without a batch has no kernel."""
    arguments = arguments_of(node)
    known = constant_weights(graph, arguments)
    if known is None:
        return None
    weight, bias = known
    rank = weight.dim() - 2  # the output's rank would be wrong for an image without a batch
    read, after = image_input(graph, arguments["input"], rank), image_form(node.meta["val"], rank)
    if read is None or after is None:
        return None
    stride, dilation = (as_pair(arguments[key], rank) for key in ("stride", "dilation"))
    kernel = (1,) * (2 - rank) + tuple(weight.shape[2:])
    layer = Convolution(
        node.name,
        (read.name,),
        unset_call,
        label_of(node),
        form=after,
        input_forms=(read.form,),
        views=read.views,
        trailing=trailing_shape(node, after),
        weight=as_array(weight).reshape(*weight.shape[:2], *kernel),
        bias=bias_or_zeros(bias, len(weight)),
        rank=rank,
        stride=stride,
        padding=padding_of(arguments["padding"], kernel, dilation, rank),
        dilation=dilation,
        groups=arguments["groups"],
    )
    layer.call = pytorch_call(layer)
    return layer


def build_linear(graph: Graph, node: fx.Node) -> Built:
    """Build a linear layer on the last dimension. A single vector has no kernel."""
    arguments = arguments_of(node)
    x, known = arguments["input"], constant_weights(graph, arguments)
    return _linear(graph, node, x, known)


def build_addmm(graph: Graph, node: fx.Node) -> Built:
    """Build a product with a constant matrix plus a constant vector: `Conv1D` of transformers."""
    arguments = arguments_of(node)
    weight, bias = graph.constant(arguments["mat2"]), graph.constant(arguments["self"])
    if weight is None or bias is None or bias.dim() != 1 or len(bias) != weight.shape[1]:
        return None
    if (
        arguments["alpha"] != 1
        or arguments["beta"] != 1
        or graph.constant(arguments["mat1"]) is not None
    ):
        return None
    return _linear(graph, node, arguments["mat1"], (weight.t(), bias))


def _linear(
    graph: Graph, node: fx.Node, x: fx.Node, known: tuple[Tensor, Tensor | None] | None
) -> Built:
    before, after = row_form(x.meta["val"]), row_form(node.meta["val"])
    if known is None or before is None or after is None:
        return None
    weight, bias = known
    source = graph.source(x)
    if _is_over_tokens(graph, x):
        arrays = as_array(weight), bias_or_zeros(bias, len(weight))
        return build_token_linear(graph, node, *arrays, x)
    layer = Convolution(
        node.name,
        (source,),
        unset_call,
        label_of(node),
        form=after,
        input_forms=(_form_in_memory(before, graph.form_of(source)),),
        trailing=trailing_shape(node, after),
        weight=as_array(weight)[:, :, None, None],
        bias=bias_or_zeros(bias, len(weight)),
        rank=0,
    )
    layer.call = pytorch_call(layer)
    return layer


def _is_over_tokens(graph: Graph, x: fx.Node) -> bool:
    """Return whether a linear layer reads tokens, or a view, and not an image or a vector."""
    own, view = graph.form_of(graph.source(x)), graph.view_of(x)
    return view is not None and (own.tokens if own is not None else view.positions > 1)


def constant_weights(
    graph: Graph, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight and the bias if both are constant."""
    weight, bias = graph.constant(arguments["weight"]), graph.constant(arguments["bias"])
    if weight is None or (arguments["bias"] is not None and bias is None):
        return None
    return weight, bias


def _form_in_memory(rows: Form, source: Form | None) -> Form:
    """Return the input's own form if its elements are in the order that a linear layer reads."""
    if source is None or source.leading != rows.leading or source.size != rows.channels:
        return rows
    return source


def build_batch_norm(graph: Graph, node: fx.Node) -> Built:
    """Build nothing for a BatchNorm with a kernel: `build_normalized` builds its first output."""
    return None if _batch_norm(graph, node) is None else True


def build_normalized(graph: Graph, node: fx.Node) -> Built:
    """Fold a BatchNorm into the layer before it, or build a layer for it."""
    norm, _ = node.args
    if not isinstance(norm, fx.Node) or norm.target is not BATCH_NORM:
        return None
    known = _batch_norm(graph, norm)
    if known is None:
        return None
    scale, shift = known.scale_and_shift()
    source = graph.source(norm.args[0])
    layer = graph.nodes.get(source)
    if isinstance(layer, Convolution | TransposedConvolution) and graph.used_once(source):
        first = isinstance(layer, Convolution) and layer.folded is None
        record = Folded(layer.bias, known) if first else None
        if fold(layer, scale, shift):
            if isinstance(layer, Convolution):
                layer.folded = record
            graph.rename(layer, node.name)
            return True
    form = image_form_of_any_rank(node.meta["val"])
    assert form is not None
    layer = Convolution(
        node.name,
        (source,),
        unset_call,
        label_of(norm),
        form=form,
        input_forms=(form,),
        trailing=trailing_shape(node, form),
        weight=scale.astype(np.float32).reshape(-1, 1, 1, 1),
        bias=shift.astype(np.float32),
        rank=node.meta["val"].dim() - 2,
        groups=form.channels,
    )
    layer.call = pytorch_call(layer)
    return layer


def _batch_norm(graph: Graph, norm: fx.Node) -> BatchNorm | None:
    """Return the numbers of a BatchNorm, or None if it has no kernel.

    If its scale or its shift overflows in single precision, PyTorch computes it, with its own NaNs.
    """
    if not _has_kernel(graph, norm):
        return None
    statistics: tuple[Any, ...] = norm.args[1:5]
    epsilon: Any = norm.args[6]
    constants = [graph.constant(part) for part in statistics]
    weight, bias, mean, variance = (None if c is None else as_array(c) for c in constants)
    assert mean is not None
    assert variance is not None
    found = BatchNorm(mean, variance, weight, bias, float(epsilon))
    with np.errstate(all="ignore"):
        finite = [np.isfinite(p.astype(np.float32)).all() for p in found.scale_and_shift()]
    return found if all(finite) else None


def _has_kernel(graph: Graph, norm: fx.Node) -> bool:
    """Return whether it normalizes float32 by constant statistics, and only its result is used."""
    x, *statistics = norm.args[:5]
    known = all(part is None or graph.constant(part) is not None for part in statistics)
    used = [user.args[1] if user.target is operator.getitem else None for user in norm.users]
    varies = isinstance(x, fx.Node) and graph.constant(x) is None
    single = varies and image_form_of_any_rank(x.meta["val"]) is not None  # type: ignore[union-attr]
    return known and None not in statistics[2:] and used == [0] and single


def fold(layer: Convolution | TransposedConvolution, scale: Any, shift: Any) -> bool:
    """Fold a BatchNorm into a layer, unless something else follows the layer.

    With extreme numbers the folded layer would differ from the two operations: one of them can
    overflow where the product does not, or the product where they do not, or it can underflow.
    """
    assert layer.form is not None
    channels_first = layer.rank > 0 or (len(layer.form.leading) == 1 and not layer.views)
    return channels_first and fold_channels(layer, scale, shift)


def fold_channels(layer: Convolution | TransposedConvolution, scale: Any, shift: Any) -> bool:
    """Let a layer also multiply each of its output channels by a number and add another."""
    if not layer.activation.is_identity or len(layer.inputs) > 1:
        return False
    with np.errstate(all="ignore"):
        product = layer.scaled(scale)
        weight = product.astype(np.float32)
        bias = (layer.bias * scale + shift).astype(np.float32)
    if not all(map(_is_moderate, (layer.weight, layer.bias, scale, shift, weight, bias))):
        return False
    if 0 < _largest(product) < 1 / _MODERATE:
        return False
    layer.weight, layer.bias = weight, bias
    layer.call = pytorch_call(layer) if isinstance(layer, Convolution) else transposed_call(layer)
    return True


def _is_moderate(array: Any) -> bool:
    """Return whether all entries are small enough; NaN is not."""
    return bool(_largest(array) <= _MODERATE)


def _largest(array: Any) -> Any:
    return np.abs(array).max(initial=0)


def as_array(tensor: Tensor) -> Any:
    """Return a copy of the tensor as a float32 array.

    A view would dangle if `torch.multiprocessing` moved the tensor, a constant of another node, to
    shared memory.
    """
    return tensor.to(torch.float32).cpu().numpy().copy()


def bias_or_zeros(tensor: Tensor | None, channels: int) -> Any:
    """Return the bias as an array, or zeros if there is none."""
    return np.zeros(channels, np.float32) if tensor is None else as_array(tensor)


def build_max_pool(rank: int) -> Builder:
    """Return a builder of max pooling in 1 or 2 dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        arguments = arguments_of(node)
        if not _has_batch(node, rank) or as_pair(arguments["dilation"], rank) != (1, 1):
            return None
        return _pool(graph, node, rank, _windows_of(arguments, node, rank), is_max=True)

    return build


def build_average_pool(rank: int) -> Builder:
    """Return a builder of average pooling in 1 or 2 dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        if not _has_batch(node, rank):
            return None
        arguments = arguments_of(node)
        windows = _windows_of(arguments, node, rank)
        divisor = arguments.get("divisor_override")
        if divisor is not None:
            sizes = [np.ones(len(windows[0])), np.full(len(windows[1]), float(divisor))]
        elif arguments["count_include_pad"]:
            sizes = _padded_lengths_of(arguments, node, rank)
        else:
            sizes = _window_lengths(windows)
        return _pool(graph, node, rank, windows, is_max=False, sizes=sizes)

    return build


def build_adaptive_pool(rank: int) -> Builder:
    """Return a builder of adaptive average pooling in 1 or 2 dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        if not _has_batch(node, rank):
            return None
        lengths = zip(_lengths_of(node.args[0], rank), _lengths_of(node, rank), strict=True)
        windows = [
            [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)]
            for size, out in lengths
        ]
        return _pool(graph, node, rank, windows, is_max=False)

    return build


def build_mean(graph: Graph, node: fx.Node) -> Built:
    """Build the mean over all positions of a channel."""
    arguments = arguments_of(node)
    rank = arguments["self"].meta["val"].dim() - 2
    dims = {dim % (rank + 2) for dim in arguments["dim"] or ()}
    if rank not in (1, 2) or dims != set(range(2, rank + 2)) or arguments["dtype"] is not None:
        return None
    if not _has_batch(node, rank):
        return None
    windows = [[(0, length)] for length in _lengths_of(arguments["self"], rank)]
    return _pool(graph, node, rank, windows, is_max=False)


def _has_batch(node: fx.Node, rank: int) -> bool:
    """Return whether the input has a batch, which kernels need."""
    return _image_form_before(node, rank) is not None


def _image_form_before(node: fx.Node, rank: int) -> Form | None:
    x = node.args[0]
    return image_form(x.meta["val"], rank) if isinstance(x, fx.Node) else None


def _pool(
    graph: Graph,
    node: fx.Node,
    rank: int,
    windows: list[list[Pair]],
    *,
    is_max: bool,
    sizes: list[Any] | None = None,
) -> Built:
    read, before = image_input(graph, node.args[0], rank), _image_form_before(node, rank)
    empty = any(end <= start for axis in windows for start, end in axis)
    if read is None or before is None or empty:
        return None
    after = Form(before.leading, before.channels, len(windows[0]), len(windows[1]))
    sizes = sizes or _window_lengths(windows)
    made = Pool(
        node.name,
        (read.name,),
        graph.eager(node, "").call,
        label_of(node),
        form=after,
        input_forms=(read.form,),
        views=read.views,
        trailing=trailing_shape(node, after),
        is_max=is_max,
        rows=tuple(windows[0]),
        columns=tuple(windows[1]),
        factors=(1 / np.multiply.outer(sizes[0], sizes[1])).astype(np.float32),
    )
    if read.views:
        made.call = OnViews(made, made.call)
    return made


def _window_lengths(windows: list[list[Pair]]) -> list[Any]:
    return [np.array([end - start for start, end in axis], float) for axis in windows]


def _lengths_of(node: Any, rank: int) -> Pair:
    """Return the numbers of rows and columns of a tensor; at rank 1 there is one row."""
    sizes = tuple(node.meta["val"].shape[-2:]) if rank == 2 else (1, node.meta["val"].shape[-1])
    return int(sizes[0]), int(sizes[1])


def _axes_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[tuple[int, ...]]:
    """Return kernel size, stride, padding, input size and output size of each axis."""
    kernel = as_pair(arguments["kernel_size"], rank)
    stride = as_pair(arguments["stride"] or arguments["kernel_size"], rank)
    ((top, _), (left, _)) = padding_of(arguments["padding"], kernel, (1, 1), rank)
    before, after = _lengths_of(node.args[0], rank), _lengths_of(node, rank)
    return list(zip(kernel, stride, (top, left), before, after, strict=True))


def _windows_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[list[Pair]]:
    """Return the start and end of each window, along rows and columns."""
    return [
        [(max(0, o * s - p), min(size, o * s - p + k)) for o in range(out)]
        for k, s, p, size, out in _axes_of(arguments, node, rank)
    ]


def _padded_lengths_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[Any]:
    """Return the length of each window within the image and its padding."""
    return [
        np.array([min(size + p, o * s - p + k) - (o * s - p) for o in range(out)], float)
        for k, s, p, size, out in _axes_of(arguments, node, rank)
    ]
