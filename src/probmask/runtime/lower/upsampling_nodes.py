"""Nodes that enlarge images: transposed convolutions and interpolation."""

from typing import Any

import numpy as np
import torch
from torch import fx

from probmask.runtime.lower.graph import (
    Builder,
    Built,
    Graph,
    arguments_of,
    as_pair,
    image_form,
    label_of,
    trailing_shape,
)
from probmask.runtime.lower.image_inputs import ImageInput, image_input
from probmask.runtime.lower.layer_nodes import as_array, bias_or_zeros, constant_weights
from probmask.runtime.lower.nodes import (
    Form,
    Node,
    Resize,
    TransposedConvolution,
    unset_call,
)
from probmask.runtime.lower.pytorch_calls import OnViews, transposed_call


def build_transposed_convolution(graph: Graph, node: fx.Node) -> Built:
    """Build a transposed convolution with constant weights."""
    arguments = arguments_of(node)
    known = constant_weights(graph, arguments)
    if known is None:
        return None
    weight, bias = known
    rank = weight.dim() - 2
    read, after = image_input(graph, arguments["input"], rank), image_form(node.meta["val"], rank)
    if read is None or after is None:
        return None
    stride, dilation = (as_pair(arguments[key], rank) for key in ("stride", "dilation"))
    padding, extra = (_no_rows(arguments[key], rank) for key in ("padding", "output_padding"))
    kernel = (1,) * (2 - rank) + tuple(weight.shape[2:])
    layer = TransposedConvolution(
        node.name,
        (read.name,),
        unset_call,
        label_of(node),
        form=after,
        input_forms=(read.form,),
        views=read.views,
        trailing=trailing_shape(node, after),
        weight=as_array(weight).reshape(*weight.shape[:2], *kernel),
        bias=bias_or_zeros(bias, after.channels),
        rank=rank,
        stride=stride,
        padding=padding,
        output_padding=extra,
        dilation=dilation,
        groups=arguments["groups"],
    )
    layer.call = transposed_call(layer)
    return layer


def _no_rows(value: Any, rank: int) -> tuple[int, int]:
    """Return a padding of rows and columns; at rank 1 rows have none."""
    rows, columns = as_pair(value, rank)
    return (rows, columns) if rank == 2 else (0, columns)


def build_nearest(rank: int) -> Builder:
    """Return a builder of interpolation that repeats the nearest pixel."""

    def build(graph: Graph, node: fx.Node) -> Built:
        read, forms = resized(graph, node, rank)
        if read is None or forms is None:
            return None
        before, after = forms
        # PyTorch computes the indices: rounding decides about ties.
        call = graph.eager(node, "").call
        rows, columns = torch.arange(before.height).float(), torch.arange(before.width).float()
        found = []
        for ramp in (rows[:, None], columns[None]):
            grid = ramp.expand(before.height, before.width)[None, None]
            chosen = call(grid if rank == 2 else grid[:, :, 0])
            found.append(chosen.reshape(after.height, after.width).numpy().astype(np.int64))
        indices = (found[0][:, 0], found[1][0])
        return build_resize(graph, node, read, after, [(i, i, np.zeros(len(i))) for i in indices])

    return build


def build_linear_interpolation(rank: int) -> Builder:
    """Return a builder of linear or bilinear interpolation."""

    def build(graph: Graph, node: fx.Node) -> Built:
        read, forms = resized(graph, node, rank)
        if read is None or forms is None:
            return None
        before, after = forms
        arguments = arguments_of(node)
        factors = list(arguments["scale_factors"] or [None] * rank)
        factors = [None] * (2 - rank) + factors
        sizes = ((before.height, after.height), (before.width, after.width))
        axes = [
            _neighbors(size, out, factor, aligned=arguments["align_corners"])
            for (size, out), factor in zip(sizes, factors, strict=True)
        ]
        return build_resize(graph, node, read, after, axes)

    return build


def _neighbors(size: int, out: int, factor: float | None, *, aligned: bool) -> tuple[Any, Any, Any]:
    """Return, for each output index, its two source indices and the weight of the second."""
    index = np.arange(out, dtype=np.float32)
    if aligned:
        place = index * np.float32((size - 1) / (out - 1) if out > 1 else 0)
    else:
        scale = np.float32(size / out if factor is None or factor <= 0 else 1 / factor)
        place = np.maximum((index + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    first = np.minimum(place.astype(np.int64), size - 1)
    return first, np.minimum(first + 1, size - 1), np.clip(place - first, 0, 1)


def resized(
    graph: Graph, node: fx.Node, rank: int
) -> tuple[ImageInput | None, tuple[Form, Form] | None]:
    """Return what a selection of rows and columns reads, and the forms of its input and output."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    before, after = (image_form(n.meta["val"], rank) for n in (x, node))
    if before is None or after is None:
        return None, None
    return image_input(graph, x, rank), (before, after)


def build_resize(
    graph: Graph, node: fx.Node, read: ImageInput, after: Form, axes: list[tuple[Any, Any, Any]]
) -> Node:
    """Build a node from the two indices of each row and column, and the weight of the second."""
    made = Resize(
        node.name,
        (read.name,),
        graph.eager(node, "").call,
        label_of(node),
        form=after,
        input_forms=(read.form,),
        views=read.views,
        trailing=trailing_shape(node, after),
        first=(axes[0][0], axes[1][0]),
        second=(axes[0][1], axes[1][1]),
        weights=(axes[0][2].astype(np.float32), axes[1][2].astype(np.float32)),
    )
    if read.views:
        made.call = OnViews(made, made.call)
    return made
