"""The operations of layers: their weights, and the phases of their inputs."""

from typing import Any

import numpy as np

from probmask.runtime.kernels.operation_table import Curve, Field, Kind
from probmask.runtime.lower.nodes import Activation, Convolution, TransposedConvolution
from probmask.runtime.plan.arena import PlacedTensor, SlotPart
from probmask.runtime.plan.operations import Operations
from probmask.runtime.plan.phases import phase_convolution
from probmask.runtime.plan.slices import output_slices, slice_convolution
from probmask.runtime.plan.tensor_layout import Layout, Longs, Tap, blocks_of, tiling_of
from probmask.runtime.plan.weights import (
    direct_offsets,
    phases_of,
    single_position_offsets,
    sparse_rows_of,
)

# Tensors of more bytes are assumed not to fit into the second-level cache. If the input is larger,
# the input of the next tile is prefetched. If the output is larger, it is written in the order of
# its planes, because regular distances are faster.
_CACHED_BYTES = 1 << 20


def add_convolution(ops: Operations, node: Convolution, lanes: int, owner: str = "") -> None:
    """Add a convolution; ``owner`` is the node that it is a part of, if it is one."""
    assert node.form is not None
    owner = owner or node.name
    source = ops.input(node, 0, lanes)
    residual = ops.input(node, 1, lanes) if len(node.inputs) > 1 else None
    target = ops.arena.overwrite_residual(node, lanes) or ops.arena.allocate(
        node.name, lanes, node.form
    )
    has_curve = node.activation.curve is not Curve.NONE
    fields = ops.from_to(source, target)
    offsets, taps = _input_offsets(ops, node, source, target.layout, fields, owner)
    slices, plane = list(output_slices(node)), target.layout.plane
    if fields[Field.SOURCE] is source.slot and len(slices) == 1 and not _is_cached(source):
        furthest = int(offsets[0].max(initial=0))
        fields |= {Field.FETCHED: source.channels, Field.FURTHEST: furthest}
    fields |= {Field.ROWS: len(node.weight), Field.TARGET_PLANE: len(slices) * plane}
    if residual is not None:
        fields[Field.OTHER_PLANE] = len(slices) * residual.layout.plane
    clamp = Activation() if has_curve else node.activation
    weights: dict[tuple[int, ...], dict[Field, Any]] = {}
    for part in slices:
        if part.kernel not in weights:
            inputs = slice_convolution(node, part.kernel, offsets)
            weights[part.kernel] = _layer(ops, *inputs, taps, target)
        skipped = int(offsets[part.first, 0] - offsets[0, 0]) if part.first and taps else 0
        fields[Field.TARGET] = SlotPart(target.slot, part.index * plane)
        if residual is not None:
            shift = part.index * residual.layout.plane
            fields[Field.OTHER] = SlotPart(residual.slot, shift)
        moved = {Field.SOURCE: SlotPart(fields[Field.SOURCE], skipped)}
        ops.emit(owner, fields | moved | weights[part.kernel], clamp.limits)
    if has_curve:
        activate = ops.from_to(target, target)
        activate |= {Field.KIND: Kind.ACTIVATE, Field.CURVE: node.activation.curve}
        ops.emit(owner, activate, node.activation.limits)


def add_transposed(ops: Operations, node: TransposedConvolution, lanes: int) -> None:
    """Compute the phases of a transposed convolution, and merge them."""
    assert node.form is not None
    convolution = phase_convolution(node)
    phases = convolution.name
    if phases == node.name:
        add_convolution(ops, convolution, lanes)
        return
    ops.arena.reads[phases, lanes] = 1
    add_convolution(ops, convolution, lanes, owner=node.name)
    source = ops.arena.get(phases, lanes)
    fields = ops.from_to(source, ops.arena.allocate(node.name, lanes, node.form)) | {
        Field.KIND: Kind.MERGE_PHASES,
        Field.STEP_Y: node.stride[0],
        Field.STEP_X: node.stride[1],
    }
    ops.emit(node.name, fields)
    ops.arena.mark_read((phases,), lanes)


def _layer(
    ops: Operations, node: Convolution, offsets: Longs, taps: list[Tap], target: PlacedTensor
) -> dict[Field, Any]:
    """Store the weights of a layer; return how it is divided into tiles and blocks."""
    layout = target.layout
    if layout.lanes == layout.height == layout.width == 1:
        return {Field.KIND: Kind.LINEAR, **_weights(ops, node, offsets, taps, 1, target)}
    tiling = tiling_of(layout)
    blocks = blocks_of(node, offsets, taps, tiling, layout)
    return {
        Field.KIND: Kind.CONVOLVE,
        Field.POSITION_BITS: ops.bits_of(layout),
        Field.VECTORS: tiling.vectors,
        Field.TILES: tiling.tiles,
        Field.LINES: tiling.lines,
        **_weights(ops, node, offsets, taps, blocks, target),
    }


def _input_offsets(
    ops: Operations,
    node: Convolution,
    source: PlacedTensor,
    target: Layout,
    fields: dict[Field, Any],
    owner: str,
) -> tuple[Longs, list[Tap]]:
    """Return where each weight reads its inputs, and set the layer's source accordingly."""
    assert node.form is not None
    if node.form.positions == 1:
        fields[Field.SOURCE_LEAD] = 0
        return single_position_offsets(node, source.layout)
    if ops.arena.layouts[target.lanes].is_direct(node):
        return direct_offsets(node, source.layout)
    return _split_phases(ops, node, source, target, fields, owner)


def _weights(
    ops: Operations,
    node: Convolution,
    input_offsets: Longs,
    taps: list[Tap],
    blocks: int,
    target: PlacedTensor,
) -> dict[Field, Any]:
    """Store the non-zero weights and the bias; only the first block adds the bias."""
    by_count = ops.reordered and _is_cached(target)
    rows = sparse_rows_of(node, input_offsets, taps, blocks, ops.threads, by_count=by_count)
    bias = np.zeros(rows.order.shape, np.float32)
    bias[0] = node.bias[rows.order[0]]
    return {
        Field.STARTS: ops.data.add("longs", rows.starts),
        Field.ORDER: ops.data.add("longs", rows.order.reshape(-1)),
        Field.WEIGHTS: ops.data.add_weights(rows.offsets, rows.values),
        Field.BIAS: ops.data.add("constants", bias.reshape(-1)),
        Field.SPLITS: ops.data.add("longs", rows.first_rows),
        Field.BLOCKS: blocks,
    }


def _split_phases(
    ops: Operations,
    node: Convolution,
    source: PlacedTensor,
    target: Layout,
    fields: dict[Field, Any],
    owner: str,
) -> tuple[Longs, list[Tap]]:
    """Copy the input into its phases, and let the layer read them instead."""
    phases = phases_of(node, source.layout, target)
    slot = ops.arena.allocate_scratch(max(1, len(phases.entries)) * phases.layout.plane)
    ops.emit(
        owner,
        {
            Field.KIND: Kind.SPLIT_PHASES,
            Field.SOURCE: source.slot,
            Field.SOURCE_STRIDE: source.layout.stride,
            Field.TARGET: slot,
            Field.TARGET_PLANE: phases.layout.plane,
            Field.TARGET_STRIDE: phases.layout.stride,
            Field.LANES: target.lanes,
            Field.TABLE: ops.data.add("longs", phases.entries.reshape(-1)),
            Field.ENTRIES: len(phases.entries),
            Field.TOGETHER: phases.together,
            Field.STEP_Y: node.stride[0],
            Field.STEP_X: node.stride[1],
        },
    )
    fields |= {Field.SOURCE: slot, Field.SOURCE_LEAD: phases.layout.lead}
    return phases.offsets, phases.taps


def _is_cached(tensor: PlacedTensor) -> bool:
    """Return whether a tensor is small enough for the second-level cache."""
    return 4 * tensor.channels * tensor.layout.plane <= _CACHED_BYTES
