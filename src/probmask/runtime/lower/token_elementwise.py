"""Nodes over tokens without weights: activations, sums and products."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from probmask.runtime.kernels.operation_table import Curve
from probmask.runtime.lower.copy_nodes import copied, of_one_image, planes
from probmask.runtime.lower.elementwise_nodes import ActivationOf
from probmask.runtime.lower.graph import Builder, Built, Graph, arguments_of, label_of
from probmask.runtime.lower.layer_nodes import fold_channels
from probmask.runtime.lower.nodes import (
    Activate,
    Activation,
    Combine,
    Convolution,
    Floats,
    Node,
    TransposedConvolution,
    unset_call,
)
from probmask.runtime.lower.patterns import rms_norm, tanh_gelu
from probmask.runtime.lower.pytorch_calls import OnRows, apply_activation_, root_of
from probmask.runtime.lower.token_nodes import build_normalization, form_like
from probmask.runtime.lower.view_nodes import add_result, fuse
from probmask.runtime.lower.views import Axis, View, concrete


def build_token_activation(activation_of: ActivationOf) -> Builder:
    """Return a builder of an activation function, as a part of the layer before it if possible."""

    def build(graph: Graph, node: fx.Node) -> Built:
        activation = activation_of(node)
        return None if activation is None else _activated(graph, node, node.args[0], activation)

    return build


def _activated(graph: Graph, node: fx.Node, x: Any, activation: Activation) -> Built:
    view = planes(graph, x)
    if view is None:
        return None
    layer = _layer_of(graph, view)
    takes_curves = isinstance(layer, Convolution | TransposedConvolution)
    if (
        isinstance(layer, Convolution | TransposedConvolution | Combine)
        and layer.activation.is_identity
        and (takes_curves or activation.curve is Curve.NONE)
    ):
        layer.activation = activation  # its call reads it
        return fuse(graph, node, layer, view)
    form = graph.form_of_root(view)
    made = Activate(
        node.name,
        (view.root,),
        unset_call,
        label_of(node),
        form=form_like(form, view.width()),
        input_forms=(form,),
        views=(view,),
        activation=activation,
    )
    made.call = OnRows(made, _ActivateCall(activation))
    return add_result(graph, node, made, view.with_root(view.root, view.width()))


class _ActivateCall:
    def __init__(self, activation: Activation) -> None:
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return apply_activation_(x.clone(), self.activation)


def _layer_of(graph: Graph, view: View) -> Node | None:
    """Return the node that computes a view, if all of its output is used only here."""
    node = graph.nodes.get(view.root)
    whole = node is not None and node.form is not None and view.width() == node.form.channels
    return node if whole and graph.used_once(view.root) else None


def build_token_add(graph: Graph, node: fx.Node) -> Built:
    """Build a sum over tokens."""
    if arguments_of(node).get("alpha", 1) != 1:
        return None
    return _combination(graph, node, product=False)


def build_token_multiply(graph: Graph, node: fx.Node) -> Built:
    """Build a product over tokens, or the function that it is the last operation of."""
    norm, x = rms_norm(node), tanh_gelu(node)
    if norm is not None:
        size = int(norm[0].meta["val"].shape[-1])
        built = build_normalization(
            graph, node, norm[0], [size], (None, None), norm[1], centered=False
        )
    elif x is not None:
        built = _activated(graph, node, x, Activation(curve=Curve.GELU_TANH))
    else:
        built = None
    return built if built is not None else _combination(graph, node, product=True)


def build_token_subtract(graph: Graph, node: fx.Node) -> Built:
    """Build the subtraction of a constant, as a sum."""
    constant = _constant_operand(graph, node.args[1])
    if constant is None or arguments_of(node).get("alpha", 1) != 1:
        return None
    return _combined_with_constant(graph, node, node.args[0], -constant, product=False)


def build_token_divide(graph: Graph, node: fx.Node) -> Built:
    """Build a division by a constant, as a product."""
    constant = _constant_operand(graph, node.args[1])
    if constant is None:
        return None
    return _combined_with_constant(graph, node, node.args[0], 1 / constant, product=True)


def build_negation(graph: Graph, node: fx.Node) -> Built:
    """Build a negation, as a product."""
    return _combined_with_constant(graph, node, node.args[0], torch.tensor(-1.0), product=True)


def _combination(graph: Graph, node: fx.Node, *, product: bool) -> Built:
    first, second = node.args[:2]
    for x, other in ((first, second), (second, first)):
        constant = _constant_operand(graph, other)
        if constant is not None:
            return _combined_with_constant(graph, node, x, constant, product=product)
    return _combined(graph, node, (first, second), product=product)


def _constant_operand(graph: Graph, other: Any) -> Tensor | None:
    if isinstance(other, int | float) and not isinstance(other, bool):
        return torch.tensor(float(other))
    found = graph.shared_constant(other)
    return found if found is not None and found.dtype == torch.float32 else None


def _combined_with_constant(
    graph: Graph, node: fx.Node, x: Any, constant: Tensor, *, product: bool
) -> Built:
    view = planes(graph, x)
    value = node.meta["val"]
    if view is None or value.dtype != torch.float32:
        return None
    if view.shape != tuple(concrete(size) for size in value.shape):
        return None
    result = view.with_root(view.root, view.width())
    shape = [
        1 if any(factor.axis is Axis.BATCH for factor in dimension) else size
        for dimension, size in zip(view.dimensions, view.shape, strict=True)
    ]
    # A dimension that is a product of the batch and others has no constant of its own.
    if any(n == 1 and len(d) > 1 for n, d in zip(shape, view.dimensions, strict=True)):
        return None
    expanded = of_one_image(constant, shape)
    if expanded is None:
        return None
    array = root_of(result, expanded)[0].contiguous().numpy().copy()
    if not np.isfinite(array).all():
        return None
    layer = _layer_of(graph, view)
    numbers = _per_output(layer, array)
    if numbers is not None:
        assert isinstance(layer, Convolution | TransposedConvolution)
        scale = numbers.astype(float) if product else np.ones(len(numbers))
        shift = np.zeros(len(numbers)) if product else numbers.astype(float)
        if fold_channels(layer, scale, shift):
            if isinstance(layer, Convolution):
                layer.folded = None  # not only a BatchNorm
            return fuse(graph, node, layer, view)
    form = graph.form_of_root(view)
    made = Combine(
        node.name,
        (view.root,),
        unset_call,
        label_of(node),
        form=form_like(form, view.width()),
        input_forms=(form,),
        views=(view,),
        product=product,
        constant=array,
    )
    made.call = OnRows(made, _ConstantCall(made))
    return add_result(graph, node, made, result)


def _per_output(layer: Node | None, constant: Floats) -> Floats | None:
    """Return one number per output channel of a layer; None if the constant has more."""
    if not isinstance(layer, Convolution | TransposedConvolution):
        return None
    per_slice = constant.reshape(len(constant), len(layer.bias), -1)
    first: Floats = per_slice[0, :, 0]
    return first if (per_slice == first[None, :, None]).all() else None


class _ConstantCall:
    """A sum or a product with a constant in PyTorch, with the node's current activation."""

    def __init__(self, node: Combine) -> None:
        assert node.constant is not None
        self.node, self.constant = node, torch.from_numpy(node.constant)

    def __call__(self, x: Tensor) -> Tensor:
        combined = x * self.constant if self.node.product else x + self.constant
        return apply_activation_(combined, self.node.activation)


def _combined(graph: Graph, node: fx.Node, pair: tuple[Any, Any], *, product: bool) -> Built:
    values = [a.meta.get("val") if isinstance(a, fx.Node) else None for a in pair]
    shapes = {tuple(map(str, v.shape)) if isinstance(v, Tensor) else None for v in values}
    if len(shapes) > 1 or None in shapes:
        return None
    views = _alike(graph, pair)
    if views is None:
        return None
    forms = [graph.form_of_root(view) for view in views]
    if not product:
        for result, residual in ((views[1], views[0]), (views[0], views[1])):
            fused = _fused_residual(graph, node, result, residual)
            if fused is not None:
                return fused
    width = views[0].width()
    made = Combine(
        node.name,
        (views[0].root, views[1].root),
        unset_call,
        label_of(node),
        form=form_like(forms[0], width),
        input_forms=tuple(forms),
        views=(views[0], views[1]),
        product=product,
    )
    made.call = OnRows(made, _PairCall(made))
    return add_result(graph, node, made, views[0].with_root(views[0].root, width))


def _alike(graph: Graph, pair: tuple[Any, Any]) -> list[View] | None:
    """Return two values with the same planes; tokens that are stored as an image are copied."""
    views = [view for argument in pair if (view := planes(graph, argument)) is not None]
    if len(views) < 2 or not _same_order(*views):
        return None
    forms = [graph.form_of_root(view) for view in views]
    if len({(form.height, form.width) for form in forms}) > 1:
        copies = [
            view
            if form.height == 1
            else copied(graph, argument, view, lambda factor, _: factor.axis)
            for argument, view, form in zip(pair, views, forms, strict=True)
        ]
        views = [view for view in copies if view is not None]
    return views if len(views) == 2 and _same_order(*views) else None


def _same_order(first: View, second: View) -> bool:
    return first.dimensions == second.dimensions and first.leading == second.leading


class _PairCall:
    """A sum or a product in PyTorch, with the node's current activation."""

    def __init__(self, node: Combine) -> None:
        self.node = node

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        combined = torch.mul(x, y) if self.node.product else torch.add(x, y)
        return apply_activation_(combined, self.node.activation)


def _fused_residual(graph: Graph, node: fx.Node, result: View, residual: View) -> Built:
    """Add a residual to the layer that computes the other term, if nothing else reads that."""
    layer = _layer_of(graph, result)
    if (
        not isinstance(layer, Convolution)
        or not layer.views
        or result.root == residual.root
        or not layer.activation.is_identity
        or len(layer.inputs) > 1
    ):
        return None
    layer.inputs = (*layer.inputs, residual.root)
    layer.input_forms = (*layer.input_forms, graph.form_of_root(residual))
    layer.views = (*layer.views, residual)
    return fuse(graph, node, layer, result)
