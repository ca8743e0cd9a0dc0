"""Nodes that join tensors and constants in a new root: concatenation, and padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from probmask.runtime.lower.copy_loops import parts_of
from probmask.runtime.lower.copy_nodes import (
    form_of,
    is_ambiguous,
    new_root,
    of_one_image,
    readable,
    rearranged,
)
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
    Axis,
    Dimension,
    Factor,
    View,
    concrete,
    merged,
    runs_over_batch,
)


@dataclass(frozen=True)
class Piece:
    """A view or a constant, and where it starts in some dimensions of the joined tensor."""

    content: View | Tensor
    starts: dict[int, int]


def build_concatenated_rows(graph: Graph, node: fx.Node) -> Built:
    """Build a concatenation along any dimension but the batch; parts may be constant."""
    arguments = arguments_of(node)
    dim = arguments["dim"] % node.meta["val"].dim()
    pieces, start = [], 0
    for part in arguments["tensors"]:
        view, constant = readable(graph, part), graph.shared_constant(part)
        is_float = constant is not None and constant.dtype == torch.float32
        content = view if view is not None else constant if is_float else None
        if content is None:
            return None
        pieces.append(Piece(content, {dim: start}))
        start += content.shape[dim]
    return joined(graph, node, pieces, dim, _Concatenation(dim))


def joined(
    graph: Graph, node: fx.Node, pieces: list[Piece], dim: int, join: Callable[[list[Any]], Tensor]
) -> Built:
    """Build the node that copies pieces to their places; ``join`` is how PyTorch joins them."""
    known = [piece.content for piece in pieces if isinstance(piece.content, View)]
    shape = [concrete(size) for size in node.meta["val"].shape]
    if not known or any(not view.has_batch() for view in known):
        return None
    if all(is_ambiguous(graph, view) for view in known):
        return None
    batches = {i for view in known for i, d in enumerate(view.dimensions) if runs_over_batch(d)}
    joined_dims = {d for piece in pieces for d in piece.starts} | {dim}
    leadings = {view.leading for view in known}
    if batches & joined_dims or len(batches) > 1 or len(leadings) > 1:
        return None
    target = _joined_root(node, shape, known, batches)
    if target is None:
        return None
    made: list[_Copied] = []
    for piece in pieces:
        parts = _parts_of(graph, piece, target, batches, shape, joined_dims)
        if parts is None:
            return None
        made.append(_Copied(piece.content, parts))
    rearrange = rearranged(
        node.name,
        [part for copied in made for part in copied.parts],
        [form for copied in made for form in copied.forms(graph)],
        unset_call,
        label_of(node),
        form=_joined_form(node, target),
        trailing=(),
    )
    rearrange.call = _JoinCall(rearrange, [copied.content() for copied in made], join, target)
    return add_result(graph, node, rearrange, target)


@dataclass(frozen=True)
class _Copied:
    """A piece, and the parts of a node that copy it."""

    source: View | Tensor
    parts: tuple[Part, ...]

    def forms(self, graph: Graph) -> list[Form]:
        """Return the form of the tensor that each part reads; empty for a constant."""
        if not isinstance(self.source, View):
            return []
        return [graph.form_of_root(self.source)] * len(self.parts)

    def content(self) -> "_Content":
        """Return what PyTorch joins."""
        if isinstance(self.source, View):
            return _Content(self.source, len(self.parts))
        return _Content(self.parts[0].constant)


def _parts_of(
    graph: Graph,
    piece: Piece,
    target: View,
    batches: set[int],
    shape: list[int],
    joined_dims: set[int],
) -> tuple[Part, ...] | None:
    """Return the parts that copy a view or a constant to its place."""
    content, place = piece.content, target
    for where, start in piece.starts.items():
        place = _place(place, where, start)
    if isinstance(content, View):
        return parts_of(content, _like(place, content), graph.form_of_root(content))
    sizes = [
        content.shape[i] if i in joined_dims else 1 if i in batches else n
        for i, n in enumerate(shape)
    ]
    single = of_one_image(content, sizes)
    if single is None:
        return None
    array = single.contiguous().numpy().copy()
    return (Part(_constant_place(place, sizes), None, array),)


def _joined_form(node: fx.Node, target: View) -> Form:
    """Return the form of the joined tensor: an image's if it has the order of one."""
    image = image_form_of_any_rank(node.meta["val"])
    if image is not None and target.has_image_axes():
        return image
    return form_of(target)


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
        if runs_over_batch(dimension) or size == 1:
            dimensions.append(())
        else:
            dimensions.append(tuple(replace(factor, size=size) for factor in dimension))
    return replace(target, dimensions=tuple(dimensions))


@dataclass(frozen=True)
class _Content:
    """What is joined: a constant, or a view that a number of parts of the node copy."""

    value: Any
    parts: int = 0


class _JoinCall:
    """A concatenation or a padding in PyTorch, in the order of the new root."""

    def __init__(
        self,
        node: Rearrange,
        contents: Sequence[_Content],
        join: Callable[[list[Any]], Tensor],
        target: View,
    ) -> None:
        self.node, self.contents, self.join, self.target = node, contents, join, target

    def __call__(self, *inputs: Tensor) -> Tensor:
        found: list[Any] = []
        first = 0
        for content in self.contents:
            of_view = isinstance(content.value, View)
            found.append(ViewCall(content.value)(inputs[first]) if of_view else content.value)
            first += content.parts
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
