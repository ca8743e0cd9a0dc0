"""Views: tensors that hold elements of another one, the root, in another order.

Reshapes, transposes, slices and expansions move no data. A root is stored as planes, one per
channel, each with all positions of an image. A view says, for each of its dimensions, over which
axis of the root it runs and with which step. A dimension may be a product of several factors: after
``view(tokens, batch * heads, size)``, the second dimension runs over the batch and over channels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

# Stands for the size of a batch that may vary. It is a prime that no size of a tensor has.
VARYING = 1_000_003


class Axis(Enum):
    """Axis of a root."""

    BATCH = "batch"
    CHANNEL = "channel"
    POSITION = "position"


@dataclass(frozen=True)
class Factor:
    """A loop of ``size`` iterations that advances ``step`` places along an axis of the root."""

    size: int
    axis: Axis
    step: int

    def count(self, batch: int) -> int:
        """Return the number of iterations for a batch of this size."""
        return batch if self.axis is Axis.BATCH else self.size


Dimension = tuple[Factor, ...]


@dataclass(frozen=True)
class View:
    """A tensor as loops over a root.

    Attributes:
        root: Name of the node or the input that holds the elements.
        channels, positions: Sizes of the root.
        leading: Name of the batch's size; a number if it is fixed.
        tokens: Whether the channels are the last dimension of the root's tensor in PyTorch, after
            the positions. Otherwise they are before the positions.
        dimensions: The factors of each dimension, the outermost first. A dimension of size 1 has
            none.
        channel, position: Where the first element is.
    """

    root: str
    channels: int
    positions: int
    leading: str
    tokens: bool
    dimensions: tuple[Dimension, ...]
    channel: int = 0
    position: int = 0

    @property
    def batch(self) -> int:
        """Number of images, or `VARYING`."""
        return int(self.leading) if self.leading.isdecimal() else VARYING

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all dimensions."""
        return tuple(prod(factor.size for factor in d) for d in self.dimensions)

    @property
    def factors(self) -> Dimension:
        """The factors of all dimensions."""
        return tuple(factor for dimension in self.dimensions for factor in dimension)

    def along(self, axis: Axis) -> Dimension:
        """Return the factors of one axis, in the order of the dimensions, merged if possible."""
        return merged(factor for factor in self.factors if factor.axis is axis)

    def reshaped(self, shape: Sequence[int]) -> "View | None":
        """Return the view with another shape; None if a factor would have to be divided."""
        left = [factor for factor in self.factors if factor.size != 1][::-1]
        dimensions = []
        for size in shape:
            taken: list[Factor] = []
            while size > 1:
                if not left:
                    return None
                factor = left.pop()
                if size % factor.size == 0:
                    taken.append(factor)
                    size //= factor.size
                elif factor.size % size == 0 and factor.axis is not Axis.BATCH:
                    inner = factor.size // size
                    taken.append(Factor(size, factor.axis, factor.step * inner))
                    left.append(replace(factor, size=inner))
                    size = 1
                else:
                    return None
            if size != 1:
                return None
            dimensions.append(merged(taken))
        return None if left else replace(self, dimensions=tuple(dimensions))

    def permuted(self, order: Sequence[int]) -> "View":
        """Return the view with its dimensions in another order."""
        return replace(self, dimensions=tuple(self.dimensions[i] for i in order))

    def sliced(self, dim: int, start: int, length: int, step: int = 1) -> "View | None":
        """Return a part of a dimension; None if the dimension is a product."""
        dimension = self.dimensions[dim]
        if start == 0 and step == 1 and length == self.shape[dim]:
            return self
        if len(dimension) != 1 or dimension[0].axis is Axis.BATCH:
            return self._sliced_product(dim, start, length, step)
        (factor,) = dimension
        moved = self._moved(factor.axis, start * factor.step)
        part = (Factor(length, factor.axis, factor.step * step),) if length != 1 else ()
        return moved._with_dimension(dim, part)

    def _sliced_product(self, dim: int, start: int, length: int, step: int) -> "View | None":
        """Slice a product, if the part is whole steps of its outermost factor, or within one."""
        dimension = self.dimensions[dim]
        if not dimension or dimension[0].axis is Axis.BATCH:
            return None
        first, *others = dimension
        inner = prod(factor.size for factor in others)
        moved = self._moved(first.axis, start // inner * first.step)
        if start % inner + (length - 1) * step < inner:
            within = moved._with_dimension(dim, tuple(others))
            return within.sliced(dim, start % inner, length, step)
        if step != 1 or start % inner or length % inner:
            return None
        return moved._with_dimension(dim, merged([replace(first, size=length // inner), *others]))

    def selected(self, dim: int, index: int) -> "View | None":
        """Return the view at one index of a dimension, without that dimension."""
        one = self.sliced(dim, index % self.shape[dim], 1)
        if one is None or one.dimensions[dim]:
            return None
        return replace(one, dimensions=one.dimensions[:dim] + one.dimensions[dim + 1 :])

    def expanded(self, shape: Sequence[int]) -> "View":
        """Return the view with dimensions of size 1 repeated; -1 keeps a size."""
        missing = len(shape) - len(self.dimensions)
        dimensions: list[Dimension] = [*([()] * missing), *self.dimensions]
        sizes = (1,) * missing + self.shape
        for i, (size, own) in enumerate(zip(shape, sizes, strict=True)):
            if size not in (-1, own):
                dimensions[i] = (Factor(size, Axis.CHANNEL, 0),)
        return replace(self, dimensions=tuple(dimensions))

    def repeated(self, dim: int, repeats: int) -> "View":
        """Return the view with each element of a dimension repeated."""
        dimension = merged([*self.dimensions[dim], Factor(repeats, Axis.CHANNEL, 0)])
        return self._with_dimension(dim, dimension)

    def _moved(self, axis: Axis, steps: int) -> "View":
        if axis is Axis.CHANNEL:
            return replace(self, channel=self.channel + steps)
        return replace(self, position=self.position + steps)

    def _with_dimension(self, dim: int, dimension: Dimension) -> "View":
        dimensions = (*self.dimensions[:dim], dimension, *self.dimensions[dim + 1 :])
        return replace(self, dimensions=dimensions)

    def at(self, factor: int, index: int) -> "View":
        """Return the part in which one factor stays at an index of its loop; its size is then 1."""
        chosen = self.factors[factor]
        factors = list(self.factors)
        factors[factor] = replace(chosen, size=1)
        left = iter(factors)
        dimensions = tuple(tuple(next(left) for _ in d) for d in self.dimensions)
        moved = self._moved(chosen.axis, index * chosen.step)
        return replace(moved, dimensions=dimensions)

    def has_batch_first(self) -> bool:
        """Return whether the first dimension is the batch and nothing else."""
        first = [factor.axis for factor in self.dimensions[0]] if self.dimensions else None
        return first == [Axis.BATCH] or (self.batch == 1 and first == [])

    def has_batch(self) -> bool:
        """Return whether it runs over all images exactly once."""
        batches = [factor for factor in self.factors if factor.axis is Axis.BATCH]
        return len(batches) == 1 or (self.batch == 1 and not batches)

    def is_whole(self) -> bool:
        """Return whether it runs over a range of channels at all positions, in any order."""
        return (
            self.has_batch()
            and self.position == 0
            and all(factor.step for factor in self.factors if factor.axis is not Axis.BATCH)
            and _contiguous(self._sorted(Axis.POSITION)) == self.positions
            and _contiguous(self._sorted(Axis.CHANNEL)) > 0
        )

    def _sorted(self, axis: Axis) -> Dimension:
        own = (factor for factor in self.factors if factor.axis is axis)
        return merged(sorted(own, key=lambda factor: -factor.step))

    def width(self) -> int:
        """Return the number of channels that a whole view runs over."""
        return _contiguous(self._sorted(Axis.CHANNEL))

    def has_channels_last(self) -> bool:
        """Return whether the last dimension runs over channels, one after the other."""
        last = self.dimensions[-1] if self.dimensions else ()
        others = [factor for dimension in self.dimensions[:-1] for factor in dimension]
        return (
            len(last) <= 1
            and all(factor.axis is Axis.CHANNEL and factor.step == 1 for factor in last)
            and all(factor.axis is not Axis.CHANNEL for factor in others)
        )

    def is_canonical(self) -> bool:
        """Return whether it has the order of a new root: batch, positions, channels."""
        positions = self.along(Axis.POSITION)
        in_order = positions in ((), (Factor(self.positions, Axis.POSITION, 1),))
        return self.has_batch_first() and in_order and self.is_whole() and self.has_channels_last()

    def has_image_axes(self) -> bool:
        """Return whether its dimensions are the batch, channels, then only positions.

        Of the five dimensions of volumes, the second and the third are channels.
        """
        if len(self.dimensions) < 3:
            return False
        first_position = 3 if len(self.dimensions) == 5 else 2
        channels = self.dimensions[1:first_position]
        positions = self.dimensions[first_position:]
        return (
            self.has_batch_first()
            and all(factor.axis is Axis.CHANNEL for d in channels for factor in d)
            and all(factor.axis is Axis.POSITION for d in positions for factor in d)
        )

    def is_image(self) -> bool:
        """Return whether it has the order of an image: batch, channels, positions."""
        channels, positions = self.along(Axis.CHANNEL), self.along(Axis.POSITION)
        return (
            self.has_image_axes()
            and self.is_whole()
            and channels in ((), (Factor(self.width(), Axis.CHANNEL, 1),))
            and positions in ((), (Factor(self.positions, Axis.POSITION, 1),))
        )

    def with_root(self, root: str, channels: int) -> "View":
        """Return the same view of a new root that holds its range of channels."""
        return replace(self, root=root, channels=channels, channel=0, tokens=True)

    def strides(self, batch: int) -> tuple[list[int], list[int], int]:
        """Return size and step of each factor in the root's tensor, and where the view starts.

        Steps and the start count elements of the tensor outside of the engine.
        """
        image = self.channels * self.positions
        channel, position = (1, self.channels) if self.tokens else (self.positions, 1)
        strides = {Axis.BATCH: image, Axis.CHANNEL: channel, Axis.POSITION: position}
        sizes = [factor.count(batch) for factor in self.factors]
        steps = [
            image if factor.axis is Axis.BATCH else factor.step * strides[factor.axis]
            for factor in self.factors
        ]
        return sizes, steps, self.channel * channel + self.position * position

    def is_in_order(self) -> bool:
        """Return whether it has all elements of the root's tensor, in the same order."""
        sizes, steps, start = self.strides(self.batch)
        inside = 1
        for size, step in zip(reversed(sizes), reversed(steps), strict=True):
            if size != 1 and step != inside:
                return False
            inside *= size
        return start == 0 and inside == self.batch * self.channels * self.positions

    def sizes(self, batch: int) -> list[int]:
        """Return the sizes of all dimensions, with the number of images in a batch."""
        return [prod(factor.count(batch) for factor in d) for d in self.dimensions]

    def order(self) -> list[int]:
        """Return the factors of a whole root in its order: batch, positions, channels."""
        return sorted(range(len(self.factors)), key=self._place)

    def _place(self, index: int) -> tuple[int, int]:
        factor = self.factors[index]
        return (Axis.BATCH, Axis.POSITION, Axis.CHANNEL).index(factor.axis), -factor.step


def runs_over_batch(dimension: Dimension) -> bool:
    """Return whether a factor of a dimension is the batch."""
    return any(factor.axis is Axis.BATCH for factor in dimension)


def merged(factors: Iterable[Factor]) -> Dimension:
    """Join neighboring factors that one loop can run over, and drop those of size 1."""
    result: list[Factor] = []
    for factor in factors:
        if factor.size == 1:
            continue
        before = result[-1] if result else None
        if (
            before is not None
            and before.axis is factor.axis is not Axis.BATCH
            and before.step == factor.size * factor.step
        ):
            result[-1] = Factor(before.size * factor.size, factor.axis, factor.step)
        else:
            result.append(factor)
    return tuple(result)


def _contiguous(factors: Dimension) -> int:
    """Return the number of elements that are next to each other; 0 if there are gaps."""
    if not factors:
        return 1
    return factors[0].size if len(factors) == 1 and factors[0].step == 1 else 0


def concrete(size: Any) -> int:
    """Return a size as an integer, with `VARYING` for the sizes that may vary."""
    name = str(size)
    if name.isdecimal():
        return int(name)
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, VARYING)))
