"""The loops of a copy: how a part of a rearranged tensor moves from its source to its target."""

from dataclasses import replace

from probmask.runtime.lower.nodes import Form, Part
from probmask.runtime.lower.views import Axis, Factor, View

# The copy kernel has this many nested loops.
_MAX_LOOPS = 4
_MAX_PARTS = 64


def parts_of(source: View, target: View, form: Form) -> tuple[Part, ...] | None:
    """Return the parts that copy a view of a tensor of this form; None if no kernel can.

    If the copy kernel has too few loops, each iteration of the shortest loop is a part.
    """
    parts = [Part(target, source)]
    while not all(can_copy(part, form) for part in parts):
        sizes = {
            factor.size: i
            for i, factor in enumerate(parts[0].target.factors)
            if factor.size > 1 and factor.axis is not Axis.BATCH
        }
        if not sizes or len(parts) * min(sizes) > _MAX_PARTS:
            return None
        shortest = sizes[min(sizes)]
        parts = [
            Part(part.target.at(shortest, i), part.source.at(shortest, i))
            for part in parts
            if part.source is not None
            for i in range(min(sizes))
        ]
    return tuple(parts)


def can_copy(part: Part, form: Form) -> bool:
    """Return whether the copy kernel has enough loops for a part."""
    loops = loops_of(part, form.height, form.width)
    return loops is not None and len(loops) <= _MAX_LOOPS


# A loop of a copy: its size, and its factors in the source and in the target.
Loop = tuple[int, Factor, Factor]


def loops_of(part: Part, height: int, width: int) -> list[Loop] | None:
    """Return the loops of a part; None if one runs over parts of the source's image rows."""
    source = part.source
    assert source is not None
    loops: list[Loop] = []
    # Factors that move within image rows, and the last column that they reach together.
    short = [f for f in source.factors if f.axis is Axis.POSITION and f.step % width]
    column = source.position % width
    within = height == 1 or column + sum((f.size - 1) * f.step for f in short) < width
    for of_source, of_target in zip(source.factors, part.target.factors, strict=True):
        size = of_source.size
        if of_source.axis is Axis.BATCH or size == 1:
            continue
        step = of_source.step
        if of_source.axis is not Axis.POSITION or within or step % width == 0:
            loops.append((size, of_source, of_target))
        elif len(short) == 1 and step == 1 and size % width == 0 and column == 0:
            lines, columns = (
                Factor(size // width, Axis.POSITION, width),
                Factor(width, Axis.POSITION, 1),
            )
            outer = Factor(size // width, of_target.axis, of_target.step * width)
            loops.append((size // width, lines, outer))
            loops.append((width, columns, replace(of_target, size=width)))
        else:
            return None
    return loops
