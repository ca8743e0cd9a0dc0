"""Pooling: the largest or the mean of windows."""

from typing import Any

import numpy as np
from torch import fx

from probmask.runtime.lower.graph import (
    Builder,
    Built,
    Graph,
    arguments_of,
    as_pair,
    label_of,
    padding_of,
    plain,
    tail,
)
from probmask.runtime.lower.nodes import Form, Pair, Pool


def build_max_pool(rank: int) -> Builder:
    """A builder of max pooling of so many dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        arguments = arguments_of(node)
        if not _of_a_batch(node, rank) or as_pair(arguments["dilation"], rank) != (1, 1):
            return None
        return _pool(graph, node, rank, windows_of(arguments, node, rank), largest=True)

    return build


def build_average_pool(rank: int) -> Builder:
    """A builder of average pooling of so many dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        if not _of_a_batch(node, rank):
            return None
        arguments = arguments_of(node)
        windows = windows_of(arguments, node, rank)
        forced = arguments.get("divisor_override")
        if forced is not None:
            sizes = [np.ones(len(windows[0])), np.full(len(windows[1]), float(forced))]
        elif arguments["count_include_pad"]:
            sizes = padded_sizes_of(arguments, node, rank)
        else:
            sizes = _lengths(windows)
        return _pool(graph, node, rank, windows, largest=False, sizes=sizes)

    return build


def build_adaptive_pool(rank: int) -> Builder:
    """A builder of adaptive average pooling of so many dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        if not _of_a_batch(node, rank):
            return None
        lengths = zip(lengths_of(node.args[0], rank), lengths_of(node, rank), strict=True)
        windows = [
            [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)]
            for size, out in lengths
        ]
        return _pool(graph, node, rank, windows, largest=False)

    return build


def build_mean(graph: Graph, node: fx.Node) -> Built:
    """The mean of all positions of a channel."""
    arguments = arguments_of(node)
    rank = arguments["self"].meta["val"].dim() - 2
    dims = {dim % (rank + 2) for dim in arguments["dim"] or ()}
    if rank not in (1, 2) or dims != set(range(2, rank + 2)) or arguments["dtype"] is not None:
        return None
    if not _of_a_batch(node, rank):
        return None
    windows = [[(0, length)] for length in lengths_of(arguments["self"], rank)]
    return _pool(graph, node, rank, windows, largest=False)


def _of_a_batch(node: fx.Node, rank: int) -> bool:
    """Whether a kernel can read what is pooled: a single image without a batch it cannot."""
    x = node.args[0]
    return isinstance(x, fx.Node) and plain(x.meta["val"], rank) is not None


def _pool(
    graph: Graph,
    node: fx.Node,
    rank: int,
    windows: list[list[Pair]],
    *,
    largest: bool,
    sizes: list[Any] | None = None,
) -> Built:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    before = plain(x.meta["val"], rank)
    if before is None or any(end <= start for axis in windows for start, end in axis):
        return None
    after = Form(before.unit, before.channels, len(windows[0]), len(windows[1]))
    sizes = sizes or _lengths(windows)
    return Pool(
        node.name,
        (graph.source(x),),
        graph.eager(node, "").call,
        label_of(node),
        form=after,
        input_forms=(before,),
        tail=tail(node, after),
        largest=largest,
        rows=tuple(windows[0]),
        columns=tuple(windows[1]),
        divisors=(1 / np.multiply.outer(sizes[0], sizes[1])).astype(np.float32),
    )


def _lengths(windows: list[list[Pair]]) -> list[Any]:
    return [np.array([end - start for start, end in axis], float) for axis in windows]


def lengths_of(node: Any, rank: int) -> Pair:
    """Rows and columns of a tensor; of rank 1 there is one row."""
    sizes = tuple(node.meta["val"].shape[-2:]) if rank == 2 else (1, node.meta["val"].shape[-1])
    return int(sizes[0]), int(sizes[1])


def axes_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[tuple[int, ...]]:
    """Per axis: kernel, stride, padding, size before and after."""
    kernel = as_pair(arguments["kernel_size"], rank)
    stride = as_pair(arguments["stride"] or arguments["kernel_size"], rank)
    ((top, _), (left, _)) = padding_of(arguments["padding"], kernel, (1, 1), rank)
    before, after = lengths_of(node.args[0], rank), lengths_of(node, rank)
    return list(zip(kernel, stride, (top, left), before, after, strict=True))


def windows_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[list[Pair]]:
    """Where each output of a pooling begins and ends to read, along rows and columns."""
    return [
        [(max(0, o * s - p), min(size, o * s - p + k)) for o in range(out)]
        for k, s, p, size, out in axes_of(arguments, node, rank)
    ]


def padded_sizes_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[Any]:
    """Of each window, how much of it lies in the image or its padding."""
    return [
        np.array([min(size + p, o * s - p + k) - (o * s - p) for o in range(out)], float)
        for k, s, p, size, out in axes_of(arguments, node, rank)
    ]
