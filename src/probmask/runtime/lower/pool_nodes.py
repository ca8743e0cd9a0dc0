"""Nodes of pooling: the maximum or the mean of windows of sequences, images and volumes."""

from typing import Any

import numpy as np
from torch import fx

from probmask.runtime.lower.graph import (
    Builder,
    Built,
    Graph,
    Triple,
    arguments_of,
    as_triple,
    image_form,
    label_of,
    padding_of,
    trailing_shape,
)
from probmask.runtime.lower.image_inputs import image_input
from probmask.runtime.lower.nodes import Form, Pair, Pool
from probmask.runtime.lower.pytorch_calls import OnViews

# The start and end of each window along slices, rows and columns.
_Windows = list[list[Pair]]


def build_max_pool(rank: int) -> Builder:
    """Return a builder of max pooling in 1, 2 or 3 dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        arguments = arguments_of(node)
        if not _has_batch(node, rank) or as_triple(arguments["dilation"], rank) != (1, 1, 1):
            return None
        return _pool(graph, node, rank, _windows_of(arguments, node, rank), is_max=True)

    return build


def build_average_pool(rank: int) -> Builder:
    """Return a builder of average pooling in 1, 2 or 3 dimensions."""

    def build(graph: Graph, node: fx.Node) -> Built:
        if not _has_batch(node, rank):
            return None
        arguments = arguments_of(node)
        windows = _windows_of(arguments, node, rank)
        divisor = arguments.get("divisor_override")
        if divisor is not None:
            counts = [len(axis) for axis in windows]
            sizes = [np.ones(counts[0]), np.ones(counts[1]), np.full(counts[2], float(divisor))]
        elif arguments["count_include_pad"]:
            sizes = _padded_lengths_of(arguments, node, rank)
        else:
            sizes = _window_lengths(windows)
        return _pool(graph, node, rank, windows, is_max=False, sizes=sizes)

    return build


def build_adaptive_pool(rank: int) -> Builder:
    """Return a builder of adaptive average pooling in 1, 2 or 3 dimensions."""

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
    if rank not in (1, 2, 3) or dims != set(range(2, rank + 2)) or arguments["dtype"] is not None:
        return None
    if not _has_batch(node, rank):
        return None
    windows = [[(0, length)] for length in _lengths_of(arguments["self"], rank)]
    return _pool(graph, node, rank, windows, is_max=False)


def _has_batch(node: fx.Node, rank: int) -> bool:
    """Return whether the input has a batch, which kernels need."""
    return _image_form_before(node, rank) is not None


def _image_form_before(node: fx.Node, rank: int) -> Form | None:
    x = node.args[0]
    return image_form(x.meta["val"], rank) if isinstance(x, fx.Node) else None


def _pool(
    graph: Graph,
    node: fx.Node,
    rank: int,
    windows: _Windows,
    *,
    is_max: bool,
    sizes: list[Any] | None = None,
) -> Built:
    read, before = image_input(graph, node.args[0], rank), _image_form_before(node, rank)
    empty = any(end <= start for axis in windows for start, end in axis)
    if read is None or before is None or empty:
        return None
    slices, rows, columns = windows
    channels = before.channels // _lengths_of(node.args[0], rank)[0]
    after = Form(before.leading, channels * len(slices), len(rows), len(columns))
    of_slices, of_rows, of_columns = sizes or _window_lengths(windows)
    made = Pool(
        node.name,
        (read.name,),
        graph.eager(node, "").call,
        label_of(node),
        form=after,
        input_forms=(read.form,),
        views=read.views,
        trailing=trailing_shape(node, after),
        is_max=is_max,
        rows=tuple(rows),
        columns=tuple(columns),
        factors=(1 / np.multiply.outer(of_rows, of_columns)).astype(np.float32),
    )
    if rank == 3:
        made.slices, made.slice_factors = tuple(slices), (1 / of_slices).astype(np.float32)
    if read.views:
        made.call = OnViews(made, made.call)
    return made


def _window_lengths(windows: _Windows) -> list[Any]:
    return [np.array([end - start for start, end in axis], float) for axis in windows]


def _lengths_of(node: Any, rank: int) -> Triple:
    """Return the numbers of slices, rows and columns; those that ``rank`` lacks are 1."""
    return as_triple(tuple(node.meta["val"].shape[2:]), rank)


def _axes_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> list[tuple[int, ...]]:
    """Return kernel size, stride, padding, input size and output size of each axis."""
    kernel = as_triple(arguments["kernel_size"], rank)
    stride = as_triple(arguments["stride"] or arguments["kernel_size"], rank)
    padding = [before for before, _ in padding_of(arguments["padding"], kernel, (1, 1, 1), rank)]
    before, after = _lengths_of(node.args[0], rank), _lengths_of(node, rank)
    return list(zip(kernel, stride, padding, before, after, strict=True))


def _windows_of(arguments: dict[str, Any], node: fx.Node, rank: int) -> _Windows:
    """Return the start and end of each window."""
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
