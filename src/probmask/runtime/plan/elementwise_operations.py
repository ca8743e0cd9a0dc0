"""The operations of sums, products, activations and concatenation."""

from probmask.runtime.kernels.operation_table import Field, Kind
from probmask.runtime.lower.nodes import (
    Activate,
    Broadcast,
    Combine,
    Concatenate,
)
from probmask.runtime.plan.arena import SlotPart
from probmask.runtime.plan.operations import Operations
from probmask.runtime.plan.token_operations import constant_planes


def add_elementwise(ops: Operations, node: Combine | Activate, lanes: int) -> None:
    """Add a sum, a product or an activation."""
    assert node.form is not None
    source = ops.input(node, 0, lanes)
    target = ops.arena.allocate(node.name, lanes, node.form)
    fields = ops.from_to(source, target)
    if isinstance(node, Combine) and node.constant is not None:
        planes = constant_planes(node.constant, target.layout)
        fields |= {
            Field.KIND: Kind.MULTIPLY_CONSTANT if node.product else Kind.ADD_CONSTANT,
            Field.BIAS: ops.data.add("constants", planes),
        }
    elif isinstance(node, Combine):
        other = ops.input(node, 1, lanes)
        fields |= {
            Field.KIND: Kind.MULTIPLY if node.product else Kind.ADD,
            Field.OTHER: other.slot,
        }
    elif isinstance(node, Activate) and node.slopes is not None:
        slopes = ops.data.add("constants", node.slopes)
        fields |= {Field.KIND: Kind.LEAKY_CHANNELS, Field.BIAS: slopes}
    else:
        fields |= {Field.KIND: Kind.ACTIVATE, Field.CURVE: node.activation.curve}
    ops.emit(node.name, fields, node.activation.limits)


def add_broadcast(ops: Operations, node: Broadcast, lanes: int) -> None:
    """Add a sum or a product with one number per channel."""
    assert node.form is not None
    source, other = ops.input(node, 0, lanes), ops.input(node, 1, lanes)
    target = ops.arena.allocate(node.name, lanes, node.form)
    fields = ops.from_to(source, target) | {
        Field.KIND: Kind.MULTIPLY_CHANNELS if node.product else Kind.ADD_CHANNELS,
        Field.OTHER: other.slot,
        Field.OTHER_PLANE: other.layout.plane,
        Field.OTHER_LEAD: other.layout.lead,
    }
    ops.emit(node.name, fields)


def add_concatenation(ops: Operations, node: Concatenate, lanes: int) -> None:
    """Copy the parts that are not computed in their place."""
    assert node.form is not None
    target = ops.arena.allocate(node.name, lanes, node.form)
    channels = 0
    for name in node.inputs:
        source = ops.arena.get(name, lanes)
        if ops.arena.homes.get(name) != (node.name, channels):  # not written there directly
            fields = ops.from_to(source, target) | {
                Field.KIND: Kind.COPY,
                Field.ROWS: source.channels,
                Field.TARGET: SlotPart(target.slot, channels * target.layout.plane),
            }
            ops.emit(node.name, fields)
        channels += source.channels
