"""Copies of views to new roots, where a kernel needs another order."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from probmask.runtime.lower.copy_loops import parts_of
from probmask.runtime.lower.graph import Graph, image_form_of_any_rank, whole_view
from probmask.runtime.lower.nodes import Form, Part, Rearrange
from probmask.runtime.lower.pytorch_calls import ViewCall, root_of
from probmask.runtime.lower.views import Axis, Factor, View, merged, runs_over_batch


def planes(graph: Graph, argument: Any) -> View | None:
    """Return a value as a range of channels at all positions, by a copy if it is not one."""
    view = readable(graph, argument)
    if view is None or not view.has_batch() or is_ambiguous(graph, view):
        return None
    if view.is_whole():
        return view
    return copied(graph, argument, view, lambda factor, _: factor.axis)


def readable(graph: Graph, argument: Any) -> View | None:
    """Return a value as planes; an input of four or five dimensions is taken for an image."""
    view = graph.view_of(argument)
    if view is None or not is_ambiguous(graph, view) or argument.name not in graph.signature.inputs:
        return view
    form = image_form_of_any_rank(argument.meta["val"])
    return view if form is None else whole_view(view.root, form).reshaped(view.shape)


def is_ambiguous(graph: Graph, view: View) -> bool:
    """Return whether a tensor from PyTorch may as well be an image: it has more dimensions."""
    return view.tokens and graph.form_of(view.root) is None and len(view.dimensions) != 3


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
    form = graph.form_of_root(view)
    if view.dimensions and runs_over_batch(view.dimensions[-1]):
        return None
    parts = parts_of(view, target, form)
    if parts is None:
        return None
    graph.nodes[target.root] = rearranged(
        target.root,
        parts,
        [form] * len(parts),
        _CopyCall(view, target),
        f"{argument.name} (copy)",
        form=form_of(target),
        trailing=(target.positions, target.channels)
        if target.positions > 1
        else (target.channels,),
    )
    return replace(target, dimensions=tuple(merged(d) for d in target.dimensions))


def rearranged(
    name: str,
    parts: Sequence[Part],
    forms: Sequence[Form],
    call: Callable[..., Any],
    label: str,
    *,
    form: Form,
    trailing: tuple[int, ...],
) -> Rearrange:
    """Return the node that copies parts. ``forms`` are those of the tensors that parts read.

    ``call`` gets one tensor for each part that reads one.
    """
    views = tuple(part.source for part in parts if part.source is not None)
    return Rearrange(
        name,
        tuple(view.root for view in views),
        call,
        label,
        form=form,
        input_forms=tuple(forms),
        trailing=trailing,
        views=views,
        parts=tuple(parts),
    )


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

    def __call__(self, x: Tensor, *_: Tensor) -> Tensor:
        found = root_of(self.target, ViewCall(self.source)(x))
        return found if self.target.positions > 1 else found.reshape(len(x), self.target.channels)


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
