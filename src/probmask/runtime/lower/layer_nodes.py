"""Layers with weights: convolutions and linear layers."""

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from probmask.runtime.lower.graph import (
    Built,
    Graph,
    arguments_of,
    as_pair,
    label_of,
    padding_of,
    plain,
    plain_of_any_rank,
    rows,
    tail,
)
from probmask.runtime.lower.nodes import Convolution, Form, in_pytorch, undefined


def build_convolution(graph: Graph, node: fx.Node) -> Built:
    """A convolution of a batch whose weights are known; one image without a batch has no kernel."""
    arguments = arguments_of(node)
    known = _known_weights(graph, arguments)
    if known is None:
        return None
    weight, bias = known
    rank = weight.dim() - 2  # not of the output: it may lack a batch
    before, after = (plain(n.meta["val"], rank) for n in (arguments["input"], node))
    if before is None or after is None:
        return None
    stride, dilation = (as_pair(arguments[key], rank) for key in ("stride", "dilation"))
    kernel = (1,) * (2 - rank) + tuple(weight.shape[2:])
    layer = Convolution(
        node.name,
        (graph.source(arguments["input"]),),
        undefined,
        label_of(node),
        form=after,
        input_forms=(before,),
        tail=tail(node, after),
        weight=as_array(weight).reshape(*weight.shape[:2], *kernel),
        bias=bias_or_zeros(bias, len(weight)),
        rank=rank,
        stride=stride,
        padding=padding_of(arguments["padding"], kernel, dilation, rank),
        dilation=dilation,
        groups=arguments["groups"],
    )
    layer.call = in_pytorch(layer)
    return layer


def build_linear(graph: Graph, node: fx.Node) -> Built:
    """A linear layer on the last dimension; a single vector has no kernel."""
    arguments = arguments_of(node)
    x, known = arguments["input"], _known_weights(graph, arguments)
    before, after = rows(x.meta["val"]), rows(node.meta["val"])
    if known is None or before is None or after is None:
        return None
    weight, bias = known
    source = graph.source(x)
    layer = Convolution(
        node.name,
        (source,),
        undefined,
        label_of(node),
        form=after,
        input_forms=(_as_it_lies(before, graph.form_of(source)),),
        tail=tail(node, after),
        weight=as_array(weight)[:, :, None, None],
        bias=bias_or_zeros(bias, len(weight)),
        rank=0,
    )
    layer.call = in_pytorch(layer)
    return layer


def _known_weights(graph: Graph, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    """The weight and the bias, if both are always the same."""
    weight, bias = graph.constant(arguments["weight"]), graph.constant(arguments["bias"])
    if weight is None or (arguments["bias"] is not None and bias is None):
        return None
    return weight, bias


def _as_it_lies(wanted: Form, found: Form | None) -> Form:
    """The form that the input has, if its numbers are in the order that a linear layer reads."""
    same = found is not None and found.unit == wanted.unit and found.size == wanted.channels
    return found if same and found is not None else wanted


BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


def build_batch_norm(graph: Graph, node: fx.Node) -> Built:
    """Nothing by itself, if `build_normalized` makes it of its first result."""
    return True if _has_kernel(graph, node) else None


def build_normalized(graph: Graph, node: fx.Node) -> Built:
    """The first result of a BatchNorm: folded into the layer before it, or one of its own."""
    norm, _ = node.args
    if (
        not isinstance(norm, fx.Node)
        or norm.target is not BATCH_NORM
        or not _has_kernel(graph, norm)
    ):
        return None
    x, weight, bias, mean, variance, _, epsilon = norm.args
    statistics: Any = [graph.constant(part) for part in (weight, bias, mean, variance)]
    scale, shift = scale_and_shift(*statistics, epsilon=float(epsilon))  # type: ignore[arg-type]
    source = graph.source(x)
    layer = graph.nodes.get(source)
    if isinstance(layer, Convolution) and graph.used_once(source) and _fold(layer, scale, shift):
        graph.rename(layer, node.name)
        return True
    form = plain_of_any_rank(node.meta["val"])
    assert form is not None
    layer = Convolution(
        node.name,
        (source,),
        undefined,
        label_of(norm),
        form=form,
        input_forms=(form,),
        tail=tail(node, form),
        weight=scale.astype(np.float32).reshape(-1, 1, 1, 1),
        bias=shift.astype(np.float32),
        rank=node.meta["val"].dim() - 2,
        groups=form.channels,
    )
    layer.call = in_pytorch(layer)
    return layer


def _has_kernel(graph: Graph, norm: fx.Node) -> bool:
    """Whether it normalizes single precision by known statistics, and nobody asks for these."""
    x, *statistics = norm.args[:5]
    known = all(part is None or graph.constant(part) is not None for part in statistics)
    used = [user.args[1] if user.target is operator.getitem else None for user in norm.users]
    varies = isinstance(x, fx.Node) and graph.constant(x) is None
    single = varies and plain_of_any_rank(x.meta["val"]) is not None  # type: ignore[union-attr]
    return known and None not in statistics[2:] and used == [0] and single


def _fold(layer: Convolution, scale: Any, shift: Any) -> bool:
    """Make the BatchNorm part of the layer, if it comes right after the layer's own sum."""
    assert layer.form is not None
    channels_first = layer.rank > 0 or len(layer.form.unit) == 1
    if not channels_first or not layer.after.is_nothing or len(layer.inputs) > 1:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        weight = (layer.weight * scale[:, None, None, None]).astype(np.float32)
        bias = (layer.bias * scale + shift).astype(np.float32)
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        return False  # the product may overflow where the two factors, one by one, do not
    layer.weight, layer.bias = weight, bias
    layer.call = in_pytorch(layer)
    return True


# Numbers


def as_array(tensor: Tensor) -> Any:
    """The tensor in single precision."""
    return tensor.to(torch.float32).cpu().numpy()


def bias_or_zeros(tensor: Tensor | None, channels: int) -> Any:
    """The bias, or zeros where there is none."""
    return np.zeros(channels, np.float32) if tensor is None else as_array(tensor)


def scale_and_shift(
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
