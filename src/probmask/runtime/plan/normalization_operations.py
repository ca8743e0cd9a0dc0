"""The operations of normalizations and the softmax."""

import numpy as np

from probmask.runtime.kernels.operation_table import Field, Kind
from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import (
    INFINITY,
    Normalize,
    NormalizeGroups,
    Softmax,
)
from probmask.runtime.plan.operations import Operations


def add_normalization(ops: Operations, node: Normalize, lanes: int) -> None:
    """Add LayerNorm or RMSNorm."""
    assert node.form is not None
    source = ops.input(node, 0, lanes)
    target = ops.arena.allocate(node.name, lanes, node.form)
    fields = ops.from_to(source, target) | {
        Field.KIND: Kind.NORMALIZE,
        Field.ROWS: target.layout.vectors,
        Field.CHANNELS: source.channels,
        Field.CENTERED: node.centered,
        Field.BIAS: ops.data.add("constants", np.concatenate([node.scale, node.bias])),
        Field.POSITION_BITS: ops.bits_of(target.layout),
    }
    ops.emit(node.name, fields, (node.epsilon, INFINITY))


def add_group_normalization(ops: Operations, node: NormalizeGroups, lanes: int) -> None:
    """Add GroupNorm or InstanceNorm."""
    assert node.form is not None
    source = ops.input(node, 0, lanes)
    target = ops.arena.allocate(node.name, lanes, node.form)
    fields = ops.from_to(source, target) | {
        Field.KIND: Kind.NORMALIZE_GROUPS,
        Field.ROWS: node.groups,
        Field.CHANNELS: source.channels // node.groups,
        Field.BIAS: ops.data.add("constants", np.concatenate([node.scale, node.bias])),
        Field.SPLITS: source.channels,
    }
    ops.emit(node.name, fields, (node.epsilon, INFINITY))


def add_softmax(ops: Operations, node: Softmax, lanes: int) -> None:
    """Add a softmax over channels."""
    assert node.form is not None
    source = ops.input(node, 0, lanes)
    target = ops.arena.allocate(node.name, lanes, node.form)
    fields = ops.from_to(source, target) | {
        Field.KIND: Kind.SOFTMAX,
        Field.ROWS: target.layout.vectors,
        Field.CHANNELS: source.channels,
        Field.POSITION_BITS: ops.bits_of(target.layout),
        Field.SCRATCH: ops.arena.allocate_workspace(WIDTH * ops.threads),
        Field.SCRATCH_SIZE: WIDTH,
    }
    ops.emit(node.name, fields)
