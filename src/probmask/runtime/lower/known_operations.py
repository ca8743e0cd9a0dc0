"""Operations on known values, which are evaluated when the network is lowered: see `known`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from probmask.runtime.lower.graph import Graph, arguments_of
from probmask.runtime.lower.known import Known, compared, has_batch, per_image
from probmask.runtime.lower.view_nodes import (
    Move,
    keep,
    narrow,
    permute,
    reshape,
    select,
    transpose,
)
from probmask.runtime.lower.views import VARYING, Axis, Dimension, Factor, View, concrete, merged

_aten = torch.ops.aten
# Masks of more elements are not evaluated.
_MAX_SIZE = 2**24


def known_value(graph: Graph, node: fx.Node) -> Known | None:
    """Return what is known of the result of an operation; None if it depends on other numbers."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or prod(value.shape) == 0:
        return None
    evaluate, tags = _EVALUATE.get(node.target), getattr(node.target, "tags", ())
    if evaluate is None and torch.Tag.pointwise in tags:
        evaluate = _pointwise
    if evaluate is None or torch.Tag.nondeterministic_seeded in tags:
        return None
    known = evaluate(graph, node)
    if known is None or known.view.shape != tuple(map(concrete, value.shape)):
        return None
    is_batch = (f.axis is Axis.BATCH for f in known.view.factors if f.size >= VARYING)
    return (
        known
        if all(is_batch) and all(_is_of_one(side, known.view) for side in known.sides)
        else None
    )


def _is_of_one(side: Tensor, view: View) -> bool:
    """Return whether a side has a batch of one, which a constant may not have."""
    sizes = zip(side.shape, view.dimensions[len(view.dimensions) - side.dim() :], strict=True)
    return all(n in (1, prod(f.count(1) for f in dimension)) for n, dimension in sizes)


def is_input(graph: Graph, known: Known) -> bool:
    """Return whether a value is an input as it is."""
    if known.sides:
        return False
    whole = _operand(graph, graph.fx_nodes[known.view.root])
    return whole is not None and whole.view == known.view


def _operand(graph: Graph, node: fx.Node) -> Known | None:
    """Return what is known of an argument of an operation."""
    if node.name in graph.known:
        return graph.known[node.name]
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    shape = tuple(map(concrete, value.shape))
    constant = graph.shared.get(node.name, graph.constants.get(graph.resolve(node.name)))
    if constant is not None:
        expected = tuple(1 if size == VARYING else size for size in shape)
        return Known(_plain_view(shape), (constant,)) if constant.shape == expected else None
    integers = node.op == "placeholder" and not value.is_floating_point()
    if not integers or len(shape) != 2 or shape[0] > VARYING or shape[1] >= VARYING:
        return None
    batch = merged([Factor(shape[0], Axis.BATCH, 1)])
    elements = merged([Factor(shape[1], Axis.CHANNEL, 1)])
    view = View(node.name, shape[1], 1, str(value.shape[0]), False, (batch, elements))
    return Known(view, ())


def _plain_view(shape: Sequence[int]) -> View:
    """Return the view of a value that no input influences."""
    return View("", 1, 1, "", False, tuple(map(_dimension, shape)))


def _dimension(size: int) -> Dimension:
    return merged([Factor(size, *((Axis.BATCH, 1) if size == VARYING else (Axis.CHANNEL, 0)))])


def _varies(dimension: Dimension) -> bool:
    """Return whether a dimension runs over the batch or over the elements of an input."""
    return any(factor.step for factor in dimension)


def _comparison(graph: Graph, node: fx.Node) -> Known | None:
    """Return a comparison with a number for equality."""
    first, number = node.args
    assert isinstance(first, fx.Node)
    known = _operand(graph, first)
    if known is None or known.sides:
        return _pointwise(graph, node)
    if not isinstance(number, int | float) or number != int(number):
        return None
    is_equal = node.target is _aten.eq.Scalar
    return compared(known, int(number), (is_equal, not is_equal))


def _pointwise(graph: Graph, node: fx.Node) -> Known | None:
    """Evaluate an operation on each element, once for each side."""
    operands = {}
    to_boolean = node.target is _aten._to_copy.default and node.meta["val"].dtype == torch.bool
    for argument in node.all_input_nodes:
        known = _operand(graph, argument)
        if known is not None and not known.sides:  # the input itself
            is_boolean = argument.meta["val"].dtype == torch.bool or to_boolean
            known = compared(known, 0, (False, True)) if is_boolean else None
        if known is None:
            return None
        operands[argument] = known
    view = _joint_view(operands.values(), tuple(map(concrete, node.meta["val"].shape)))
    inputs = {(own.view.root, own.number) for own in operands.values() if len(own.sides) == 2}
    if view is None or len(inputs) > 1:
        return None

    def evaluated(side: int) -> Tensor:
        own = {x: known.sides[min(side, len(known.sides) - 1)] for x, known in operands.items()}
        return _call(node, own)

    sides = tuple(evaluated(side) for side in range(2 if inputs else 1))
    return Known(view, sides, next(iter(inputs))[1] if inputs else 0)


def _joint_view(operands: Iterable[Known], shape: tuple[int, ...]) -> View | None:
    """Return the view of values that are combined by element; None if their dimensions differ."""
    if prod(n for n in shape if n % VARYING) > _MAX_SIZE:
        return None
    views = [known.view for known in operands]
    found = []
    for i, size in enumerate(shape):
        places = [i - len(shape) + len(view.dimensions) for view in views]
        own = {view.dimensions[p] for view, p in zip(views, places, strict=True) if p >= 0}
        varying = {dimension for dimension in own if _varies(dimension)}
        if len(varying) > 1:
            return None
        found.append(next(iter(varying), _dimension(size)))
    root = next((view for view in views if view.root), _plain_view(()))
    return replace(root, dimensions=tuple(found))


def _moved(move: Move) -> Callable[[Graph, fx.Node], Known | None]:
    """Return a function that evaluates an operation that only moves elements."""

    def evaluate(graph: Graph, node: fx.Node) -> Known | None:
        first = node.args[0]
        known = _operand(graph, first) if isinstance(first, fx.Node) else None
        if known is None:
            return None
        arguments = arguments_of(node)
        shape = tuple(concrete(size) for size in node.meta["val"].shape)
        view = move(known.view, arguments, shape)
        sides = []
        for side in known.sides:
            own = _of_side(side, known.view)
            moved = None if own is None else move(own, arguments, shape)
            if moved is None:
                return None
            sides.append(_elements(side, moved))
        return None if view is None else replace(known, view=view, sides=tuple(sides))

    return evaluate


def _of_side(side: Tensor, view: View) -> View | None:
    """Return the view of a side's elements that has the batch of the value."""
    dimensions, step = [], side.numel()
    for dimension, size in zip(view.dimensions, side.shape, strict=True):
        if size == 1:
            still = (f if f.axis is Axis.BATCH else replace(f, step=0) for f in dimension)
            dimensions.append(tuple(still))
            continue
        step //= size
        if has_batch(dimension) or prod(factor.size for factor in dimension) != size:
            return None
        dimensions.append((Factor(size, Axis.CHANNEL, step),))
    return View("", side.numel(), 1, "", False, tuple(dimensions))


def _elements(side: Tensor, view: View) -> Tensor:
    """Return the elements of a view of a side for a batch of one, once where they repeat."""
    sizes, steps, start = view.strides(1)
    whole = side.contiguous()
    found = whole.as_strided(sizes, steps, whole.storage_offset() + start)
    found = found.reshape(view.sizes(1))
    for dim, dimension in enumerate(view.dimensions):
        if not any(f.step and f.axis is not Axis.BATCH for f in dimension):
            found = found.narrow(dim, 0, 1)
    return found.clone()


def _expand(view: View, _: dict[str, Any], shape: tuple[int, ...]) -> View:
    """Repeat dimensions of size 1, also along the batch."""
    missing = len(shape) - len(view.dimensions)
    own = ((),) * missing + view.dimensions
    sizes = (1,) * missing + view.shape
    dimensions = [
        dimension if size == before else _dimension(size)
        for dimension, before, size in zip(own, sizes, shape, strict=True)
    ]
    return replace(view, dimensions=tuple(dimensions))


def _indexed(graph: Graph, node: fx.Node) -> Known | None:
    """Index all dimensions by all of their places: the batch by `arange`, others by constants."""
    first, indices = node.args
    assert isinstance(first, fx.Node)
    known = _operand(graph, first)
    if known is None or not isinstance(indices, list | tuple):
        return None
    if len(indices) != len(known.view.dimensions):
        return None
    rank = node.meta["val"].dim()
    found: dict[int, int] = {}  # where the dimensions are in the result
    for dim, index in enumerate(indices):
        place = _place_of_all(graph, index, known.view.shape[dim])
        if place is None or place + rank in found:
            return None
        found[place + rank] = dim
        _note_equal_size(graph, known, index, dim)
    if list(found.values()) != sorted(found.values()) or list(found) != sorted(found):
        return None

    dimensions = [known.view.dimensions[found[i]] if i in found else () for i in range(rank)]
    view = replace(known.view, dimensions=tuple(dimensions))
    sides = tuple(
        side.reshape([side.shape[found[i]] if i in found else 1 for i in range(rank)])
        for side in known.sides
    )
    return replace(known, view=view, sides=sides)


def _place_of_all(graph: Graph, index: Any, size: int) -> int | None:
    """Return the dimension, from the last, along which an index counts from 0 to ``size``."""
    if not isinstance(index, fx.Node):
        return None
    shape = tuple(map(concrete, index.meta["val"].shape))
    if prod(shape) != size or size not in shape:
        return None
    place = shape.index(size) - len(shape)
    constant = graph.constants.get(graph.resolve(index.name))
    if constant is None:
        return place if _is_image_number(index) else None
    return place if torch.equal(constant.flatten(), torch.arange(size)) else None


def _is_image_number(node: fx.Node) -> bool:
    """Return whether a tensor counts the images, with further dimensions of size 1."""
    while node.target in (_aten.unsqueeze.default, _aten.slice.Tensor):
        before = node.args[0]
        assert isinstance(before, fx.Node)
        whole = prod(map(concrete, before.meta["val"].shape)) == VARYING
        if not whole or prod(map(concrete, node.meta["val"].shape)) != VARYING:
            return False
        node = before
    counts = node.target is _aten.arange.default and not node.meta["val"].is_floating_point()
    return counts and concrete(node.meta["val"].shape[0]) == VARYING


def _note_equal_size(graph: Graph, known: Known, index: fx.Node, dim: int) -> None:
    """Note that the batch of an input that is indexed has to be that of the index."""
    sizes = [str(size) for size in index.meta["val"].shape if concrete(size) == VARYING]
    if has_batch(known.view.dimensions[dim]) and known.view.root and sizes:
        graph.equal_sizes[known.view.leading] = sizes[0]


def _along(graph: Graph, node: fx.Node) -> Known | None:
    """Evaluate an operation along a dimension other than the batch."""
    operands = {argument: _operand(graph, argument) for argument in node.all_input_nodes}
    values = {}
    dim = arguments_of(node)["dim"]
    for argument, known in operands.items():
        value = per_image(known) if known is not None else None
        if known is None or value is None or has_batch(known.view.dimensions[dim]):
            return None
        values[argument] = value
    shape = tuple(map(concrete, node.meta["val"].shape))
    return Known(_plain_view(shape), (_call(node, values),))


def _call(node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    """Evaluate an operation with these values of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    result: Tensor = target(*args, **kwargs)
    return result


_EVALUATE: dict[Any, Callable[[Graph, fx.Node], Known | None]] = {
    **dict.fromkeys((_aten.eq.Scalar, _aten.ne.Scalar), _comparison),
    **dict.fromkeys(
        (
            _aten.__and__.Tensor, _aten.__or__.Tensor, _aten._to_copy.default,
            _aten.where.ScalarOther, _aten.where.ScalarSelf, _aten.where.Scalar,
            _aten.masked_fill.Tensor,
        ),
        _pointwise,
    ),
    **dict.fromkeys(
        (
            _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default,
            _aten.flatten.using_ints, _aten.unflatten.int, _aten.unsqueeze.default,
            _aten.squeeze.dim, _aten.squeeze.dims,
        ),
        _moved(reshape),
    ),
    _aten.transpose.int: _moved(transpose),
    _aten.permute.default: _moved(permute),
    _aten.select.int: _moved(select),
    _aten.slice.Tensor: _moved(narrow),
    _aten.expand.default: _moved(_expand),
    **dict.fromkeys((_aten.clone.default, _aten.contiguous.default), _moved(keep)),
    _aten.index.Tensor: _indexed,
    **dict.fromkeys((_aten.cumsum.default, _aten.diff.default), _along),
}  # fmt: skip
