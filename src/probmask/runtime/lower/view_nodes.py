"""Operations that only move elements: views, and copies where a kernel needs another order.

A view costs nothing on the kernels: the operations that read it read its root instead. PyTorch's
own operation is also added as a node; it is dropped if nothing in PyTorch reads it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from probmask.runtime.lower.copy_nodes import readable
from probmask.runtime.lower.graph import (
    Built,
    Graph,
    arguments_of,
    image_form_of_any_rank,
    label_of,
)
from probmask.runtime.lower.nodes import Embed, Fallback, Node
from probmask.runtime.lower.pytorch_calls import OnRows, ViewCall
from probmask.runtime.lower.views import VARYING, View, concrete

Move = Callable[[View, dict[str, Any], tuple[int, ...]], View | None]


def build_move(move: Move, *, of_images: bool = False) -> Callable[[Graph, fx.Node], Built]:
    """Return a builder of an operation that only moves elements, perhaps those of images."""
    view_of = readable if of_images else Graph.view_of

    def build(graph: Graph, node: fx.Node) -> Built:
        value = node.meta["val"]
        view = view_of(graph, node.args[0]) if isinstance(value, Tensor) else None
        if view is not None and value.dtype == torch.float32:
            moved = move(view, arguments_of(node), tuple(concrete(size) for size in value.shape))
            if moved is not None:
                graph.views[node.name] = moved
                graph.moves.add(node.name)
        return None

    return build


def reshape(view: View, _: dict[str, Any], shape: tuple[int, ...]) -> View | None:
    """Move the elements of a reshape; also of squeezes and flattening."""
    return view.reshaped(shape)


def transpose(view: View, arguments: dict[str, Any], _: tuple[int, ...]) -> View:
    """Swap two dimensions."""
    order = list(range(len(view.dimensions)))
    first, second = arguments.get("dim0", 0), arguments.get("dim1", 1)
    order[first], order[second] = order[second], order[first]
    return view.permuted(order)


def permute(view: View, arguments: dict[str, Any], _: tuple[int, ...]) -> View:
    """Reorder dimensions."""
    return view.permuted([dim % len(view.dimensions) for dim in arguments["dims"]])


def keep(view: View, _: dict[str, Any], __: tuple[int, ...]) -> View:
    """Return the elements as they are: copies, dropout in evaluation."""
    return view


def drop_nothing(view: View, arguments: dict[str, Any], _: tuple[int, ...]) -> View | None:
    """Return the elements of a dropout that is not in training."""
    return None if arguments["train"] else view


def select(view: View, arguments: dict[str, Any], _: tuple[int, ...]) -> View | None:
    """Select one index of a dimension."""
    index = arguments["index"]
    dim = arguments["dim"] % len(view.dimensions)
    return view.selected(dim, index) if isinstance(index, int) else None


def narrow(view: View, arguments: dict[str, Any], shape: tuple[int, ...]) -> View | None:
    """Take a part of a dimension."""
    dim = arguments["dim"] % len(view.dimensions)
    start, step = arguments["start"] or 0, arguments["step"]
    if not isinstance(start, int) or not shape[dim]:
        return None
    size = view.shape[dim]
    start = min(max(start + size, 0) if start < 0 else start, size)
    return view.sliced(dim, start, shape[dim], step)


def expand(view: View, _: dict[str, Any], shape: tuple[int, ...]) -> View | None:
    """Repeat dimensions of size 1, but not along the batch."""
    expanded = view.expanded(shape)
    return expanded if expanded.has_batch() else None


def repeat(view: View, arguments: dict[str, Any], _: tuple[int, ...]) -> View | None:
    """Repeat each element of a dimension, as grouped heads do."""
    dim, repeats = arguments["dim"], arguments["repeats"]
    return view.repeated(dim % len(view.dimensions), repeats) if isinstance(dim, int) else None


def build_part(graph: Graph, node: fx.Node) -> Built:
    """Register the view of one output of a split, a chunk or an unbind."""
    whole, index = node.args
    if not isinstance(whole, fx.Node) or whole.target not in _SPLITS:
        return None
    view, arguments = graph.view_of(whole.args[0]), arguments_of(whole)
    if view is None or not isinstance(index, int):
        return None
    dim = arguments["dim"] % len(view.dimensions)
    parts = whole.meta["val"]
    if whole.target is torch.ops.aten.unbind.int:
        part = view.selected(dim, index)
    else:
        sizes = [concrete(value.shape[dim]) for value in parts]
        part = view.sliced(dim, sum(sizes[:index]), sizes[index])
    if part is not None:
        graph.views[node.name] = part
        graph.moves |= {node.name, whole.name}
    return None


_SPLITS = (
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.chunk.default,
    torch.ops.aten.unbind.int,
)


def build_expansion(graph: Graph, node: fx.Node) -> Built:
    """Register an expansion: of a constant over the batch, or of a view."""
    constant = graph.shared_constant(node.args[0])
    if constant is None:
        return build_move(expand)(graph, node)
    sizes = [1 if not str(size).isdecimal() else int(size) for size in node.meta["val"].shape]
    try:
        graph.shared[node.name] = constant.expand(sizes)
    except RuntimeError:  # a size that may vary is not that of the batch
        return None
    return None


def build_filled(graph: Graph, node: fx.Node) -> Built:
    """Register a tensor that has one number everywhere, such as zeros for each image."""
    number = _NUMBERS.get(node.target, arguments_of(node).get("fill_value"))
    value = node.meta["val"]
    sizes = [concrete(size) for size in value.shape]
    if not isinstance(number, int | float) or any(size > VARYING for size in sizes):
        return None
    shape = [1 if size == VARYING else size for size in sizes]
    graph.shared[node.name] = torch.full(shape, number, dtype=value.dtype)
    return None


_aten = torch.ops.aten
_NUMBERS: dict[Any, int] = {
    _aten.zeros.default: 0,
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones.default: 1,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}
# Operations that fill a new tensor with one number.
FILLS = (*_NUMBERS, _aten.full.default, _aten.full_like.default, _aten.new_full.default)


def build_embedding(graph: Graph, node: fx.Node) -> Built:
    """Build an embedding; that of constant indices, such as positions, is a constant."""
    weight, indices = node.args[:2]
    table = graph.constant(weight)
    if table is None or not isinstance(indices, fx.Node):
        return None
    if indices.name in graph.shared:
        graph.shared[node.name] = table[graph.shared[indices.name]]
        return None
    if table.dtype != torch.float32:
        return None
    return Embed(
        node.name,
        (graph.source(indices),),
        graph.eager(node, "").call,
        label_of(node),
        trailing=trailing_of(node),
        reason="a lookup",
        table=table.numpy().copy(),
    )


def add_result(graph: Graph, node: fx.Node, made: Node, view: View) -> Built:
    """Add a node whose output is a value of the program, in the order of a new root.

    If the value has another order, PyTorch can still get it, from a view.
    """
    view = _ordered(node, made, view)
    made.name = view.root
    return _register(graph, node, made, view)


def fuse(graph: Graph, node: fx.Node, layer: Node, view: View) -> Built:
    """Let a layer also compute an operation, and hold its result in the order of a root."""
    view = (_ordered if isinstance(layer.call, OnRows) else _kept)(node, layer, view)
    graph.rename(layer, view.root)
    built = _register(graph, node, layer, view)
    return True if built is layer else built


def _ordered(node: fx.Node, made: Node, view: View) -> View:
    """Set the form and the shape of a node's output; return the view of it.

    The output has the order of the value if that is an image's, or that of tokens.
    """
    assert made.form is not None
    image = replace(made.form, tokens=False)
    if view.is_image() and image == image_form_of_any_rank(node.meta["val"]):
        made.form, made.trailing = image, trailing_of(node)
        return replace(view, root=node.name, tokens=False)
    if image.positions > 1:
        made.form = replace(made.form, tokens=True)
    canonical = view.is_canonical()
    made.trailing = trailing_of(node) if canonical else _rows_shape(view)
    name = node.name if canonical else f"{node.name}_rows"
    return replace(view, root=name, tokens=image.positions > 1)


def _kept(node: fx.Node, layer: Node, view: View) -> View:
    """Return the view of a layer's output that stays in the order that its call returns."""
    assert layer.form is not None
    name = f"{node.name}_rows"
    if view.is_image() and layer.form == image_form_of_any_rank(node.meta["val"]):
        name, layer.trailing = node.name, trailing_of(node)
    return replace(view, root=name, tokens=layer.form.tokens)


def _register(graph: Graph, node: fx.Node, made: Node, view: View) -> Built:
    graph.views[node.name] = view
    graph.values[made.name] = node.name
    if made.name == node.name:
        return made
    graph.nodes[made.name] = made
    return Fallback(
        node.name, (made.name,), ViewCall(view), label_of(node), reason="a view", moved=view
    )


def trailing_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a value without its batch."""
    return tuple(int(size) for size in node.meta["val"].shape[1:])


def _rows_shape(view: View) -> tuple[int, ...]:
    return (view.positions, view.channels) if view.positions > 1 else (view.channels,)
