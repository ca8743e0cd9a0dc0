"""Inputs of the operations on images: plain tensors, views of other tensors, and copies.

A view that has the order of an image is read in place. Any other, such as every second row and
column, is copied to a tensor of its own.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from probmask.runtime.lower.copy_loops import parts_of
from probmask.runtime.lower.copy_nodes import new_root, rearranged
from probmask.runtime.lower.graph import Graph, arguments_of, image_form
from probmask.runtime.lower.nodes import Form, Pair
from probmask.runtime.lower.pytorch_calls import contiguous_view
from probmask.runtime.lower.views import Axis, View

PADDINGS = (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.pad.default)


@dataclass(frozen=True)
class ImageInput:
    """The tensor that an operation on images reads, and which part of it; all if no views."""

    name: str
    form: Form
    views: tuple[View, ...] = ()


def image_input(graph: Graph, argument: Any, rank: int) -> ImageInput | None:
    """Return how a kernel reads an image of ``rank`` dimensions; None without a batch."""
    if not isinstance(argument, fx.Node):
        return None
    form = image_form(argument.meta.get("val"), rank)
    if form is None:
        return None
    plain = ImageInput(graph.source(argument), form)
    own = graph.form_of(plain.name)
    view = graph.view_of(argument)
    if own == form or view is None or not _has_planes(graph, view):
        return plain
    root = graph.form_of_root(view)
    if view.is_image() and (root.height, root.width) == (form.height, form.width):
        return ImageInput(view.root, root, (view,))
    copied = _copied(graph, argument, view, form, last_channel=2 if rank == 3 else 1)
    return plain if copied is None else ImageInput(copied, form)


def _has_planes(graph: Graph, view: View) -> bool:
    """Return whether the kernels have the root, or read it as an image."""
    return graph.form_of(view.root) is not None or (view.positions > 1 and not view.tokens)


def unpadded(x: fx.Node, rank: int) -> tuple[fx.Node, tuple[Pair, Pair, Pair]]:
    """Return what is padded with zeros, and the padding of slices, rows and columns.

    A convolution pads by itself, without a copy.
    """
    none = ((0, 0), (0, 0), (0, 0))
    if x.target not in PADDINGS:
        return x, none
    arguments = arguments_of(x)
    pad = arguments["pad"]
    zeros = arguments.get("mode", "constant") == "constant" and not arguments["value"]
    spatial = len(pad) <= 2 * rank and len(pad) % 2 == 0
    if not zeros or not spatial or not all(isinstance(n, int) and n >= 0 for n in pad):
        return x, none
    columns, rows, slices = ((pad[i], pad[i + 1]) if i < len(pad) else (0, 0) for i in (0, 2, 4))
    return arguments["self"], (slices, rows, columns)


def _copied(
    graph: Graph, argument: fx.Node, view: View, form: Form, *, last_channel: int
) -> str | None:
    """Return the name of a copy of a view, as an image; None if no kernel can copy it.

    ``last_channel`` is the last dimension of the view that becomes channels.
    """
    name = f"{argument.name}_image"
    if name in graph.nodes:
        return name
    if not view.has_batch() or not view.has_batch_first():
        return None
    axes = [
        Axis.BATCH
        if factor.axis is Axis.BATCH
        else Axis.CHANNEL
        if 1 <= i <= last_channel
        else Axis.POSITION
        for i, dimension in enumerate(view.dimensions)
        for factor in dimension
    ]
    target = replace(new_root(view, axes, name), tokens=False)
    root = graph.form_of_root(view)
    parts = parts_of(view, target, root)
    if parts is None:
        return None
    graph.nodes[name] = rearranged(
        name,
        parts,
        [root] * len(parts),
        partial(contiguous_view, view=view),
        f"{argument.name} (copy)",
        form=form,
        trailing=tuple(int(size) for size in argument.meta["val"].shape[1:]),
    )
    return name
