"""Operations that only move elements and are left over: outputs, and what runs without PyTorch.

A kernel that reads a view reads its root instead. So such an operation is needed only if its result
is an output, or if something outside of the kernels reads it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from probmask.runtime.lower.copy_loops import parts_of
from probmask.runtime.lower.copy_nodes import new_root, rearranged
from probmask.runtime.lower.graph import Graph
from probmask.runtime.lower.nodes import Fallback, Form, Move, Network, Node, Reshape
from probmask.runtime.lower.pytorch_calls import ViewCall, contiguous_view
from probmask.runtime.lower.views import Axis, View


def output_node(graph: Graph, node: Fallback) -> Node:
    """Return the node of an output that is a view: on the kernels if they compute its root.

    The kernels write an output image by image, so its batch has to be its first dimension.
    """
    view = node.moved
    assert view is not None
    form = graph.form_of(view.root)
    made = None
    if form is not None and view.has_batch_first() and view.has_batch():
        made = _same_order(node, view, form) if view.is_in_order() else _copy(node, view, form)
    return _move(node, view) if made is None else made


def _same_order(node: Fallback, view: View, form: Form) -> Node:
    """Return a node that gives the root's tensor another shape, without a copy."""
    shape = view.shape[1:]
    return Reshape(
        node.name,
        (view.root,),
        partial(_reshaped, shape=shape),
        node.label,
        form=form,
        input_forms=(form,),
        trailing=shape,
    )


def _reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(len(x), *shape)


def _copy(node: Fallback, view: View, form: Form) -> Node | None:
    """Return a node that copies the elements in the order of the output."""
    factors = [factor.axis for factor in view.factors if factor.axis is not Axis.BATCH]
    axes = _output_axes(factors)
    batch = [factor.axis for factor in view.factors if factor.axis is Axis.BATCH]
    channels_last = axes[:1] == [Axis.POSITION]
    target = replace(new_root(view, [*batch, *axes], node.name), tokens=channels_last)
    parts = parts_of(view, target, form)
    if parts is None:
        return None
    return rearranged(
        node.name,
        parts,
        [form] * len(parts),
        partial(contiguous_view, view=view),
        node.label,
        form=Form(form.leading, target.channels, 1, target.positions, tokens=channels_last),
        trailing=view.shape[1:],
    )


def _output_axes(axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes of a new root in the order of an output, as close to its source's as can be.

    Either channels come first, as in images, or last, as in tokens.
    """
    if axes and axes[0] is Axis.CHANNEL:
        first = next((i for i, axis in enumerate(axes) if axis is not Axis.CHANNEL), len(axes))
        return [Axis.CHANNEL] * first + [Axis.POSITION] * (len(axes) - first)
    last = next((i for i, axis in enumerate(axes[::-1]) if axis is not Axis.CHANNEL), len(axes))
    last = max(last, min(1, len(axes)))
    return [Axis.POSITION] * (len(axes) - last) + [Axis.CHANNEL] * last


def without_pytorch(network: Network) -> Network:
    """Return the network with nodes that NumPy and C can run for those that only move elements."""
    nodes = [
        _move(node, node.moved) if isinstance(node, Fallback) and node.moved is not None else node
        for node in network.nodes
    ]
    return replace(network, nodes=needed_nodes(nodes, network.outputs))


def _move(node: Fallback, view: View) -> Move:
    return Move(node.name, (view.root,), ViewCall(view), node.label, reason=node.reason, view=view)


def needed_nodes(nodes: list[Node], outputs: Iterable[str]) -> list[Node]:
    """Return the nodes that the outputs depend on, in order."""
    read, needed = set(outputs), []
    for node in reversed(nodes):
        if node.name in read:
            needed.append(node)
            read.update(node.inputs)
    return needed[::-1]
