"""Nodes of padding: constant numbers, or rows and columns of the image itself."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from probmask.runtime.lower.copy_nodes import readable
from probmask.runtime.lower.graph import Built, Graph, arguments_of
from probmask.runtime.lower.joined_nodes import Piece, joined
from probmask.runtime.lower.upsampling_nodes import build_resize, resized
from probmask.runtime.lower.views import VARYING, concrete

# The modes of padding with rows and columns of the image itself, as NumPy calls them.
_MODES: dict[str, Any] = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def build_padding(graph: Graph, node: fx.Node) -> Built:
    """Build padding by a constant number, or by rows and columns of an image."""
    mode = arguments_of(node).get("mode", "constant")
    if mode == "constant":
        return _constant(graph, node)
    return _of_image(graph, node, _MODES[mode]) if mode in _MODES else None


def _of_image(graph: Graph, node: fx.Node, mode: Any) -> Built:
    """Build a selection of rows and columns, some of which are repeated."""
    arguments = arguments_of(node)
    pad, rank = arguments["pad"], node.meta["val"].dim() - 2
    if rank not in (1, 2) or len(pad) > 2 * rank or min(pad) < 0:
        return None
    read, forms = resized(graph, node, rank)
    if read is None or forms is None:
        return None
    before, after = forms
    rows, columns = (tuple(pad[i : i + 2]) or (0, 0) for i in (2, 0))
    axes = []
    for size, added in ((before.height, rows), (before.width, columns)):
        index: Any = np.pad(np.arange(size), added, mode=mode)
        axes.append((index, index, np.zeros(len(index))))
    return build_resize(graph, node, read, after, axes)


def _constant(graph: Graph, node: fx.Node) -> Built:
    """Build padding by a constant number; a negative padding crops."""
    arguments = arguments_of(node)
    view = readable(graph, arguments["self"])
    pad, number = list(arguments["pad"]), arguments["value"] or 0.0
    if view is None:
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
    return joined(graph, node, [*edges, Piece(view, inner)], dim, call)


def _edges(
    whole: list[int], within: list[int], starts: dict[int, int], number: float
) -> list[Piece]:
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
                edges.append(Piece(torch.full(shape, float(number)), places | {dim: first}))
    return edges


@dataclass(frozen=True)
class _Padding:
    """Pad the only tensor; the constants are its padding."""

    pad: tuple[int, ...]
    number: float

    def __call__(self, found: list[Any]) -> Tensor:
        (x,) = (x for x in found if isinstance(x, Tensor))
        return nn.functional.pad(x, self.pad, value=self.number)
