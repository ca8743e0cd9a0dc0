"""The operations of poolings and interpolation."""

from dataclasses import replace

import numpy as np

from probmask.runtime.kernels.operation_table import Field, Kind
from probmask.runtime.lower.nodes import Pool, Resize
from probmask.runtime.plan.arena import PlacedTensor
from probmask.runtime.plan.operations import Operations


def add_pool(ops: Operations, node: Pool, lanes: int) -> None:
    """Pool the rows and columns of all planes, then the slices of volumes."""
    assert node.form is not None
    source = ops.input(node, 0, lanes)
    if not node.slices:
        _pool_planes(ops, node, lanes, source, ops.arena.allocate(node.name, lanes, node.form))
        return
    name = f"{node.name}_planes"
    form = replace(node.form, channels=source.channels)
    planes = ops.arena.allocate_temporary(name, lanes, form)
    _pool_planes(ops, node, lanes, source, planes)
    target = ops.arena.allocate(node.name, lanes, node.form)
    channels = target.channels // len(node.slices)
    fields = ops.from_to(planes, target) | {
        Field.KIND: Kind.MAX_SLICES if node.is_max else Kind.AVERAGE_SLICES,
        Field.TABLE: ops.data.add("longs", np.array(node.slices, np.int64).reshape(-1)),
        Field.BIAS: ops.data.add("constants", node.slice_factors),
        Field.ENTRIES: len(node.slices),
        Field.DEPTH: source.channels // channels,
    }
    ops.emit(node.name, fields)
    ops.arena.mark_read((name,), lanes)


def _pool_planes(
    ops: Operations, node: Pool, lanes: int, source: PlacedTensor, target: PlacedTensor
) -> None:
    width, stride, padding = _regular_columns(node) if lanes == 1 else (0, 1, 0)
    row = source.layout.width * lanes
    whole = (0, source.layout.height), (0, source.layout.width)
    windows = np.array([*node.rows, *node.columns], np.int64).reshape(-1)
    fields = ops.from_to(source, target) | {
        Field.KIND: Kind.MAX_POOL if node.is_max else Kind.AVERAGE_POOL,
        Field.TABLE: ops.data.add("longs", windows),
        Field.BIAS: ops.data.add("constants", node.factors.reshape(-1)),
        Field.SCRATCH: ops.arena.allocate_scratch(row * ops.threads),
        Field.SCRATCH_SIZE: row,
        Field.SOURCE_WIDTH: source.layout.width,
        Field.WINDOW_WIDTH: width,
        Field.STEP_X: stride,
        Field.PADDING_LEFT: padding,
        Field.WINDOW_HEIGHT: max(end - start for start, end in node.rows),
        Field.WHOLE_RUN: source.layout.run if (*node.rows, *node.columns) == whole else 0,
    }
    ops.emit(node.name, fields)


def add_resize(ops: Operations, node: Resize, lanes: int) -> None:
    """Add an interpolation."""
    assert node.form is not None
    source = ops.input(node, 0, lanes)
    width = source.layout.width
    indices = [node.first[0], node.second[0], node.first[1], node.second[1]]
    fields = ops.from_to(source, ops.arena.allocate(node.name, lanes, node.form)) | {
        Field.KIND: Kind.RESIZE,
        Field.TABLE: ops.data.add("longs", np.concatenate(indices)),
        Field.BIAS: ops.data.add("constants", np.concatenate(node.weights)),
        Field.SCRATCH: ops.arena.allocate_workspace(width * ops.threads),
        Field.SCRATCH_SIZE: width,
        Field.SOURCE_WIDTH: width,
    }
    ops.emit(node.name, fields)


def _regular_columns(node: Pool) -> tuple[int, int, int]:
    """Return width, stride and left padding of the windows; width 0 if they are not regular."""
    sizes = [end - start for start, end in node.columns]
    size = max(sizes)
    if len(sizes) == 1:
        return (size, 1, 0) if node.columns[0][0] == 0 else (0, 1, 0)
    # The padding may cut the first window and the last ones.
    stride = node.columns[-1][1] - node.columns[-2][1] or node.columns[-1][0] - node.columns[-2][0]
    padding = size - node.columns[0][1]
    width = node.input_forms[0].width
    regular = [
        (max(0, o * stride - padding), min(width, o * stride - padding + size))
        for o in range(len(sizes))
    ]
    is_regular = padding >= 0 and regular == list(node.columns)
    return (size, stride, padding) if is_regular else (0, 1, 0)
