"""Values that inputs influence by one comparison at most: masks, positions, token types.

Models compute masks by many small operations: comparisons, logical operations, indexing, expansion.
Where such a value does not depend on an input, it is a constant for each image. Where it depends on
whether the elements of an input equal a number, it has two sides, both of them constants. So all of
these operations are evaluated when the network is lowered, once for each side.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probmask.runtime.lower.views import Axis, Dimension, View


@dataclass(frozen=True)
class Known:
    """A value that depends on the batch size and at most on comparisons of an input.

    Attributes:
        view: Which dimensions run over the batch and over the elements of the input, the root. All
            others have steps of 0.
        sides: The value where the element of the input equals ``number``, and where it does not;
            only one if no input matters. None if the value is the input itself. The dimensions have
            the sizes of the value for a batch of one, or 1 if the value does not vary along them.
        number: The number that the input is compared with.
    """

    view: View
    sides: tuple[Tensor, ...]
    number: int = 0


def per_image(known: Known) -> Tensor | None:
    """Return a value that does not depend on the inputs for a batch of one; None if it may."""
    if len(known.sides) != 1:
        return None
    if any(has_batch(d) and len(d) > 1 for d in known.view.dimensions):
        return None
    return known.sides[0].expand(known.view.sizes(1))


def has_batch(dimension: Dimension) -> bool:
    """Return whether a dimension runs over the batch."""
    return any(factor.axis is Axis.BATCH for factor in dimension)


def compared(known: Known, number: int, sides: tuple[bool, bool]) -> Known:
    """Return a comparison of an input with a number, with its value where they are equal first."""
    shape = (1,) * len(known.view.dimensions)
    return replace(known, sides=tuple(torch.tensor(s).reshape(shape) for s in sides), number=number)
