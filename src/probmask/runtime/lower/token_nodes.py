"""Nodes over tokens: linear layers, normalization, means.

Tokens are positions, features are channels. All operations read their inputs as views, so that the
reshapes and transposes between them cost nothing.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from probmask.runtime.lower.copy_nodes import rows
from probmask.runtime.lower.graph import Built, Graph, arguments_of, label_of
from probmask.runtime.lower.nodes import (
    Convolution,
    Form,
    Normalize,
    Pool,
    unset_call,
)
from probmask.runtime.lower.pytorch_calls import OnRows, pytorch_call
from probmask.runtime.lower.view_nodes import add_result
from probmask.runtime.lower.views import Axis, Factor, View, merged


def build_token_linear(graph: Graph, node: fx.Node, weight: Any, bias: Any, x: fx.Node) -> Built:
    """Build a linear layer over tokens, as a convolution of 1 × 1."""
    view = rows(graph, x)
    if view is None or view.width() != weight.shape[1]:
        return None
    form = graph.form_of_root(view)
    outputs = len(weight)
    layer = Convolution(
        node.name,
        (view.root,),
        unset_call,
        label_of(node),
        form=form_like(form, outputs),
        input_forms=(form,),
        weight=weight[:, :, None, None],
        bias=bias,
        rank=0,
        views=(view,),
    )
    layer.call = pytorch_call(layer)
    return add_result(graph, node, layer, _with_channels(view, outputs))


def form_like(form: Form, channels: int) -> Form:
    """Return the form of an output with the positions of an input."""
    return Form(form.leading, channels, form.height, form.width, tokens=form.positions > 1)


def _with_channels(view: View, channels: int) -> View:
    """Return the view with another number of channels in its last dimension, of a new root."""
    last = merged([Factor(channels, Axis.CHANNEL, 1)])
    return replace(view.with_root(view.root, channels), dimensions=(*view.dimensions[:-1], last))


def build_layer_norm(graph: Graph, node: fx.Node) -> Built:
    """Build LayerNorm over the last dimension."""
    arguments = arguments_of(node)
    return build_normalization(
        graph,
        node,
        arguments["input"],
        arguments["normalized_shape"],
        (arguments["weight"], arguments["bias"]),
        arguments["eps"],
        centered=True,
    )


def build_rms_norm(graph: Graph, node: fx.Node) -> Built:
    """Build RMSNorm over the last dimension."""
    arguments = arguments_of(node)
    epsilon = arguments["eps"]
    return build_normalization(
        graph,
        node,
        arguments["input"],
        arguments["normalized_shape"],
        (arguments["weight"], None),
        torch.finfo(torch.float32).eps if epsilon is None else epsilon,
        centered=False,
    )


def build_normalization(
    graph: Graph,
    node: fx.Node,
    x: Any,
    shape: list[int],
    parameters: tuple[Any, Any],
    epsilon: float,
    *,
    centered: bool,
) -> Built:
    """Build a normalization of x over its last dimension, with constant scale and bias."""
    known = [graph.constant(part) for part in parameters]
    missing = any(p is not None and k is None for p, k in zip(parameters, known, strict=True))
    if missing or len(shape) != 1:
        return None
    view = rows(graph, x)
    if view is None or view.width() != shape[0]:
        return None
    scale, bias = (
        np.full(shape[0], default, np.float32) if part is None else part.float().numpy().copy()
        for part, default in zip(known, (1.0, 0.0), strict=True)
    )
    if not np.isfinite(scale).all() or not np.isfinite(bias).all():
        return None
    form = graph.form_of_root(view)
    made = Normalize(
        node.name,
        (view.root,),
        unset_call,
        label_of(node),
        form=form_like(form, shape[0]),
        input_forms=(form,),
        views=(view,),
        scale=scale,
        bias=bias,
        epsilon=float(epsilon),
        centered=centered,
    )
    made.call = OnRows(made, _NormalizeCall(made))
    return add_result(graph, node, made, view.with_root(view.root, shape[0]))


class _NormalizeCall:
    """A normalization in PyTorch."""

    def __init__(self, node: Normalize) -> None:
        self.node = node
        self.scale, self.bias = torch.from_numpy(node.scale), torch.from_numpy(node.bias)

    def __call__(self, x: Tensor) -> Tensor:
        shape, epsilon = (x.shape[-1],), self.node.epsilon
        if self.node.centered:
            return nn.functional.layer_norm(x, shape, self.scale, self.bias, epsilon)
        return nn.functional.rms_norm(x, shape, self.scale, epsilon) + self.bias


def build_token_mean(graph: Graph, node: fx.Node) -> Built:
    """Build the mean over all tokens."""
    arguments = arguments_of(node)
    view = rows(graph, arguments["self"])
    if view is None or arguments["dtype"] is not None or view.positions == 1:
        return None
    dims = {dim % len(view.dimensions) for dim in arguments["dim"] or ()}
    over = {
        i
        for i, dimension in enumerate(view.dimensions)
        if any(factor.axis is Axis.POSITION for factor in dimension)
    }
    batch = {i for i, d in enumerate(view.dimensions) if any(f.axis is Axis.BATCH for f in d)}
    ones = {i for i, size in enumerate(view.shape) if size == 1}
    if not over <= dims or dims - over - ones or over & batch or dims & batch:
        return None
    width = view.width()
    form = graph.form_of_root(view)
    made = Pool(
        node.name,
        (view.root,),
        unset_call,
        label_of(node),
        form=Form(form.leading, width),
        input_forms=(form,),
        views=(view,),
        is_max=False,
        rows=((0, form.height),),
        columns=((0, form.width),),
        factors=np.full((1, 1), 1 / view.positions, np.float32),
    )
    made.call = OnRows(made, _mean)
    kept = [
        () if i in over else dimension
        for i, dimension in enumerate(view.dimensions)
        if i not in dims or arguments["keepdim"]
    ]
    result = replace(
        view.with_root(view.root, width), positions=1, dimensions=tuple(kept), tokens=False
    )
    return add_result(graph, node, made, result)


def _mean(x: Tensor) -> Tensor:
    return x.mean(1)
