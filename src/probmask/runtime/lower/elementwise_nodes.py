"""Activations, sums and products: part of the layer before them where they can be."""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from probmask.runtime.kernels.operation_table import Curve
from probmask.runtime.lower.exported_program import size_of
from probmask.runtime.lower.graph import (
    Builder,
    Built,
    Graph,
    arguments_of,
    label_of,
    plain_of_any_rank,
    tail,
)
from probmask.runtime.lower.nodes import (
    Activate,
    Clamp,
    Combine,
    Concatenate,
    Convolution,
    Form,
    Node,
    Reshape,
    apply_,
    undefined,
)


def build_activation(after: Clamp) -> Builder:
    """A builder of one activation function."""

    def build(graph: Graph, node: fx.Node) -> Built:
        return _activated(graph, node, Clamp(after.low, after.high, after.curve))

    return build


def build_hardtanh(graph: Graph, node: fx.Node) -> Built:
    """A clamp that maps 0 to 0; others have no kernel."""
    arguments = arguments_of(node)
    low, high = float(arguments["min_val"]), float(arguments["max_val"])
    return _activated(graph, node, Clamp(low, high)) if low <= 0 <= high else None


def build_gelu(graph: Graph, node: fx.Node) -> Built:
    """GELU, exact or by tanh."""
    tanh = arguments_of(node)["approximate"] == "tanh"
    return _activated(graph, node, Clamp(curve=Curve.GELU_TANH if tanh else Curve.GELU))


def _activated(graph: Graph, node: fx.Node, after: Clamp) -> Built:
    source = graph.source(node.args[0])
    layer = graph.nodes.get(source)
    if (
        isinstance(layer, Convolution | Combine)
        and graph.used_once(source)
        and layer.after.is_nothing
        and (isinstance(layer, Convolution) or after.curve is Curve.NONE)
    ):
        layer.after = after  # its call looks there
        graph.rename(layer, node.name)
        return True
    form = graph.form_of(source)
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


def build_add(graph: Graph, node: fx.Node) -> Built:
    """A sum of two tensors of one form, added by the layer that computes one of them if it can."""
    pair = _same_forms(graph, node) if arguments_of(node)["alpha"] == 1 else None
    if pair is None:
        return None
    for own, other in (pair[::-1], pair):
        layer = graph.nodes.get(own)
        if (
            isinstance(layer, Convolution)
            and own != other
            and graph.used_once(own)
            and layer.after.is_nothing
            and len(layer.inputs) == 1
        ):
            assert layer.form is not None
            layer.inputs = (*layer.inputs, other)
            layer.input_forms = (*layer.input_forms, layer.form)
            graph.rename(layer, node.name)
            return True
    return _combine(graph, node, pair, product=False)


def build_multiply(graph: Graph, node: fx.Node) -> Built:
    """A product of two tensors of one form."""
    pair = _same_forms(graph, node)
    return None if pair is None else _combine(graph, node, pair, product=True)


def _same_forms(graph: Graph, node: fx.Node) -> tuple[str, str] | None:
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
    names = graph.source(first), graph.source(second)
    if any(name in graph.constants for name in names):
        return None
    forms = {form for form in map(graph.form_of, names) if form is not None}
    return names if len(forms) == 1 else None


def _combine(graph: Graph, node: fx.Node, pair: tuple[str, str], *, product: bool) -> Node:
    form = graph.form_of(pair[0]) or graph.form_of(pair[1])
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


def build_concatenation(graph: Graph, node: fx.Node) -> Built:
    """Channels of tensors that are otherwise of one form."""
    arguments = arguments_of(node)
    value = node.meta["val"]
    if arguments["dim"] not in (1, 1 - value.dim()):
        return None
    names = [graph.source(part) for part in arguments["tensors"]]
    forms = [graph.form_of(name) for name in names]
    form = plain_of_any_rank(value)
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
        tail=tail(node, form),
    )


def build_reshape(graph: Graph, node: fx.Node) -> Built:
    """Channels, rows and columns made one dimension, or a dimension of one position dropped."""
    source = graph.source(node.args[0])
    before = graph.form_of(source)
    value = node.meta["val"]
    if before is None or len(before.unit) != 1 or not value.dim():
        return None
    if str(value.shape[0]) != before.unit[0]:
        return None
    shape = tuple(map(size_of, value.shape[1:]))
    if shape == (before.size,):
        form = Form(
            before.unit, before.channels, before.height, before.width, flat=before.positions > 1
        )
    elif before.positions == 1 and shape in ((before.channels, 1, 1), (before.channels, 1)):
        form = before
    else:
        return None
    return Reshape(
        node.name,
        (source,),
        lambda x: x.reshape(len(x), *shape),
        label_of(node),
        form=form,
        input_forms=(before,),
        tail=tail(node, form),
    )


def build_identity(graph: Graph, node: fx.Node) -> Built:
    """Another name for what it copies, or leaves as it is."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dropout = node.target is torch.ops.aten.dropout.default
    if x.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if dropout and arguments_of(node)["train"]:
        return None
    # A copy of what PyTorch computed may be there for its strides.
    if not dropout and graph.form_of(graph.source(x)) is None:
        return None
    graph.aliases[node.name] = graph.source(x)
    return True
