"""Nodes that put the parts of a dimension in another order: roll and flip."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from probmask.runtime.lower.copy_nodes import copied, readable
from probmask.runtime.lower.graph import Built, Graph, arguments_of
from probmask.runtime.lower.joined_nodes import Piece, joined
from probmask.runtime.lower.views import Axis, View

_MAX_PIECES = 64


@dataclass(frozen=True)
class _Range:
    """A part of a dimension: its length, and where it starts before and after."""

    before: int
    after: int
    length: int


def build_roll(graph: Graph, node: fx.Node) -> Built:
    """Build a roll over any dimensions but the batch."""
    arguments = arguments_of(node)
    shifts, dims = (_listed(arguments[key]) for key in ("shifts", "dims"))
    if len(shifts) != len(set(dims)):
        return None
    ranges = {}
    for shift, dim in zip(shifts, dims, strict=True):
        size = node.meta["val"].shape[dim]
        if not isinstance(size, int) or not isinstance(shift, int):
            return None
        start = shift % size
        halves = _Range(0, start, size - start), _Range(size - start, 0, start)
        ranges[dim % node.meta["val"].dim()] = [half for half in halves if half.length]
    return _reordered(graph, node, ranges)


def build_flip(graph: Graph, node: fx.Node) -> Built:
    """Build a flip of short dimensions, any but the batch."""
    ranges = {}
    for dim in _listed(arguments_of(node)["dims"]):
        size = node.meta["val"].shape[dim]
        if not isinstance(size, int) or size > _MAX_PIECES:
            return None
        singles = [_Range(size - 1 - i, i, 1) for i in range(size)]
        ranges[dim % node.meta["val"].dim()] = singles
    return _reordered(graph, node, ranges)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value]


def _reordered(graph: Graph, node: fx.Node, ranges: dict[int, list[_Range]]) -> Built:
    """Build the node that copies each combination of ranges to its place."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    view = readable(graph, x)
    if view is None or not ranges or prod(map(len, ranges.values())) > _MAX_PIECES:
        return None
    pieces = _pieces(view, ranges)
    if pieces is None:  # a dimension is a product: a copy has it in order
        copy = copied(graph, x, view, lambda _, last: Axis.CHANNEL if last else Axis.POSITION)
        pieces = None if copy is None else _pieces(copy, ranges)
    if pieces is None:
        return None
    places = tuple(tuple(piece.starts.items()) for piece in pieces)
    return joined(graph, node, pieces, next(iter(ranges)), _Assembly(places))


def _pieces(whole: View, ranges: dict[int, list[_Range]]) -> list[Piece] | None:
    pieces = []
    for combination in product(*ranges.values()):
        view, starts = whole, {}
        for dim, part in zip(ranges, combination, strict=True):
            sliced = view.sliced(dim, part.before, part.length)
            if sliced is None:
                return None
            view, starts[dim] = sliced, part.after
        pieces.append(Piece(view, starts))
    return pieces


@dataclass(frozen=True)
class _Assembly:
    """Put tensors at their places, which together fill a new one."""

    places: tuple[tuple[tuple[int, int], ...], ...]

    def __call__(self, found: list[Any]) -> Tensor:
        shape = list(found[0].shape)
        for dim, _ in self.places[0]:
            shape[dim] = max(
                dict(place)[dim] + x.shape[dim] for place, x in zip(self.places, found, strict=True)
            )
        whole: Tensor = torch.empty(shape)
        for place, x in zip(self.places, found, strict=True):
            part = whole
            for dim, start in place:
                part = part.narrow(dim, start, x.shape[dim])
            part.copy_(x)
        return whole
