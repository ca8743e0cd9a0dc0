"""Attention: PyTorch's function, and products and a softmax that are written out."""

from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from probmask.runtime.lower.attention_masks import add_mask
from probmask.runtime.lower.copy_nodes import heads
from probmask.runtime.lower.graph import Built, Graph, arguments_of, label_of
from probmask.runtime.lower.nodes import Attention, Form, unset_call
from probmask.runtime.lower.pytorch_calls import ViewCall, root_of
from probmask.runtime.lower.view_nodes import add_result
from probmask.runtime.lower.views import Axis, Factor, View, concrete, merged

_aten = torch.ops.aten
# Operations between those of an attention that change nothing in evaluation.
_NEUTRAL = (_aten.clone.default, _aten.contiguous.default, _aten.dropout.default)


def build_attention(graph: Graph, node: fx.Node) -> Built:
    """Build `scaled_dot_product_attention`."""
    arguments = arguments_of(node)
    if arguments["dropout_p"]:
        return None
    query = arguments["query"]
    scale = arguments["scale"]
    scale = float(query.meta["val"].shape[-1]) ** -0.5 if scale is None else float(scale)
    found = _Operands.of(graph, query, arguments["key"], arguments["value"])
    if found is None:
        return None
    same = found.query_heads == found.key_heads == found.value_heads
    if not same and not arguments["enable_gqa"]:
        return None
    return _attention(
        graph, node, found, arguments["attn_mask"], scale, causal=arguments["is_causal"]
    )


def build_product(graph: Graph, node: fx.Node) -> Built:
    """Build an attention that is written out: softmax(scale · q kᵀ + mask) v."""
    probabilities, value = (_plain(argument) for argument in node.args[:2])
    if probabilities.target not in (_aten.softmax.int, _aten._softmax.default):
        return None
    softmax = arguments_of(probabilities)
    rank = probabilities.meta["val"].dim()
    if softmax["dim"] % rank != rank - 1 or softmax.get("dtype") is not None:
        return None
    scores, mask = _plain(softmax["self"]), None
    if scores.target is _aten.add.Tensor and arguments_of(scores)["alpha"] == 1:
        scores, mask = _plain(scores.args[0]), scores.args[1]
    scores, scale = _unscaled(scores)
    if scores.target not in (_aten.matmul.default, _aten.bmm.default):
        return None
    (query, of_query), (transposed, of_key) = map(_unscaled, scores.args)
    scale *= of_query * of_key
    key = _transposed(transposed)
    if key is None or (mask is not None and not isinstance(mask, fx.Node)):
        return None
    found = _Operands.of(graph, query, key, value)
    if found is None or not found.query_heads == found.key_heads == found.value_heads:
        return None
    return _attention(graph, node, found, mask, scale, causal=False, written_out=True)


def _plain(node: Any) -> Any:
    """Return the node before operations that change nothing in evaluation."""
    while isinstance(node, fx.Node) and node.target in _NEUTRAL:
        node = node.args[0]
    return node


def _unscaled(node: Any) -> tuple[Any, float]:
    """Return the node that a product with a number, or a division by one, scales; and the scale."""
    node = _plain(node)
    if node.target in (_aten.mul.Tensor, _aten.div.Tensor):
        number = node.args[1]
        if isinstance(number, int | float) and number:
            return _plain(node.args[0]), number if node.target is _aten.mul.Tensor else 1 / number
    return node, 1.0


def _transposed(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node transposes in its last two dimensions."""
    if node.target is not _aten.transpose.int:
        return None
    rank = node.meta["val"].dim()
    dims = {int(dim) % rank for dim in node.args[1:3]}  # type: ignore[arg-type]
    first = node.args[0]
    return first if dims == {rank - 1, rank - 2} and isinstance(first, fx.Node) else None


@dataclass(frozen=True)
class _Operands:
    """Queries, keys and values as planes."""

    query: View
    key: View
    value: View

    @classmethod
    def of(cls, graph: Graph, *nodes: Any) -> "_Operands | None":
        query, key, value = (heads(graph, node) for node in nodes)
        if query is None or key is None or value is None:
            return None
        found = cls(query, key, value)
        sizes = {view.shape[-1] for view in (query, key, value)}
        rooted = query.position == 0 and query.shape[-2] == query.positions
        alike = key.shape[-2] == value.shape[-2] and len({v.leading for v in found.views}) == 1
        flat = all(graph.form_of_root(view).height == 1 for view in found.views)
        enough = query.positions > 1 and min(key.positions, value.positions) > 1
        return found if len(sizes) == 1 and rooted and alike and flat and enough else None

    @property
    def views(self) -> tuple[View, View, View]:
        return self.query, self.key, self.value

    @property
    def query_heads(self) -> int:
        return len(_head_channels(self.query))

    @property
    def key_heads(self) -> int:
        return len(_head_channels(self.key))

    @property
    def value_heads(self) -> int:
        return len(_head_channels(self.value))


def _head_channels(view: View) -> list[int]:
    """Return the first channel of each head, in the order of the view's dimensions."""
    factors = [
        factor
        for dimension in view.dimensions[:-2]
        for factor in dimension
        if factor.axis is Axis.CHANNEL
    ]
    steps = combinations(*([i * factor.step for i in range(factor.size)] for factor in factors))
    return [view.channel + sum(step) for step in steps]


def _attention(
    graph: Graph,
    node: fx.Node,
    found: _Operands,
    mask: Any,
    scale: float,
    *,
    causal: bool,
    written_out: bool = False,
) -> Built:
    query, key, _ = found.views
    channels = [_head_channels(view) for view in found.views]
    count, depth, keys = len(channels[0]), query.shape[-1], key.shape[-2]
    if any(count % len(own) for own in channels[1:]) or scale <= 0:
        return None
    repeated = [np.repeat(own, count // len(own)).tolist() for own in channels]
    result = _result(query, count, depth)
    if result.shape != tuple(concrete(size) for size in node.meta["val"].shape):
        return None
    forms = [graph.form_of_root(view) for view in found.views]
    made = Attention(
        node.name,
        tuple(view.root for view in found.views),
        unset_call,
        label_of(node),
        form=Form(forms[0].leading, count * depth, 1, query.positions, tokens=True),
        input_forms=tuple(forms),
        views=found.views,
        heads=tuple(zip(*repeated, strict=True)),
        depth=depth,
        keys=keys,
        scale=scale,
        causal=causal,
        written_out=written_out,
    )
    if mask is not None and not add_mask(graph, made, mask, found.query):
        return None
    made.call = _AttentionCall(made, result)
    return add_result(graph, node, made, result)


def _result(query: View, count: int, depth: int) -> View:
    """Return the view of the output: heads one after the other, with the query's dimensions."""
    step = depth
    dimensions = []
    for dimension in reversed(query.dimensions[:-2]):
        factors = []
        for factor in reversed(dimension):
            if factor.axis is Axis.BATCH:
                factors.append(factor)
                continue
            factors.append(Factor(factor.size, Axis.CHANNEL, step))
            step *= factor.size
        dimensions.append(merged(factors[::-1]))
    own = (*dimensions[::-1], query.dimensions[-2], merged([Factor(depth, Axis.CHANNEL, 1)]))
    return replace(query.with_root(query.root, count * depth), dimensions=own)


class _AttentionCall:
    """Attention in PyTorch."""

    def __init__(self, node: Attention, result: View) -> None:
        self.node, self.result = node, result
        self.mask = None if node.mask is None else torch.from_numpy(node.mask)[None]

    def __call__(self, *inputs: Tensor) -> Tensor:
        node = self.node
        tensors = [ViewCall(view)(x) for view, x in zip(node.views, inputs, strict=False)]
        batch = len(inputs[0])
        query, key, value = (
            x.reshape(batch, len(_head_channels(view)), *x.shape[-2:])
            if _is_batch_first(view)
            else x
            for view, x in zip(node.views, tensors, strict=True)
        )
        mask = inputs[3] if len(inputs) > 3 else self.mask
        if batch == 0:
            mask = None  # its sizes cannot be inferred
        if mask is not None:
            rows = mask.reshape(len(mask), -1, node.mask_heads, node.keys)
            mask = rows.permute(0, 2, 1, 3)
        out = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=node.causal,
            scale=node.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        if mask is not None and node.written_out:
            hidden = (mask == float("-inf")).all(-1, keepdim=True)
            out = out.masked_fill(hidden, float("nan"))
        shape = [*tensors[0].shape[:-1], out.shape[-1]]
        rows = root_of(self.result, out.reshape(shape))
        return rows.reshape(batch, *node.trailing)


def _is_batch_first(view: View) -> bool:
    return [factor.axis for factor in view.dimensions[0]] in ([Axis.BATCH], [])
