"""Nodes of layers: convolution, linear layer and BatchNorm."""

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from probmask.runtime.lower.folding import BatchNorm, Folded
from probmask.runtime.lower.graph import (
    Built,
    Graph,
    arguments_of,
    as_triple,
    image_form,
    image_form_of_any_rank,
    label_of,
    padding_of,
    row_form,
    trailing_shape,
)
from probmask.runtime.lower.image_inputs import image_input, unpadded
from probmask.runtime.lower.nodes import (
    Convolution,
    Depth,
    Form,
    TransposedConvolution,
    unset_call,
)
from probmask.runtime.lower.pytorch_calls import pytorch_call, transposed_call
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
    x, zeros = unpadded(arguments["input"], rank)
    read, after = image_input(graph, x, rank), image_form(node.meta["val"], rank)
    if read is None or after is None:
        return None
    stride, dilation = (as_triple(arguments[key], rank) for key in ("stride", "dilation"))
    kernel = as_triple(tuple(weight.shape[2:]), rank)
    of_slices, *padding = (
        (before + own[0], after + own[1])
        for (before, after), own in zip(
            padding_of(arguments["padding"], kernel, dilation, rank), zeros, strict=True
        )
    )
    depth = None
    if rank == 3:
        inputs, outputs = (int(n.meta["val"].shape[2]) for n in (x, node))
        depth = Depth(inputs, outputs, kernel[0], stride[0], of_slices, dilation[0])
    layer = Convolution(
        node.name,
        (read.name,),
        unset_call,
        label_of(node),
        form=after,
        input_forms=(read.form,),
        views=read.views,
        trailing=trailing_shape(node, after),
        weight=as_array(weight).reshape(len(weight), weight.shape[1] * kernel[0], *kernel[1:]),
        bias=bias_or_zeros(bias, len(weight)),
        rank=rank,
        stride=stride[1:],
        padding=(padding[0], padding[1]),
        dilation=dilation[1:],
        groups=arguments["groups"],
        depth=depth,
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
    if view is None:
        return False
    if own is not None and own.positions > 1:
        return own.tokens
    is_vector = view.positions == 1 and len(view.dimensions) == 2
    return not is_vector or (own is None and graph.form_of(view.root) is not None)


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
    slices = form.channels // len(scale)
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
        groups=len(scale),
        depth=Depth(slices, slices) if node.meta["val"].dim() == 5 else None,
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
