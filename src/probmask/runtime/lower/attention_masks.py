"""Masks of attentions: constants, comparisons of an input with a number, and other tensors."""

import numpy as np
import torch
from torch import Tensor, fx

from probmask.runtime.lower.graph import Graph
from probmask.runtime.lower.known import Known, compared
from probmask.runtime.lower.nodes import AttendedKeys, Attention, Fallback, Floats, Form, unset_call
from probmask.runtime.lower.views import Axis, Factor, View, concrete, merged


def add_mask(graph: Graph, made: Attention, mask: fx.Node, query: View) -> bool:
    """Let an attention add a mask to its scores; return False if no kernel can."""
    value = mask.meta["val"]
    if value.dtype not in (torch.bool, torch.float32) or len(query.dimensions) != 4:
        return False
    if [factor.axis for factor in query.dimensions[0]] not in ([Axis.BATCH], []):
        return False
    shape = [1] * (4 - value.dim()) + [concrete(size) for size in value.shape]
    heads, queries = len(made.heads), query.shape[-2]
    if shape[1] not in (1, heads) or shape[2] not in (1, queries) or shape[3] != made.keys:
        return False
    constant = graph.shared_constant(mask)
    if constant is not None:
        return _add_constant(made, constant, shape[1])
    if str(value.shape[0]) != query.leading or value.dim() != 4:
        return False
    found = _compared_keys(graph, made, mask) or _in_order(graph, mask, shape)
    name, own_heads, rows = found or _computed(graph, mask, shape)
    form = Form(made.input_forms[0].leading, own_heads * made.keys, 1, rows, tokens=rows > 1)
    made.inputs, made.input_forms = (*made.inputs, name), (*made.input_forms, form)
    made.mask_heads = own_heads
    return True


def _add_constant(made: Attention, constant: Tensor, heads: int) -> bool:
    if constant.dim() == 4 and len(constant) != 1:
        return False
    rows = _additive_rows(constant)[0].contiguous().numpy().copy()
    hidden = np.arange(made.keys) > np.arange(len(rows))[:, None]
    if heads == 1 and len(rows) > 1 and np.array_equal(rows, np.where(hidden, -np.inf, 0)):
        made.causal = True
    elif rows.any():
        made.mask, made.mask_heads = rows, heads
    return True


def _compared_keys(graph: Graph, made: Attention, mask: fx.Node) -> tuple[str, int, int] | None:
    """Return the node of a mask of keys that equal a number, its heads and its queries."""
    known = graph.known.get(mask.name)
    if known is not None and not known.sides and mask.meta["val"].dtype == torch.bool:
        known = compared(known, 0, (False, True))
    if known is None or len(known.sides) != 2 or not _is_of_keys(known, made.keys):
        return None
    sides = [_additive(side) for side in known.sides]
    heads, queries = (sides[0] + sides[1]).shape[1:3]
    where_equal, elsewhere = (
        _additive_rows(side.expand(1, heads, queries, made.keys))[0].contiguous().numpy().copy()
        for side in sides
    )
    source, rows = graph.resolve(known.view.root), (where_equal, elsewhere)
    return _attended(graph, source, known.number, rows, made.keys), heads, queries


def _is_of_keys(known: Known, keys: int) -> bool:
    """Return whether only the first dimension runs over the batch, and the last over the input."""
    batch, *others, last = known.view.dimensions
    first = [factor.axis for factor in batch] in ([Axis.BATCH], [])
    whole = last == merged([Factor(keys, Axis.CHANNEL, 1)]) and known.view.channel == 0
    still = not any(factor.step for dimension in others for factor in dimension)
    return first and whole and still and known.view.channels == keys


def _attended(
    graph: Graph, source: str, number: int, sides: tuple[Floats, Floats], keys: int
) -> str:
    """Return the name of a node that computes a mask, shared by the attentions that have it."""
    made = AttendedKeys("", (source,), unset_call, f"{source} (mask)", reason="a mask")
    made.number = number
    if not all(map(np.array_equal, sides, made.sides(keys))):
        made.where_equal, made.elsewhere = sides
    known = [node for node in graph.nodes.values() if isinstance(node, AttendedKeys)]
    for node in known:
        same = (node.inputs, node.number) == (made.inputs, number)
        if same and all(map(np.array_equal, sides, node.sides(keys))):
            return node.name
    made.name = f"{source}_attended{len(known) or ''}"
    made.call = _AttendedCall(made)
    graph.nodes[made.name] = made
    return made.name


def _in_order(graph: Graph, mask: fx.Node, shape: list[int]) -> tuple[str, int, int] | None:
    """Return the tensor that a mask of all heads is a view of, if a kernel can read it as it is."""
    view = graph.view_of(mask)
    if view is None or not view.is_canonical() or shape[1] != 1:
        return None
    same = graph.form_of(view.root) in (None, graph.form_of_root(view))
    fits = same and (view.channels, view.positions) == (shape[3], shape[2])
    return (view.root, 1, shape[2]) if fits else None


def _computed(graph: Graph, mask: fx.Node, shape: list[int]) -> tuple[str, int, int]:
    """Return the node of a mask that PyTorch computes, shared by all attentions."""
    source = graph.source(mask)
    name = f"{source}_mask"
    if name not in graph.nodes:
        graph.nodes[name] = Fallback(
            name, (source,), _additive_rows, f"{source} (mask)", reason="a mask"
        )
    return name, shape[1], shape[2]


def _additive(mask: Tensor) -> Tensor:
    """Return a mask that is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))


def _additive_rows(mask: Tensor) -> Tensor:
    """Return a mask as an additive one, of batch × queries × (heads · keys)."""
    mask = _additive(mask)
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    batch, own, queries, keys = mask.shape
    return mask.permute(0, 2, 1, 3).reshape(batch, queries, own * keys)


class _AttendedCall:
    """A mask of keys in PyTorch."""

    def __init__(self, node: AttendedKeys) -> None:
        self.node = node

    def __call__(self, tokens: Tensor) -> Tensor:
        keys = tokens.shape[1]
        where_equal, elsewhere = map(torch.from_numpy, self.node.sides(keys))
        equal = (tokens == self.node.number).repeat(1, where_equal.shape[1] // keys)
        return torch.where(equal[:, None], where_equal, elsewhere)
