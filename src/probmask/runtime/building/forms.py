"""How tensors of an exported program are seen by the kernels, and what builders return."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from probmask.runtime.exporting import size_of
from probmask.runtime.nodes import Form, Node

if TYPE_CHECKING:
    from probmask.runtime.lower import Lowering

# None if there is no kernel, True if another node now does it.
Built = Node | bool | None
Builder = Callable[["Lowering", fx.Node], Built]


def plain(value: Any, rank: int) -> Form | None:
    """A batch of images of the rank (2, 1 or 0), in single precision on the CPU."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != rank + 2:
        return None
    batch, *sizes = map(size_of, value.shape)
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(known) < len(sizes):
        return None
    channels, height, width = (known[0], *(1,) * (2 - rank), *known[1:])
    return Form((str(batch),), channels, height, width)


def plain_of_any_rank(value: Any) -> Form | None:
    """A batch of images, of sequences or of vectors."""
    known = isinstance(value, Tensor) and 2 <= value.dim() <= 4
    return plain(value, value.dim() - 2) if known else None


def rows(value: Any) -> Form | None:
    """A tensor whose last dimension are the channels, and all others are counted as images."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() < 2:
        return None
    *unit, features = map(size_of, value.shape)
    if not isinstance(features, int) or not features:
        return None
    return Form(tuple(str(size) for size in unit), features)


def tail(node: fx.Node, form: Form) -> tuple[int, ...]:
    """The output's shape without its leading dimensions."""
    return tuple(int(size) for size in node.meta["val"].shape[len(form.unit) :])
