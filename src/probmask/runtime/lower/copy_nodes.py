"""Copies of views to new roots: where a kernel needs another order, and for concatenation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from probmask.runtime.lower.copy_loops import can_copy
from probmask.runtime.lower.graph import (
    Built,
    Graph,
    arguments_of,
    image_form_of_any_rank,
    label_of,
)
from probmask.runtime.lower.nodes import Form, Part, Rearrange, unset_call
from probmask.runtime.lower.pytorch_calls import ViewCall, root_of
from probmask.runtime.lower.view_nodes import add_result
from probmask.runtime.lower.views import (
    VARYING,
    Axis,
    Dimension,
    Factor,
    View,
    concrete,
    merged,
)


def planes(graph: Graph, argument: Any) -> View | None:
    """Return a value as a range of channels at all positions, by a copy if it is not one."""
    view = graph.view_of(argument)
    if view is None or not view.has_batch() or is_ambiguous(graph, view):
        return None
    if view.is_whole():
        return view
    return copied(graph, argument, view, lambda factor, _: factor.axis)


def is_ambiguous(graph: Graph, view: View) -> bool:
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


@dataclass(frozen=True)
class _Piece:
    """A view or a constant, and where it starts in some dimensions of the joined tensor."""

    content: View | Tensor
    starts: dict[int, int]


def build_concatenated_rows(graph: Graph, node: fx.Node) -> Built:
    """Build a concatenation along any dimension but the batch; parts may be constant."""
    arguments = arguments_of(node)
    dim = arguments["dim"] % node.meta["val"].dim()
    pieces, start = [], 0
    for part in arguments["tensors"]:
        view, constant = graph.view_of(part), graph.shared_constant(part)
        is_float = constant is not None and constant.dtype == torch.float32
        content = view if view is not None else constant if is_float else None
        if content is None:
            return None
        pieces.append(_Piece(content, {dim: start}))
        start += content.shape[dim]
    return _joined(graph, node, pieces, dim, _Concatenation(dim))


def build_padding(graph: Graph, node: fx.Node) -> Built:
    """Build padding by a constant number; a negative padding crops."""
    arguments = arguments_of(node)
    view = graph.view_of(arguments["self"])
    pad, number = list(arguments["pad"]), arguments["value"] or 0.0
    if view is None or arguments.get("mode", "constant") != "constant":
        return None
    rank = len(view.dimensions)
    pairs = {rank - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    pairs = {dim: pair for dim, pair in pairs.items() if pair != (0, 0)}
    for dim, (before, after) in pairs.items():
        length = view.shape[dim] + min(0, before) + min(0, after)
        cropped = view.sliced(dim, max(0, -before), length) if length > 0 else None
        if cropped is None:
            return None
        view = cropped
    inner = {dim: max(0, before) for dim, (before, _) in pairs.items()}
    whole = [concrete(size) for size in node.meta["val"].shape]
    call = _Padding(tuple(max(0, n) for n in pad), number)
    edges = _edges(whole, list(view.shape), inner, number)
    dim = next(iter(pairs), rank - 1)
    return _joined(graph, node, [*edges, _Piece(view, inner)], dim, call)


def _edges(
    whole: list[int], within: list[int], starts: dict[int, int], number: float
) -> list[_Piece]:
    """Return constants that fill a tensor around what starts at ``starts``, without overlap."""
    edges = []
    for dim, start in starts.items():
        end = start + within[dim]
        for first, size in ((0, start), (end, whole[dim] - end)):
            if size:
                # Dimensions that come later have their whole size, earlier ones the inner size.
                done = [d for d in starts if list(starts).index(d) < list(starts).index(dim)]
                shape = [within[d] if d in done else n for d, n in enumerate(whole)]
                shape[dim] = size
                shape = [1 if n == VARYING else n for n in shape]
                places = {d: starts[d] for d in done}
                edges.append(_Piece(torch.full(shape, float(number)), places | {dim: first}))
    return edges


def _joined(
    graph: Graph, node: fx.Node, pieces: list[_Piece], dim: int, join: "_Concatenation | _Padding"
) -> Built:
    known = [piece.content for piece in pieces if isinstance(piece.content, View)]
    shape = [concrete(size) for size in node.meta["val"].shape]
    if not known or any(not view.has_batch() for view in known):
        return None
    if all(is_ambiguous(graph, view) for view in known):
        return None
    batches = {i for view in known for i, d in enumerate(view.dimensions) if _has_batch(d)}
    joined_dims = {d for piece in pieces for d in piece.starts} | {dim}
    leadings = {view.leading for view in known}
    if batches & joined_dims or len(batches) > 1 or len(leadings) > 1:
        return None
    target = _joined_root(node, shape, known, batches)
    if target is None:
        return None
    made: list[Part] = []
    for piece in pieces:
        place = target
        for where, start in piece.starts.items():
            place = _place(place, where, start)
        part = _part_of(graph, piece.content, place, batches, shape, joined_dims)
        if part is None:
            return None
        made.append(part)
    joined = Rearrange(
        node.name,
        tuple(view.root for view in known),
        unset_call,
        label_of(node),
        form=_joined_form(node, target),
        input_forms=tuple(graph.form_of_root(view) for view in known),
        views=tuple(known),
        parts=tuple(made),
    )
    joined.call = _JoinCall(joined, join, target)
    return add_result(graph, node, joined, target)


def _part_of(
    graph: Graph,
    content: View | Tensor,
    place: View,
    batches: set[int],
    shape: list[int],
    joined_dims: set[int],
) -> Part | None:
    """Return the part that copies a view or a constant to its place."""
    if isinstance(content, View):
        part = Part(_like(place, content), content)
        return part if can_copy(part, graph.form_of_root(content)) else None
    sizes = [
        content.shape[i] if i in joined_dims else 1 if i in batches else n
        for i, n in enumerate(shape)
    ]
    single = of_one_image(content, sizes)
    if single is None:
        return None
    array = single.contiguous().numpy().copy()
    return Part(_constant_place(place, sizes), None, array)


def _joined_form(node: fx.Node, target: View) -> Form:
    """Return the form of the joined tensor: an image's if it has the order of one."""
    image = image_form_of_any_rank(node.meta["val"])
    if image is not None and target.has_image_axes():
        return image
    return form_of(target)


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


def _joined_root(
    node: fx.Node, shape: list[int], known: list[View], batches: set[int]
) -> View | None:
    """Return the new root of a concatenation, in which dimensions keep their axis.

    Images stay images. In all other tensors the last dimension becomes channels, so that the next
    linear layer can read it.
    """
    view = known[0]
    sizes = [1 if i in batches else size for i, size in enumerate(shape)]
    is_image = len(shape) in (3, 4, 5) and all(other.has_image_axes() for other in known)
    if any(view.batch != shape[i] for i in batches) or len(shape) - 1 in batches:
        return None
    plain = View(node.name, 0, 0, view.leading, False, tuple(_dimension(n) for n in sizes))
    over_channels = [
        bool(d) and all(factor.axis is Axis.CHANNEL for factor in d) for d in view.dimensions
    ]
    over_channels[-1] = True
    if is_image:
        over_channels = [i == 1 or i == 2 == len(shape) - 3 for i in range(len(shape))]
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


def _constant_place(target: View, sizes: list[int]) -> View:
    """Return the part of the target that a constant fills, without the batch."""
    dimensions: list[Dimension] = []
    for size, dimension in zip(sizes, target.dimensions, strict=True):
        if _has_batch(dimension) or size == 1:
            dimensions.append(())
        else:
            dimensions.append(tuple(replace(factor, size=size) for factor in dimension))
    return replace(target, dimensions=tuple(dimensions))


class _JoinCall:
    """A concatenation or a padding in PyTorch, in the order of the new root."""

    def __init__(self, node: Rearrange, join: "_Concatenation | _Padding", target: View) -> None:
        self.node, self.join, self.target = node, join, target

    def __call__(self, *inputs: Tensor) -> Tensor:
        given = iter(inputs)
        found: list[Any] = [
            ViewCall(part.source)(next(given)) if part.source is not None else part.constant
            for part in self.node.parts
        ]
        joined = self.join(found)
        form = self.node.form
        if form is not None and (form.tokens or form.positions == 1):
            joined = root_of(self.target, joined)
        return joined.reshape(len(joined), *self.node.trailing)


@dataclass(frozen=True)
class _Concatenation:
    """Join tensors and constants along a dimension."""

    dim: int

    def __call__(self, found: list[Any]) -> Tensor:
        shape = next(x.shape for x in found if isinstance(x, Tensor))
        tensors = []
        for x in found:
            if not isinstance(x, Tensor):
                x = torch.from_numpy(x)
                sizes = [x.shape[i] if i == self.dim else n for i, n in enumerate(shape)]
                x = x.expand(sizes)
            tensors.append(x)
        return torch.cat(tensors, self.dim)


@dataclass(frozen=True)
class _Padding:
    """Pad the only tensor; the constants are its padding."""

    pad: tuple[int, ...]
    number: float

    def __call__(self, found: list[Any]) -> Tensor:
        (x,) = (x for x in found if isinstance(x, Tensor))
        return nn.functional.pad(x, self.pad, value=self.number)
