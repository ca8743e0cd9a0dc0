"""Why an operation runs in PyTorch, as `explain` prints it."""

import operator

import torch
from torch import Tensor, fx

from probmask.runtime.lower.copy_nodes import is_ambiguous
from probmask.runtime.lower.graph import Graph, computes_size


def fallback_reason(graph: Graph, node: fx.Node, *, has_kernel: bool) -> str:
    """Return why no kernel computes an operation; ``has_kernel``: kernels compute it elsewhere."""
    if computes_size(node):
        return "a size"
    if node.name in graph.views:
        return "a view"
    if not has_kernel:
        return "no kernel"
    if node.target is operator.getitem:
        return "a part of what PyTorch computes"
    inputs = [x for x in node.all_input_nodes if not computes_size(x)]
    others = {
        str(value.dtype).removeprefix("torch.")
        for value in (x.meta.get("val") for x in (node, *inputs))
        if isinstance(value, Tensor) and value.dtype != torch.float32
    }
    if others:
        return f"kernels compute in float32, not in {min(others)}"
    if any(_has_unknown_layout(graph, x) for x in inputs):
        return "its input does not come from a kernel"
    return "no kernel for this form"


def _has_unknown_layout(graph: Graph, node: fx.Node) -> bool:
    """Return whether kernels cannot tell the channels of a value, because none computes it."""
    if graph.shared_constant(node) is not None or graph.form_of(graph.source(node)) is not None:
        return False
    view = graph.view_of(node)
    return view is None or is_ambiguous(graph, view)
