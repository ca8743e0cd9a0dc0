"""Copies of views to new roots: where a kernel needs another order, and for concatenation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from probmask.runtime.lower.copy_loops import can_copy
from probmask.runtime.lower.graph import Built, Graph, arguments_of, label_of
from probmask.runtime.lower.nodes import Form, Part, Rearrange, unset_call
from probmask.runtime.lower.pytorch_calls import ViewCall, root_of
from probmask.runtime.lower.view_nodes import add_result
from probmask.runtime.lower.views import Axis, Dimension, Factor, View, concrete, merged


def planes(graph: Graph, argument: Any) -> View | None:
    """Return a value as a range of channels at all positions, by a copy if it is not one."""
    view = graph.view_of(argument)
    if view is None or not view.has_batch() or _is_ambiguous(graph, view):
        return None
    if view.is_whole():
        return view
    return copied(graph, argument, view, lambda factor, _: factor.axis)


def _is_ambiguous(graph: Graph, view: View) -> bool:
    """Return whether a tensor from PyTorch may as well be an image: it has not three dimensions."""
    return graph.form_of(view.root) is None and len(view.dimensions) != 3


def rows(graph: Graph, argument: Any) -> View | None:
    """Return a value whose last dimension is all of its channels, by a copy if it is not one."""
    view = graph.view_of(argument)
    if view is None or not view.has_batch():
        return None
    if view.is_whole() and view.has_channels_last():
        return view
    return copied(graph, argument, view, lambda _, last: Axis.CHANNEL if last else Axis.POSITION)


def heads(graph: Graph, argument: Any) -> View | None:
    """Return a value of … × positions × channels with all other dimensions over channels."""
    view = graph.view_of(argument)
    if view is None or not view.has_batch() or len(view.dimensions) < 3:
        return None
    *others, positions, channels = view.dimensions
    if (
        all(factor.axis is not Axis.POSITION for dimension in others for factor in dimension)
        and len(positions) == len(channels) == 1
        and (positions[0].axis, positions[0].step) == (Axis.POSITION, 1)
        and (channels[0].axis, channels[0].step) == (Axis.CHANNEL, 1)
    ):
        return view
    if any(factor.axis is Axis.BATCH for factor in (*positions, *channels)):
        return None
    dimension = len(others)
    return copied(
        graph,
        argument,
        view,
        lambda _, __, dim=dimension: Axis.CHANNEL,
        positions_at=dimension,
    )


def copied(
    graph: Graph,
    argument: fx.Node,
    view: View,
    axis_of: Callable[..., Axis],
    *,
    positions_at: int | None = None,
    suffix: str = "copy",
) -> View | None:
    """Add a node that copies a view to a new root, whose axes ``axis_of`` chooses."""
    axes = []
    for i, dimension in enumerate(view.dimensions):
        last = i == len(view.dimensions) - 1
        for factor in dimension:
            axis = axis_of(factor, last) if i != positions_at else Axis.POSITION
            axes.append(Axis.BATCH if factor.axis is Axis.BATCH else axis)
    target = new_root(view, axes, f"{argument.name}_{suffix}")
    part = Part(target, view)
    form = graph.form_of_root(view)
    if view.dimensions and _has_batch(view.dimensions[-1]):
        return None
    if not can_copy(part, form):
        return None
    node = Rearrange(
        target.root,
        (view.root,),
        _CopyCall(view, target),
        f"{argument.name} (copy)",
        form=form_of(target),
        input_forms=(form,),
        trailing=(target.positions, target.channels)
        if target.positions > 1
        else (target.channels,),
        views=(view,),
        parts=(part,),
    )
    graph.nodes[node.name] = node
    return replace(target, dimensions=tuple(merged(d) for d in target.dimensions))


def _has_batch(dimension: Sequence[Factor]) -> bool:
    return any(factor.axis is Axis.BATCH for factor in dimension)


def form_of(root: View) -> Form:
    """Return the form of a new root."""
    tokens = root.positions > 1
    return Form((root.leading,), root.channels, 1, root.positions, tokens=tokens)


def new_root(view: View, axes: Sequence[Axis], name: str) -> View:
    """Return the view of a new root with the same factors, each along the given axis."""
    steps = {Axis.CHANNEL: 1, Axis.POSITION: 1, Axis.BATCH: 1}
    factors = []
    for factor, axis in reversed(list(zip(view.factors, axes, strict=True))):
        factors.append(Factor(factor.size, axis, steps[axis]))
        steps[axis] *= factor.size
    dimensions = [tuple(factors.pop() for _ in dimension) for dimension in view.dimensions]
    return View(
        name,
        steps[Axis.CHANNEL],
        steps[Axis.POSITION],
        view.leading,
        steps[Axis.POSITION] > 1,
        tuple(dimensions),
    )


class _CopyCall:
    """A copy in PyTorch: a view, in the order of the new root."""

    def __init__(self, source: View, target: View) -> None:
        self.source, self.target = source, target

    def __call__(self, x: Tensor) -> Tensor:
        found = root_of(self.target, ViewCall(self.source)(x))
        return found if self.target.positions > 1 else found.reshape(len(x), self.target.channels)


def build_concatenated_rows(graph: Graph, node: fx.Node) -> Built:
    """Build a concatenation along any dimension but the batch; parts may be constant."""
    arguments = arguments_of(node)
    return _joined(graph, node, list(arguments["tensors"]), arguments["dim"])


def build_padding(graph: Graph, node: fx.Node) -> Built:
    """Build padding of one dimension by a constant number."""
    arguments = arguments_of(node)
    x, pad = arguments["self"], list(arguments["pad"])
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    padded = [i for i, pair in enumerate(pairs) if pair != (0, 0)]
    value = x.meta["val"]
    if len(padded) != 1 or not isinstance(value, Tensor) or min(pairs[padded[0]]) < 0:
        return None
    dim = value.dim() - 1 - padded[0]
    shape = [1 if not str(size).isdecimal() else int(size) for size in value.shape]
    edges = [
        torch.full([*shape[:dim], n, *shape[dim + 1 :]], float(arguments["value"]))
        for n in pairs[padded[0]]
    ]
    parts = [edges[0], x, edges[1]]
    return _joined(graph, node, [p for p in parts if not isinstance(p, Tensor) or p.numel()], dim)


def _joined(graph: Graph, node: fx.Node, parts: list[Any], dim: int) -> Built:
    views = [None if isinstance(part, Tensor) else graph.view_of(part) for part in parts]
    known = [view for view in views if view is not None]
    shape = [concrete(size) for size in node.meta["val"].shape]
    dim %= len(shape)
    if not known or any(not view.has_batch() for view in known):
        return None
    if all(_is_ambiguous(graph, view) for view in known):
        return None
    batches = {i for view in known for i, d in enumerate(view.dimensions) if _has_batch(d)}
    leadings = {view.leading for view in known}
    if len(batches | {dim}) != len(batches) + 1 or len(batches) > 1 or len(leadings) > 1:
        return None
    target = _joined_root(node, shape, known[0], batches)
    if target is None:
        return None
    made: list[Part] = []
    start = 0
    for part, view in zip(parts, views, strict=True):
        constant = part if isinstance(part, Tensor) else graph.shared_constant(part)
        place = _place(target, dim, start)
        if view is not None:
            inner = Part(_like(place, view), view)
            if not can_copy(inner, graph.form_of_root(view)):
                return None
            start += view.shape[dim]
        elif constant is not None and constant.dtype == torch.float32:
            size = constant.shape[dim]
            sizes = [size if i == dim else 1 if i in batches else n for i, n in enumerate(shape)]
            single = of_one_image(constant, sizes)
            if single is None:
                return None
            array = single.contiguous().numpy().copy()
            inner = Part(_constant_place(place, dim, size), None, array)
            start += size
        else:
            return None
        made.append(inner)
    forms = tuple(graph.form_of_root(view) for view in known)
    joined = Rearrange(
        node.name,
        tuple(view.root for view in known),
        unset_call,
        label_of(node),
        form=form_of(target),
        input_forms=forms,
        views=tuple(known),
        parts=tuple(made),
    )
    joined.call = _JoinCall(joined, dim, target)
    return add_result(graph, node, joined, target)


def of_one_image(constant: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Expand a constant to the shape of one image; None if it differs between images."""
    missing = len(shape) - constant.dim()
    for dim, size in enumerate(shape[max(0, missing) :]):
        if size == 1 < constant.shape[dim]:
            first = constant.narrow(dim, 0, 1)
            if not torch.equal(constant, first.expand_as(constant)):
                return None
            constant = first
    try:
        return constant.expand(shape)
    except RuntimeError:
        return None


def _joined_root(node: fx.Node, shape: list[int], view: View, batches: set[int]) -> View | None:
    """Return the new root of a concatenation, in which dimensions keep their axis.

    The last dimension is always channels, so that the next linear layer can read it.
    """
    sizes = [1 if i in batches else size for i, size in enumerate(shape)]
    if any(view.batch != shape[i] for i in batches) or len(shape) - 1 in batches:
        return None
    plain = View(node.name, 0, 0, view.leading, False, tuple(_dimension(n) for n in sizes))
    over_channels = [
        bool(d) and all(factor.axis is Axis.CHANNEL for factor in d) for d in view.dimensions
    ]
    over_channels[-1] = True
    axes = [
        Axis.CHANNEL if over_channels[i] else Axis.POSITION
        for i, dimension in enumerate(plain.dimensions)
        for _ in dimension
    ]
    root = new_root(plain, axes, node.name)
    batch = merged([Factor(view.batch, Axis.BATCH, 1)])
    dimensions = tuple(
        batch if i in batches else dimension for i, dimension in enumerate(root.dimensions)
    )
    return replace(root, dimensions=dimensions)


def _dimension(size: int) -> tuple[Factor, ...]:
    return (Factor(size, Axis.CHANNEL, 1),) if size != 1 else ()


def _place(target: View, dim: int, start: int) -> View:
    """Return the target from an index of a dimension on."""
    moved = target.sliced(dim, start, target.shape[dim] - start)
    return target if moved is None else moved


def _like(target: View, source: View) -> View:
    """Return the target's view with the factors of the source."""
    dimensions = []
    for own, of_source in zip(target.dimensions, source.dimensions, strict=True):
        step, axis = (own[0].step, own[0].axis) if own else (1, Axis.CHANNEL)
        factors = []
        for factor in reversed(of_source):
            if factor.axis is Axis.BATCH:
                factors.append(factor)
                continue
            factors.append(Factor(factor.size, axis, step))
            step *= factor.size
        dimensions.append(tuple(factors[::-1]))
    return replace(target, dimensions=tuple(dimensions))


def _constant_place(target: View, dim: int, size: int) -> View:
    """Return the part of the target that a constant fills, without the batch."""
    dimensions: list[Dimension] = []
    for i, dimension in enumerate(target.dimensions):
        if _has_batch(dimension):
            dimensions.append(())
        elif i == dim:
            dimensions.append(
                tuple(replace(factor, size=size) for factor in dimension) if size != 1 else ()
            )
        else:
            dimensions.append(dimension)
    return replace(target, dimensions=tuple(dimensions))


class _JoinCall:
    """A concatenation in PyTorch, in the order of the new root."""

    def __init__(self, node: Rearrange, dim: int, target: View) -> None:
        self.node, self.dim, self.target = node, dim, target

    def __call__(self, *inputs: Tensor) -> Tensor:
        given = iter(inputs)
        found: list[Any] = [
            ViewCall(part.source)(next(given)) if part.source is not None else part.constant
            for part in self.node.parts
        ]
        shape = next(x.shape for x in found if isinstance(x, Tensor))
        tensors = []
        for x in found:
            if not isinstance(x, Tensor):
                x = torch.from_numpy(x)
                sizes = [x.shape[i] if i == self.dim else n for i, n in enumerate(shape)]
                x = x.expand(sizes)
            tensors.append(x)
        joined = root_of(self.target, torch.cat(tensors, self.dim))
        return joined.reshape(len(joined), *self.node.trailing)
