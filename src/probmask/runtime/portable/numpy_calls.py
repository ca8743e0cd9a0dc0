"""How NumPy computes the nodes that do not run on the kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.errors import InputError
from probmask.runtime.lower.nodes import AttendedKeys, Embed, Move, Node

Array = npt.NDArray[Any]


def numpy_call(node: Node) -> Callable[..., Any] | None:
    """Return a function that computes a node; None if the kernels do."""
    if isinstance(node, Move):
        return _MoveCall(node)
    if isinstance(node, Embed):
        return _EmbedCall(node)
    return _AttendedCall(node) if isinstance(node, AttendedKeys) else None


class _MoveCall:
    def __init__(self, node: Move) -> None:
        assert node.view is not None
        self.view = node.view

    def __call__(self, root: Array) -> Array:
        root = np.ascontiguousarray(root)
        sizes, steps, offset = self.view.strides(len(root))
        strides = [step * root.itemsize for step in steps]
        start = root.reshape(-1)[offset:]
        moved = np.lib.stride_tricks.as_strided(start, sizes, strides, writeable=False)
        return moved.reshape(self.view.sizes(len(root))).copy()


class _EmbedCall:
    def __init__(self, node: Embed) -> None:
        self.node = node

    def __call__(self, indices: Array) -> Array:
        table = self.node.table
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < len(table):
            low, high = int(indices.min()), int(indices.max())
            raise InputError(
                f"{self.node.inputs[0]} has numbers from {low} to {high}; {self.node.label} takes "
                f"integers from 0 to {len(table) - 1}."
            )
        return table[indices]


class _AttendedCall:
    def __init__(self, node: AttendedKeys) -> None:
        self.node = node

    def __call__(self, tokens: Array) -> Array:
        keys = tokens.shape[1]
        sides = self.node.sides(keys)
        equal = np.tile(tokens == self.node.number, (1, sides[0].shape[1] // keys))
        return np.where(equal[:, None], *sides)
