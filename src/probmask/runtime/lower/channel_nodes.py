"""Nodes that treat channels, or groups of them, in their own way.

These are products with one number per channel (squeeze and excitation), PReLU, GroupNorm,
InstanceNorm, and the softmax over channels.
"""

from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from probmask.runtime.lower.copy_nodes import planes
from probmask.runtime.lower.graph import (
    Built,
    Graph,
    arguments_of,
    image_form,
    label_of,
    trailing_shape,
    whole_view,
)
from probmask.runtime.lower.image_inputs import ImageInput, image_input
from probmask.runtime.lower.nodes import (
    Activate,
    Broadcast,
    Form,
    NormalizeGroups,
    Softmax,
    unset_call,
)
from probmask.runtime.lower.pytorch_calls import OnRows, OnViews
from probmask.runtime.lower.token_nodes import form_like
from probmask.runtime.lower.view_nodes import add_result
from probmask.runtime.lower.views import Axis


def build_channel_sum(graph: Graph, node: fx.Node) -> Built:
    """Build a sum of an image and one number per channel."""
    return _broadcast(graph, node, product=False) if arguments_of(node)["alpha"] == 1 else None


def build_channel_product(graph: Graph, node: fx.Node) -> Built:
    """Build a product of an image and one number per channel."""
    return _broadcast(graph, node, product=True)


def _broadcast(graph: Graph, node: fx.Node, *, product: bool) -> Built:
    rank = node.meta["val"].dim() - 2 if isinstance(node.meta["val"], Tensor) else 0
    form = image_form(node.meta["val"], rank) if rank in (1, 2) else None
    first, second = node.args[:2]
    if form is None or form.positions == 1 or not isinstance(second, fx.Node):
        return None
    single = Form(form.leading, form.channels)
    for x, other in ((first, second), (second, first)):
        forms = [_form_of(argument, rank) for argument in (x, other)]
        if forms != [form, single] or graph.constant(other) is not None:
            continue
        view = graph.view_of(x)
        if view is None or graph.form_of(view.root) is None or not view.has_image_axes():
            continue
        reads = [image_input(graph, argument, rank) for argument in (x, other)]
        return _combined(node, form, reads, product=product)
    return None


def _form_of(argument: Any, rank: int) -> Form | None:
    return image_form(argument.meta["val"], rank) if isinstance(argument, fx.Node) else None


def _combined(node: fx.Node, form: Form, reads: list[ImageInput | None], *, product: bool) -> Built:
    known = [read for read in reads if read is not None]
    if len(known) < 2:
        return None
    made = Broadcast(
        node.name,
        tuple(read.name for read in known),
        unset_call,
        label_of(node),
        form=form,
        input_forms=tuple(read.form for read in known),
        views=tuple(next(iter(r.views), whole_view(r.name, r.form)) for r in known),
        trailing=trailing_shape(node, form),
        product=product,
    )
    made.call = OnViews(made, _BroadcastCall(made))
    return made


class _BroadcastCall:
    """A sum or a product with one number per channel, in PyTorch."""

    def __init__(self, node: Broadcast) -> None:
        self.node = node

    def __call__(self, x: Tensor, numbers: Tensor) -> Tensor:
        shape = self.node.trailing
        x = x.reshape(len(x), *shape)
        numbers = numbers.reshape(len(x), shape[0], *(1,) * (len(shape) - 1))
        return x * numbers if self.node.product else x + numbers


def build_prelu(graph: Graph, node: fx.Node) -> Built:
    """Build PReLU with a constant slope for each channel of an image."""
    x, slopes = node.args[0], graph.constant(node.args[1])
    rank = node.meta["val"].dim() - 2
    read = image_input(graph, x, rank) if 0 <= rank <= 3 else None
    form = image_form(node.meta["val"], rank) if 0 <= rank <= 3 else None
    if slopes is None or read is None or form is None or graph.form_of(read.name) is None:
        return None
    slices = form.channels // int(node.meta["val"].shape[1])
    array = np.repeat(slopes.float().numpy().reshape(-1), slices if slopes.numel() > 1 else 1)
    made = Activate(
        node.name,
        (read.name,),
        graph.eager(node, "").call,
        label_of(node),
        form=form,
        input_forms=(read.form,),
        views=read.views,
        trailing=trailing_shape(node, form),
        slopes=np.broadcast_to(array, form.channels).copy(),
    )
    if read.views:
        made.call = OnViews(made, made.call)
    return made if np.isfinite(array).all() else None


def build_group_norm(graph: Graph, node: fx.Node) -> Built:
    """Build GroupNorm of images."""
    arguments = arguments_of(node)
    parameters = (arguments["weight"], arguments["bias"])
    return _normalized(graph, node, arguments["num_groups"], parameters, arguments["eps"])


def build_instance_norm(graph: Graph, node: fx.Node) -> Built:
    """Build InstanceNorm that uses the statistics of its input: each channel is a group."""
    arguments = arguments_of(node)
    if not arguments["use_input_stats"]:
        return None
    parameters = (arguments["weight"], arguments["bias"])
    channels = int(node.meta["val"].shape[1])
    return _normalized(graph, node, channels, parameters, arguments["eps"])


def _normalized(
    graph: Graph, node: fx.Node, groups: int, parameters: tuple[Any, Any], epsilon: float
) -> Built:
    rank = node.meta["val"].dim() - 2
    known = [graph.constant(part) for part in parameters]
    missing = any(p is not None and k is None for p, k in zip(parameters, known, strict=True))
    if rank not in (1, 2, 3) or missing:
        return None
    read = image_input(graph, node.args[0], rank)
    form = image_form(node.meta["val"], rank)
    if read is None or form is None:
        return None
    slices = form.channels // int(node.meta["val"].shape[1])
    scale, bias = (
        np.full(form.channels, default, np.float32)
        if part is None
        else np.repeat(part.float().numpy(), slices)
        for part, default in zip(known, (1.0, 0.0), strict=True)
    )
    if not np.isfinite(scale).all() or not np.isfinite(bias).all():
        return None
    made = NormalizeGroups(
        node.name,
        (read.name,),
        graph.eager(node, "").call,
        label_of(node),
        form=form,
        input_forms=(read.form,),
        views=read.views,
        trailing=trailing_shape(node, form),
        groups=groups,
        scale=scale,
        bias=bias,
        epsilon=float(epsilon),
    )
    if read.views:
        made.call = OnViews(made, made.call)
    return made


def build_softmax(graph: Graph, node: fx.Node) -> Built:
    """Build the softmax over all channels of each position."""
    arguments = arguments_of(node)
    view = planes(graph, arguments["self"])
    if view is None or arguments.get("dtype") is not None or graph.form_of(view.root) is None:
        return None
    dim = arguments["dim"] % len(view.dimensions)
    over = view.dimensions[dim]
    others = [f for i, d in enumerate(view.dimensions) if i != dim for f in d]
    if [f.axis for f in over] != [Axis.CHANNEL] or over[0].size != view.width():
        return None
    if any(factor.axis is Axis.CHANNEL for factor in others):
        return None
    form = graph.form_of_root(view)
    made = Softmax(
        node.name,
        (view.root,),
        unset_call,
        label_of(node),
        form=form_like(form, view.width()),
        input_forms=(form,),
        views=(view,),
    )
    made.call = OnRows(made, nn.Softmax(-1))
    return add_result(graph, node, made, view.with_root(view.root, view.width()))
