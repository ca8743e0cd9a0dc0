"""Fields of the operations over tokens: copies, constants and attention."""

from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.attention import LEAST_SCORE, MAX_QUERY_VECTORS, scratch_size
from probmask.runtime.kernels.operation_table import Field, Kind, Place
from probmask.runtime.lower.copy_loops import loops_of
from probmask.runtime.lower.nodes import INFINITY, Attention, Part, Rearrange
from probmask.runtime.lower.views import Axis, Factor, View
from probmask.runtime.plan.arena import PlacedTensor, SlotPart
from probmask.runtime.plan.operations import Operations
from probmask.runtime.plan.program_data import Data
from probmask.runtime.plan.tensor_layout import Layout

# Size of a loop, and its steps in the source and in the target.
Loop = tuple[int, int, int]


def add_attention(ops: Operations, node: Attention, lanes: int) -> None:
    """Add an attention."""
    assert node.form is not None
    sources = [ops.arena.get(name, lanes) for name in node.inputs]
    target = ops.arena.allocate(node.name, lanes, node.form)
    fields = ops.from_to(sources[0], target)
    fields |= attention_fields(node, sources, target, ops.data)
    fields |= {
        Field.POSITION_BITS: ops.bits_of(target.layout),
        Field.SCRATCH: ops.arena.allocate_workspace(ops.threads * scratch_size(node.keys)),
    }
    ops.emit(node.name, fields, (node.scale, -INFINITY if node.written_out else LEAST_SCORE))


def add_rearrangement(ops: Operations, node: Rearrange, lanes: int) -> None:
    """Copy the parts of a rearranged tensor."""
    assert node.form is not None
    target = ops.arena.allocate(node.name, lanes, node.form)
    names = iter(node.inputs)
    for part in node.parts:
        source = None if part.source is None else ops.arena.get(next(names), lanes)
        ops.emit(node.name, rearrangement_fields(part, source, target, ops.data))


def constant_planes(rows: npt.NDArray[np.float32], layout: Layout) -> npt.NDArray[np.float32]:
    """Return a constant of positions × channels as planes, with zeros in the padding."""
    positions, channels = rows.shape
    planes = np.zeros((channels, layout.plane), np.float32)
    y, x = np.divmod(np.arange(positions), layout.width)
    first = layout.lead + (y * layout.stride + x) * layout.lanes
    for lane in range(layout.lanes):
        planes[:, first + lane] = rows.T
    return planes.reshape(-1)


def copy_fields(loops: list[Loop], data: Data) -> dict[Field, Any]:
    """Return the fields of a copy with these loops, in the order that reads and writes fastest.

    The third loop reads neighbors, the fourth writes neighbors.
    """
    ordered = _joined([loop for loop in loops if loop[0] > 1])
    column = next((loop for loop in ordered if loop[1] == 1), ordered[-1] if ordered else (1, 1, 1))
    others = [loop for loop in ordered if loop is not column]
    row = next((loop for loop in others if loop[2] == 1), others[-1] if others else (1, 0, 0))
    outer = sorted((loop for loop in others if loop is not row), key=lambda loop: -loop[0])
    outer += [(1, 0, 0)] * (2 - len(outer))
    assert len(outer) == 2, "lowering allows four loops"
    table = np.array([*outer, column, row], np.int64).T.reshape(-1)
    return {
        Field.KIND: Kind.REARRANGE,
        Field.TABLE: data.add("longs", table),
        Field.ROWS: outer[0][0],
    }


def _joined(loops: list[Loop]) -> list[Loop]:
    """Join loops that one loop can run over."""
    result: list[Loop] = []
    for size, source, target in loops:
        if result and result[-1][1:] == (size * source, size * target):
            result[-1] = (result[-1][0] * size, source, target)
        else:
            result.append((size, source, target))
    return result


def rearrangement_fields(
    part: Part, source: PlacedTensor | None, target: PlacedTensor, data: Data
) -> dict[Field, Any]:
    """Return the fields of the copy of one part."""
    to = SlotPart(target.slot, _offset(part.target, target.layout))
    if source is None:
        assert part.constant is not None
        loops, step = [], 1
        for factor in reversed(part.target.factors):
            loops.append((factor.size, step, _step(factor, target.layout)))
            step *= factor.size
        offset = data.add("constants", part.constant.reshape(-1))
        fields = {
            Field.SOURCE: offset,
            Field.SOURCE_IS: Place.CONSTANT,
            Field.LANES: target.layout.lanes,
        }
        return fields | {Field.TARGET: to} | copy_fields(loops[::-1], data)
    assert part.source is not None
    layout = source.layout
    found = loops_of(part, layout.height, layout.width)
    assert found is not None, "lowering checks it"
    loops = [(size, _step(a, layout), _step(b, target.layout)) for size, a, b in found]
    start = SlotPart(source.slot, _offset(part.source, layout))
    places = {Field.SOURCE: start, Field.TARGET: to, Field.LANES: layout.lanes}
    return places | copy_fields(loops, data)


def _offset(view: View, layout: Layout) -> int:
    """Return where a view starts, in floats from the start of its root."""
    row, column = divmod(view.position, layout.width)
    return view.channel * layout.plane + layout.offset(row, column)


def _step(factor: Factor, layout: Layout) -> int:
    """Return the floats from one element of a factor to the next."""
    if factor.axis is Axis.CHANNEL:
        return factor.step * layout.plane
    rows, columns = divmod(factor.step, layout.width)
    step = rows * layout.stride + columns if layout.height > 1 else factor.step
    return step * layout.lanes


def attention_fields(
    node: Attention, sources: list[PlacedTensor], target: PlacedTensor, data: Data
) -> dict[Field, Any]:
    """Return the fields of an attention; the layouts are those of single images."""
    blocks = -(-target.layout.vectors // MAX_QUERY_VECTORS)
    starts = [
        tensor.layout.lead + view.position
        for tensor, view in zip(sources, node.views, strict=False)
    ]
    table = [
        (
            *(
                channel * tensor.layout.plane + start
                for channel, tensor, start in zip(channels, sources, starts, strict=False)
            ),
            head * node.depth * target.layout.plane + target.layout.lead,
        )
        for head, channels in enumerate(node.heads)
    ]
    return {
        Field.KIND: Kind.ATTEND,
        Field.ROWS: len(node.heads) * blocks,
        Field.TILES: blocks,
        Field.VECTORS: target.layout.vectors,
        Field.OTHER: sources[1].slot,
        Field.OTHER_PLANE: sources[1].layout.plane,
        Field.VALUES: sources[2].slot,
        Field.VALUES_PLANE: sources[2].layout.plane,
        Field.TABLE: data.add("longs", np.array(table, np.int64).reshape(-1)),
        Field.KEYS: node.keys,
        Field.DEPTH: node.depth,
        Field.CAUSAL: node.causal,
        Field.SCRATCH_SIZE: scratch_size(node.keys),
        **_mask_fields(node, sources, target, data),
    }


def _mask_fields(
    node: Attention, sources: list[PlacedTensor], target: PlacedTensor, data: Data
) -> dict[Field, Any]:
    if len(sources) > 3:
        layout = sources[3].layout
        return {
            Field.MASK: SlotPart(sources[3].slot, layout.lead),
            Field.MASK_PLANE: layout.plane,
            Field.MASK_HEADS: node.mask_heads,
        }
    mask = _causal_mask(node, target) if node.causal else node.mask
    if mask is None:
        return {}
    single = len(mask) == 1
    layout = target.layout
    planes = mask.reshape(-1) if single else constant_planes(mask, layout)
    return {
        Field.MASK: data.add("constants", planes) + (0 if single else layout.lead),
        Field.MASK_PLANE: 1 if single else layout.plane,
        Field.MASK_HEADS: node.mask_heads,
        Field.MASK_IS_CONSTANT: 1,
    }


def _causal_mask(node: Attention, target: PlacedTensor) -> npt.NDArray[np.float32]:
    """Return a mask of queries × keys: no query sees later keys."""
    queries = np.arange(target.layout.width)[:, None]
    hidden = np.arange(node.keys) > queries
    return np.where(hidden, -np.inf, 0).astype(np.float32)
