"""Nodes without weights: activations, sums, products, concatenation and reshapes.

Activations and sums become a part of the layer before them if nothing else reads its output.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx

from probmask.runtime.kernels.operation_table import Curve
from probmask.runtime.lower.graph import (
    Builder,
    Built,
    Graph,
    arguments_of,
    image_form_of_any_rank,
    label_of,
    size_of,
    trailing_shape,
)
from probmask.runtime.lower.nodes import (
    INFINITY,
    Activate,
    Activation,
    Combine,
    Concatenate,
    Convolution,
    Form,
    Node,
    Reshape,
    TransposedConvolution,
    unset_call,
)
from probmask.runtime.lower.pytorch_calls import apply_activation_

# Returns the activation that an operation applies, or None if no kernel can.
ActivationOf = Callable[[fx.Node], Activation | None]


def build_activation(activation_of: ActivationOf) -> Builder:
    """Return a builder of an activation function."""

    def build(graph: Graph, node: fx.Node) -> Built:
        activation = activation_of(node)
        return None if activation is None else _add_activation(graph, node, activation)

    return build


def hardtanh(node: fx.Node) -> Activation | None:
    """Return a clamp that maps 0 to 0. Other clamps have no kernel."""
    arguments = arguments_of(node)
    low, high = float(arguments["min_val"]), float(arguments["max_val"])
    return Activation(low, high) if low <= 0 <= high else None


def clamp(node: fx.Node) -> Activation | None:
    """Return a clamp that maps 0 to 0, with two bounds, one or none."""
    arguments = arguments_of(node)
    low, high = (arguments.get(key) for key in ("min", "max"))
    low, high = -INFINITY if low is None else low, INFINITY if high is None else high
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    return Activation(float(low), float(high)) if low <= 0 <= high else None


def leaky_relu(node: fx.Node) -> Activation:
    """Return LeakyReLU."""
    slope = float(arguments_of(node)["negative_slope"])
    return Activation(curve=Curve.LEAKY, negative=slope)


def elu(node: fx.Node) -> Activation | None:
    """Return ELU, or None if its input has a factor of its own."""
    arguments = arguments_of(node)
    if arguments["input_scale"] != 1:
        return None
    scale = float(arguments["scale"])
    return Activation(curve=Curve.ELU, positive=scale, negative=scale * float(arguments["alpha"]))


def gelu(node: fx.Node) -> Activation:
    """Return GELU, exact or approximated by tanh."""
    tanh = arguments_of(node)["approximate"] == "tanh"
    return Activation(curve=Curve.GELU_TANH if tanh else Curve.GELU)


def _add_activation(graph: Graph, node: fx.Node, activation: Activation) -> Built:
    source = graph.source(node.args[0])
    layer = graph.nodes.get(source)
    if layer is not None and layer.views:  # build_token_activation keeps its views
        return None
    if (
        isinstance(layer, Convolution | TransposedConvolution | Combine)
        and graph.used_once(source)
        and layer.activation.is_identity
        and (not isinstance(layer, Combine) or activation.curve is Curve.NONE)
    ):
        layer.activation = activation  # its call reads it
        graph.rename(layer, node.name)
        return True
    form = graph.form_of(source)
    if form is None or form.tokens:
        return None
    return Activate(
        node.name,
        (source,),
        partial(_activated, activation=activation),
        label_of(node),
        form=form,
        input_forms=(form,),
        trailing=trailing_shape(node, form),
        activation=activation,
    )


def _activated(x: Tensor, activation: Activation) -> Tensor:
    return apply_activation_(x.clone(), activation)


def build_add(graph: Graph, node: fx.Node) -> Built:
    """Build a sum of two tensors, as the residual of the layer that computes one if possible."""
    pair = _names_of_same_form(graph, node) if arguments_of(node)["alpha"] == 1 else None
    if pair is None:
        return None
    for result, residual in (pair[::-1], pair):
        layer = graph.nodes.get(result)
        if (
            isinstance(layer, Convolution)
            and not layer.views
            and result != residual
            and graph.used_once(result)
            and layer.activation.is_identity
            and len(layer.inputs) == 1
        ):
            assert layer.form is not None
            layer.inputs = (*layer.inputs, residual)
            layer.input_forms = (*layer.input_forms, layer.form)
            graph.rename(layer, node.name)
            return True
    return _combine(graph, node, pair, product=False)


def build_multiply(graph: Graph, node: fx.Node) -> Built:
    """Build a product of two tensors of the same form."""
    pair = _names_of_same_form(graph, node)
    return None if pair is None else _combine(graph, node, pair, product=True)


def _names_of_same_form(graph: Graph, node: fx.Node) -> tuple[str, str] | None:
    """Return the names of two tensors of the same form, or None.

    A tensor from PyTorch has no form of its own and takes the other's.
    """
    first, second = node.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    values = [argument.meta["val"] for argument in (first, second)]
    if not all(isinstance(v, Tensor) and v.dtype == torch.float32 for v in values):
        return None
    # Sizes that may vary are compared by name: their values in the example may be equal by chance.
    if len({tuple(map(str, value.shape)) for value in values}) > 1:
        return None
    names = graph.source(first), graph.source(second)
    if any(name in graph.constants for name in names):
        return None
    forms = {form for form in map(graph.form_of, names) if form is not None}
    tokens = any(form.tokens for form in forms)
    views = any(_reads_view(graph, argument) for argument in (first, second))
    return names if len(forms) == 1 and not tokens and not views else None


def _reads_view(graph: Graph, argument: fx.Node) -> bool:
    """Return whether the value is a view of a tensor on the kernels, or a layer reads one.

    `build_token_add` adds residuals to such layers.
    """
    name = graph.source(argument)
    layer = graph.nodes.get(name)
    if layer is not None and layer.form is not None:
        return isinstance(layer, Convolution) and bool(layer.views)
    view = graph.view_of(argument)
    return view is not None and graph.form_of(view.root) is not None


def _combine(graph: Graph, node: fx.Node, pair: tuple[str, str], *, product: bool) -> Node:
    form = graph.form_of(pair[0]) or graph.form_of(pair[1])
    assert form is not None
    combined = Combine(
        node.name,
        pair,
        unset_call,
        label_of(node),
        form=form,
        input_forms=(form, form),
        trailing=trailing_shape(node, form),
        product=product,
    )
    combined.call = _CombineCall(combined)
    return combined


class _CombineCall:
    """A sum or a product in PyTorch, with the node's current activation."""

    def __init__(self, node: Combine) -> None:
        self.node = node

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        combined = torch.mul(x, y) if self.node.product else torch.add(x, y)
        return apply_activation_(combined, self.node.activation)


def build_concatenation(graph: Graph, node: fx.Node) -> Built:
    """Build a concatenation of channels."""
    arguments = arguments_of(node)
    value = node.meta["val"]
    if arguments["dim"] not in (1, 1 - value.dim()):
        return None
    names = [graph.source(part) for part in arguments["tensors"]]
    forms = [graph.form_of(name) for name in names]
    form = image_form_of_any_rank(value)
    if form is None or any(o is None or o.flat or o.tokens for o in forms):
        return None
    known = [other for other in forms if other is not None]
    if any(
        (f.leading, f.height, f.width) != (form.leading, form.height, form.width) for f in known
    ):
        return None
    return Concatenate(
        node.name,
        tuple(names),
        _concatenated,
        label_of(node),
        form=form,
        input_forms=tuple(known),
        trailing=trailing_shape(node, form),
    )


def _concatenated(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors, 1)


def build_reshape(graph: Graph, node: fx.Node) -> Built:
    """Build a flattening, or a reshape that adds or drops dimensions of size 1."""
    source = graph.source(node.args[0])
    before = graph.form_of(source)
    value = node.meta["val"]
    if before is None or before.tokens or len(before.leading) != 1 or not value.dim():
        return None
    if str(value.shape[0]) != before.leading[0]:
        return None
    shape = tuple(map(size_of, value.shape[1:]))
    if shape == (before.size,):
        form = Form(
            before.leading, before.channels, before.height, before.width, flat=before.positions > 1
        )
    elif before.positions == 1 and shape in ((before.channels, 1, 1), (before.channels, 1)):
        form = before
    else:
        return None
    return Reshape(
        node.name,
        (source,),
        partial(_reshaped, shape=shape),
        label_of(node),
        form=form,
        input_forms=(before,),
        trailing=trailing_shape(node, form),
    )


def _reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(len(x), *shape)


def build_identity(graph: Graph, node: fx.Node) -> Built:
    """Register an alias for an operation that returns its input, or a copy of it."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dropout = node.target is torch.ops.aten.dropout.default
    if x.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if dropout and arguments_of(node)["train"]:
        return None
    # A copy of a tensor from PyTorch may be needed for its strides.
    if not dropout and graph.form_of(graph.source(x)) is None:
        return None
    graph.aliases[node.name] = graph.source(x)
    return True
