"""BatchNorm with known statistics: part of the layer before it, or a layer of its own."""

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from probmask.runtime.arguments import label_of, scale_and_shift
from probmask.runtime.building.forms import Built, plain_of_any_rank, tail
from probmask.runtime.eager import in_pytorch, undefined
from probmask.runtime.nodes import Convolution

if TYPE_CHECKING:
    from probmask.runtime.lower import Lowering

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


def build_batch_norm(to: "Lowering", node: fx.Node) -> Built:
    """Nothing by itself, if `build_normalized` makes it of its first result."""
    return True if _has_kernel(to, node) else None


def build_normalized(to: "Lowering", node: fx.Node) -> Built:
    """The first result of a BatchNorm: folded into the layer before it, or one of its own."""
    norm, _ = node.args
    if not isinstance(norm, fx.Node) or norm.target is not BATCH_NORM or not _has_kernel(to, norm):
        return None
    x, weight, bias, mean, variance, _, epsilon = norm.args
    statistics: Any = [to.constant(part) for part in (weight, bias, mean, variance)]
    scale, shift = scale_and_shift(*statistics, epsilon=float(epsilon))  # type: ignore[arg-type]
    source = to.source(x)
    layer = to.nodes.get(source)
    if isinstance(layer, Convolution) and to.used_once(source) and _fold(layer, scale, shift):
        to.rename(layer, node.name)
        return True
    form = plain_of_any_rank(node.meta["val"])
    assert form is not None
    layer = Convolution(
        node.name,
        (source,),
        undefined,
        label_of(norm),
        form=form,
        input_forms=(form,),
        tail=tail(node, form),
        weight=scale.astype(np.float32).reshape(-1, 1, 1, 1),
        bias=shift.astype(np.float32),
        rank=node.meta["val"].dim() - 2,
        groups=form.channels,
    )
    layer.call = in_pytorch(layer)
    return layer


def _has_kernel(to: "Lowering", norm: fx.Node) -> bool:
    """Whether it normalizes single precision by known statistics, and nobody asks for these."""
    x, *statistics = norm.args[:5]
    known = all(part is None or to.constant(part) is not None for part in statistics)
    used = [user.args[1] if user.target is operator.getitem else None for user in norm.users]
    varies = isinstance(x, fx.Node) and to.constant(x) is None
    single = varies and plain_of_any_rank(x.meta["val"]) is not None  # type: ignore[union-attr]
    return known and None not in statistics[2:] and used == [0] and single


def _fold(layer: Convolution, scale: Any, shift: Any) -> bool:
    """Make the BatchNorm part of the layer, if it comes right after the layer's own sum."""
    assert layer.form is not None
    channels_first = layer.rank > 0 or len(layer.form.unit) == 1
    if not channels_first or not layer.after.is_nothing or len(layer.inputs) > 1:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        weight = (layer.weight * scale[:, None, None, None]).astype(np.float32)
        bias = (layer.bias * scale + shift).astype(np.float32)
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        return False  # the product may overflow where the two factors, one by one, do not
    layer.weight, layer.bias = weight, bias
    layer.call = in_pytorch(layer)
    return True
