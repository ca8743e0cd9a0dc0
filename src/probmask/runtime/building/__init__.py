"""Which operations have kernels, and what builds their nodes."""

import operator
from typing import Any

import torch

from probmask.runtime.building.elementwise import (
    build_activation,
    build_add,
    build_gelu,
    build_hardtanh,
    build_multiply,
)
from probmask.runtime.building.forms import Builder
from probmask.runtime.building.layers import build_convolution, build_linear
from probmask.runtime.building.normalization import BATCH_NORM, build_batch_norm, build_normalized
from probmask.runtime.building.pooling import (
    build_adaptive_pool,
    build_average_pool,
    build_max_pool,
    build_mean,
)
from probmask.runtime.building.shapes import build_concatenation, build_identity, build_reshape
from probmask.runtime.fields import Curve
from probmask.runtime.nodes import Clamp

_aten = torch.ops.aten

BUILDERS: dict[Any, Builder] = {
    _aten.conv1d.default: build_convolution,
    _aten.conv1d.padding: build_convolution,
    _aten.conv2d.default: build_convolution,
    _aten.conv2d.padding: build_convolution,
    _aten.linear.default: build_linear,
    BATCH_NORM: build_batch_norm,
    operator.getitem: build_normalized,
    _aten.relu.default: build_activation(Clamp(low=0.0)),
    _aten.relu6.default: build_activation(Clamp(low=0.0, high=6.0)),
    _aten.hardtanh.default: build_hardtanh,
    _aten.silu.default: build_activation(Clamp(curve=Curve.SILU)),
    _aten.hardswish.default: build_activation(Clamp(curve=Curve.HARDSWISH)),
    _aten.gelu.default: build_gelu,
    _aten.add.Tensor: build_add,
    _aten.mul.Tensor: build_multiply,
    _aten.max_pool1d.default: build_max_pool(1),
    _aten.max_pool2d.default: build_max_pool(2),
    _aten.avg_pool1d.default: build_average_pool(1),
    _aten.avg_pool2d.default: build_average_pool(2),
    _aten.adaptive_avg_pool1d.default: build_adaptive_pool(1),
    _aten.adaptive_avg_pool2d.default: build_adaptive_pool(2),
    _aten.mean.dim: build_mean,
    _aten.cat.default: build_concatenation,
    _aten.view.default: build_reshape,
    _aten.reshape.default: build_reshape,
    _aten.flatten.using_ints: build_reshape,
    _aten.squeeze.dims: build_reshape,
    _aten.dropout.default: build_identity,
    _aten.clone.default: build_identity,
    _aten.contiguous.default: build_identity,
}

__all__ = ["BUILDERS"]
