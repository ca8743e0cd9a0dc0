"""Nodes of pooling: the maximum or the mean of windows."""

from typing import Any

import numpy as np
from torch import fx

from probmask.runtime.lower.graph import (
    Builder,
    Built,
    Graph,
    arguments_of,
    as_pair,
    image_form,
    label_of,
    padding_of,
    trailing_shape,
)
from probmask.runtime.lower.nodes import Form, Pair, Pool


def build_max_pool(rank: int) -> Builder:
    """Return a builder of max pooling in 1 or 2 dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        arguments = arguments_of(node)
        if not _has_batch(node, rank) or as_pair(arguments["dilation"], rank) != (1, 1):
            return None
        return _pool(graph, node, rank, _windows_of(arguments, node, rank), is_max=True)

    return build


def build_average_pool(rank: int) -> Builder:
    """Return a builder of average pooling in 1 or 2 dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        if not _has_batch(node, rank):
            return None
        arguments = arguments_of(node)
        windows = _windows_of(arguments, node, rank)
        divisor = arguments.get("divisor_override")
        if divisor is not None:
            sizes = [np.ones(len(windows[0])), np.full(len(windows[1]), float(divisor))]
        elif arguments["count_include_pad"]:
            sizes = _padded_lengths_of(arguments, node, rank)
        else:
            sizes = _window_lengths(windows)
        return _pool(graph, node, rank, windows, is_max=False, sizes=sizes)

    return build


def build_adaptive_pool(rank: int) -> Builder:
    """Return a builder of adaptive average pooling in 1 or 2 dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        if not _has_batch(node, rank):
            return None
        lengths = zip(_lengths_of(node.args[0], rank), _lengths_of(node, rank), strict=True)
        windows = [
            [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)]
            for size, out in lengths
        ]
        return _pool(graph, node, rank, windows, is_max=False)

    return build


def build_mean(graph: Graph, node: fx.Node) -> Built:
    """Build the mean over all positions of a channel."""
    arguments = arguments_of(node)
    rank = arguments["self"].meta["val"].dim() - 2
    dims = {dim % (rank + 2) for dim in arguments["dim"] or ()}
    if rank not in (1, 2) or dims != set(range(2, rank + 2)) or arguments["dtype"] is not None:
        return None
    if not _has_batch(node, rank):
        return None
    windows = [[(0, length)] for length in _lengths_of(arguments["self"], rank)]
    return _pool(graph, node, rank, windows, is_max=False)


def _has_batch(node: fx.Node, rank: int) -> bool:
    """Return whether the input has a batch, which kernels need."""
    x = node.args[0]
    return isinstance(x, fx.Node) and image_form(x.meta["val"], rank) is not None


def _pool(
    graph: Graph,
    node: fx.Node,
    rank: int,
    windows: list[list[Pair]],
    *,
    is_max: bool,
    sizes: list[Any] | None = None,
) -> Built:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    before = image_form(x.meta["val"], rank)
    if before is None or any(end <= start for axis in windows for start, end in axis):
        return None
    after = Form(before.leading, before.channels, len(windows[0]), len(windows[1]))
    sizes = sizes or _window_lengths(windows)
    return Pool(
        node.name,
        (graph.source(x),),
        graph.eager(node, "").call,
        label_of(node),
        form=after,
        input_forms=(before,),
        trailing=trailing_shape(node, after),
        is_max=is_max,
        rows=tuple(windows[0]),
        columns=tuple(windows[1]),
        factors=(1 / np.multiply.outer(sizes[0], sizes[1])).astype(np.float32),
    )


def _window_lengths(windows: list[list[Pair]]) -> list[Any]:
    return [np.array([end - start for start, end in axis], float) for axis in windows]


def _lengths_of(node: Any, rank: int) -> Pair:
    """Return the numbers of rows and columns of a tensor; at rank 1 there is one row."""
    sizes = tuple(node.meta["val"].shape[-2:]) if rank == 2 else (1, node.meta["val"].shape[-1])
    return int(sizes[0]), int(sizes[1])


def _axes_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[tuple[int, ...]]:
    """Return kernel size, stride, padding, input size and output size of each axis."""
    kernel = as_pair(arguments["kernel_size"], rank)
    stride = as_pair(arguments["stride"] or arguments["kernel_size"], rank)
    ((top, _), (left, _)) = padding_of(arguments["padding"], kernel, (1, 1), rank)
    before, after = _lengths_of(node.args[0], rank), _lengths_of(node, rank)
    return list(zip(kernel, stride, (top, left), before, after, strict=True))


def _windows_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[list[Pair]]:
    """Return the start and end of each window, along rows and columns."""
    return [
        [(max(0, o * s - p), min(size, o * s - p + k)) for o in range(out)]
        for k, s, p, size, out in _axes_of(arguments, node, rank)
    ]


def _padded_lengths_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[Any]:
    """Return the length of each window within the image and its padding."""
    return [
        np.array([min(size + p, o * s - p + k) - (o * s - p) for o in range(out)], float)
        for k, s, p, size, out in _axes_of(arguments, node, rank)
    ]
