"""A step as a program for the compiled driver: a table of operations and the data they read."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probmask.runtime.lower.nodes import (
    Activate,
    Attention,
    Broadcast,
    Combine,
    Concatenate,
    Convolution,
    Node,
    Normalize,
    NormalizeGroups,
    Pool,
    Rearrange,
    Recurrent,
    Reshape,
    Resize,
    Softmax,
    TransposedConvolution,
)
from probmask.runtime.plan.boundary_operations import (
    add_group_packing,
    add_interleaving,
    add_packing,
    add_unpacking,
    is_packed_in_groups,
)
from probmask.runtime.plan.convolution_operations import add_convolution, add_transposed
from probmask.runtime.plan.elementwise_operations import (
    add_broadcast,
    add_concatenation,
    add_elementwise,
)
from probmask.runtime.plan.normalization_operations import (
    add_group_normalization,
    add_normalization,
    add_softmax,
)
from probmask.runtime.plan.operations import Operations
from probmask.runtime.plan.partition import Step
from probmask.runtime.plan.pool_operations import add_pool, add_resize
from probmask.runtime.plan.recurrent_operations import add_recurrent
from probmask.runtime.plan.tensor_layout import Longs
from probmask.runtime.plan.token_operations import add_attention, add_rearrangement


@dataclass(frozen=True)
class Program:
    """Input of the driver. `operation_table` describes the table and what it refers to."""

    table: Longs
    # Lower and upper clamp of each operation; epsilon of NORMALIZE, scale and least
    # largest score of ATTEND.
    limits: npt.NDArray[np.float32]
    # Number of operations that run for one image at a time.
    ungrouped: int
    # Number of images that the other operations process at once.
    group: int
    arena_size: int
    longs: Longs
    offsets: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    constants: npt.NDArray[np.float32]
    position_bits: npt.NDArray[np.int32]
    # Name of the node that each operation belongs to.
    owners: tuple[str, ...]


def build_program(
    step: Step,
    *,
    threads: int,
    lanes: int = 1,
    ungrouped: int | None = None,
    reordered: bool = True,
) -> Program:
    """Build the program of a step on the kernels.

    The first ``ungrouped`` nodes (default: all) run for one image at a time, the others for groups
    of ``lanes`` images. If ``reordered``, the rows of a layer are computed in the order that is
    fastest, otherwise in the network's.
    """
    nodes = step.nodes
    ungrouped = len(nodes) if ungrouped is None or lanes == 1 else ungrouped
    ops = Operations(step, threads, lanes, ungrouped, reordered=reordered)
    direct = {tensor.name for tensor in step.inputs if is_packed_in_groups(ops, tensor)}
    for index, tensor in enumerate(step.inputs):
        if tensor.name not in direct:
            add_packing(ops, index, tensor)
    for node in nodes[:ungrouped]:
        _add(ops, node, 1)
    add_unpacking(ops, 1)
    of_single = len(ops.rows)
    if ungrouped < len(nodes):
        add_interleaving(ops, direct)
        of_single = len(ops.rows)
        for index, tensor in enumerate(step.inputs):
            if tensor.name in direct:
                add_group_packing(ops, index, tensor)
        for node in nodes[ungrouped:]:
            _add(ops, node, lanes)
        add_unpacking(ops, lanes)
    return _program(ops, of_single, lanes if ungrouped < len(nodes) else 1)


def _add(ops: Operations, node: Node, lanes: int) -> None:
    if isinstance(node, Reshape):  # a view of the same slot
        return
    _ADD[type(node)](ops, node, lanes)
    ops.arena.mark_read(node.inputs, lanes)


def _program(ops: Operations, ungrouped: int, group: int) -> Program:
    """Place the slots, and return the program."""
    arena_size = ops.arena.place_slots()
    limits = [row.limits for row in ops.rows]
    return Program(
        table=ops.table(),
        limits=np.array(limits, np.float32).reshape(-1, 2),
        ungrouped=ungrouped,
        group=group,
        arena_size=arena_size,
        longs=ops.data.joined("longs", np.int64),
        offsets=np.concatenate([np.zeros(0, np.int32), *ops.data.offsets]),
        values=np.concatenate([np.zeros(0, np.float32), *ops.data.values]),
        constants=ops.data.joined("constants", np.float32),
        position_bits=ops.data.joined("position_bits", np.int32),
        owners=tuple(row.owner for row in ops.rows),
    )


# How the operations of each kind of node are added to a program.
_ADD: dict[type[Node], Callable[..., None]] = {
    Convolution: add_convolution,
    TransposedConvolution: add_transposed,
    Resize: add_resize,
    Pool: add_pool,
    Concatenate: add_concatenation,
    Combine: add_elementwise,
    Activate: add_elementwise,
    Broadcast: add_broadcast,
    Normalize: add_normalization,
    NormalizeGroups: add_group_normalization,
    Softmax: add_softmax,
    Attention: add_attention,
    Rearrange: add_rearrangement,
    Recurrent: add_recurrent,
}
