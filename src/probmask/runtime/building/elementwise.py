"""Activations, sums and products: part of the layer before them where they can be."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from probmask.runtime.arguments import arguments_of, label_of
from probmask.runtime.building.forms import Builder, Built, tail
from probmask.runtime.eager import apply_, undefined
from probmask.runtime.fields import Curve
from probmask.runtime.nodes import Activate, Clamp, Combine, Convolution, Node

if TYPE_CHECKING:
    from probmask.runtime.lower import Lowering


def build_activation(after: Clamp) -> Builder:
    """A builder of one activation function."""

    def build(to: "Lowering", node: fx.Node) -> Built:
        return _activated(to, node, Clamp(after.low, after.high, after.curve))

    return build


def build_hardtanh(to: "Lowering", node: fx.Node) -> Built:
    """A clamp that maps 0 to 0; others have no kernel."""
    arguments = arguments_of(node)
    low, high = float(arguments["min_val"]), float(arguments["max_val"])
    return _activated(to, node, Clamp(low, high)) if low <= 0 <= high else None


def build_gelu(to: "Lowering", node: fx.Node) -> Built:
    """GELU, exact or by tanh."""
    tanh = arguments_of(node)["approximate"] == "tanh"
    return _activated(to, node, Clamp(curve=Curve.GELU_TANH if tanh else Curve.GELU))


def _activated(to: "Lowering", node: fx.Node, after: Clamp) -> Built:
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
        tail=tail(node, form),
        after=after,
    )


def build_add(to: "Lowering", node: fx.Node) -> Built:
    """A sum of two tensors of one form, added by the layer that computes one of them if it can."""
    pair = _same_forms(to, node) if arguments_of(node)["alpha"] == 1 else None
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


def build_multiply(to: "Lowering", node: fx.Node) -> Built:
    """A product of two tensors of one form."""
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
    # Sizes that vary are compared by what they are called, not by what they happen to be.
    if len({tuple(map(str, value.shape)) for value in values}) > 1:
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
        tail=tail(node, form),
        product=product,
    )
    made.call = _combined(made)
    return made


def _combined(node: Combine) -> Callable[[Tensor, Tensor], Tensor]:
    function = torch.mul if node.product else torch.add
    return lambda x, y: apply_(function(x, y), node.after)
