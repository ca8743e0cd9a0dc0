"""Layers with weights: convolutions and linear layers."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from probmask.runtime.arguments import (
    arguments_of,
    as_array,
    as_pair,
    bias_or_zeros,
    label_of,
    padding_of,
)
from probmask.runtime.building.forms import Built, plain, rows, tail
from probmask.runtime.eager import in_pytorch, undefined
from probmask.runtime.nodes import Convolution, Form

if TYPE_CHECKING:
    from probmask.runtime.lower import Lowering


def build_convolution(to: "Lowering", node: fx.Node) -> Built:
    """A convolution of a batch whose weights are known; one image without a batch has no kernel."""
    arguments = arguments_of(node)
    known = _known_weights(to, arguments)
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
        (to.source(arguments["input"]),),
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


def build_linear(to: "Lowering", node: fx.Node) -> Built:
    """A linear layer on the last dimension; a single vector has no kernel."""
    arguments = arguments_of(node)
    x, known = arguments["input"], _known_weights(to, arguments)
    before, after = rows(x.meta["val"]), rows(node.meta["val"])
    if known is None or before is None or after is None:
        return None
    weight, bias = known
    source = to.source(x)
    layer = Convolution(
        node.name,
        (source,),
        undefined,
        label_of(node),
        form=after,
        input_forms=(_as_it_lies(before, to.form_of(source)),),
        tail=tail(node, after),
        weight=as_array(weight)[:, :, None, None],
        bias=bias_or_zeros(bias, len(weight)),
        rank=0,
    )
    layer.call = in_pytorch(layer)
    return layer


def _known_weights(
    to: "Lowering", arguments: dict[str, Any]
) -> tuple[Tensor, Tensor | None] | None:
    """The weight and the bias, if both are always the same."""
    weight, bias = to.constant(arguments["weight"]), to.constant(arguments["bias"])
    if weight is None or (arguments["bias"] is not None and bias is None):
        return None
    return weight, bias


def _as_it_lies(wanted: Form, found: Form | None) -> Form:
    """The form that the input has, if its numbers are in the order that a linear layer reads."""
    same = found is not None and found.unit == wanted.unit and found.size == wanted.channels
    return found if same and found is not None else wanted
