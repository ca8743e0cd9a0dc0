"""A step as a program for the compiled driver: a table of operations and the data they read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.attention import LEAST_SCORE, scratch_size
from probmask.runtime.kernels.operation_table import COLUMNS, Curve, Field, Kind, Place
from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import (
    INFINITY,
    Activate,
    Activation,
    Attention,
    Broadcast,
    Combine,
    Concatenate,
    Convolution,
    Form,
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
from probmask.runtime.plan.arena import Arena, PlacedTensor, Slot, SlotPart
from probmask.runtime.plan.partition import ExternalTensor, Step
from probmask.runtime.plan.phases import phase_convolution
from probmask.runtime.plan.program_data import Data
from probmask.runtime.plan.recurrent_operations import (
    hidden_form,
    projection,
    recurrence_fields,
    state_offsets,
)
from probmask.runtime.plan.slices import output_slices, slice_convolution
from probmask.runtime.plan.tensor_layout import Layout, Longs, Tap, blocks_of, tiling_of
from probmask.runtime.plan.token_operations import (
    attention_fields,
    constant_planes,
    copy_fields,
    rearrangement_fields,
)
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
    ungrouped = len(step.nodes) if ungrouped is None or lanes == 1 else ungrouped
    return _Builder(step, threads, lanes, ungrouped, reordered=reordered).program()


@dataclass
class _Operation:
    """A row of the table. Arena offsets are given by slots, which are placed last."""

    fields: dict[Field, Any]
    limits: tuple[float, float]
    owner: str


class _Builder:
    def __init__(
        self, step: Step, threads: int, lanes: int, ungrouped: int, *, reordered: bool
    ) -> None:
        self.step, self.reordered = step, reordered
        self.threads, self.lanes, self.ungrouped = threads, lanes, ungrouped
        names = [output.name for output in step.outputs]
        self.arena = Arena(step.nodes, names, lanes, ungrouped)
        self.operations: list[_Operation] = []
        self.data = Data()
        self.position_bits: dict[Layout, int] = {}
        # Inputs that are masks of an attention: they may be infinite.
        self.masks = {
            name for node in step.nodes if isinstance(node, Attention) for name in node.inputs[3:]
        }

    def program(self) -> Program:
        nodes = self.step.nodes
        direct = {tensor.name for tensor in self.step.inputs if self._is_packed_in_groups(tensor)}
        for index, tensor in enumerate(self.step.inputs):
            if tensor.name not in direct:
                self._pack(index, tensor)
        for node in nodes[: self.ungrouped]:
            self._add(node, 1)
        self._unpack(1)
        has_groups = self.ungrouped < len(nodes)
        if has_groups:
            self._interleave(direct)
        ungrouped_operations = len(self.operations)
        for index, tensor in enumerate(self.step.inputs):
            if tensor.name in direct:
                self._pack_group(index, tensor)
        for node in nodes[self.ungrouped :]:
            self._add(node, self.lanes)
        if has_groups:
            self._unpack(self.lanes)
        arena_size = self.arena.place_slots()
        limits = [operation.limits for operation in self.operations]
        return Program(
            table=self._table(),
            limits=np.array(limits, np.float32).reshape(-1, 2),
            ungrouped=ungrouped_operations,
            group=self.lanes if has_groups else 1,
            arena_size=arena_size,
            longs=self.data.joined("longs", np.int64),
            offsets=np.concatenate([np.zeros(0, np.int32), *self.data.offsets]),
            values=np.concatenate([np.zeros(0, np.float32), *self.data.values]),
            constants=self.data.joined("constants", np.float32),
            position_bits=self.data.joined("position_bits", np.int32),
            owners=tuple(operation.owner for operation in self.operations),
        )

    def _table(self) -> Longs:
        table = np.zeros((len(self.operations), COLUMNS), np.int64)
        for i, operation in enumerate(self.operations):
            for key, value in operation.fields.items():
                table[i, key] = value.offset if isinstance(value, Slot | SlotPart) else value
        return table

    def _emit(
        self,
        owner: str,
        fields: dict[Field, Any],
        limits: tuple[float, float] = (-INFINITY, INFINITY),
    ) -> None:
        fields = {Field.OTHER: -1, Field.VALUES: -1, Field.MASK: -1, **fields}
        self.operations.append(_Operation(fields, limits, owner))

    def _input(self, node: Node, index: int, lanes: int) -> PlacedTensor:
        """Return an input of a node, or the channels of it that the node reads."""
        tensor = self.arena.get(node.inputs[index], lanes)
        if index >= len(node.views):
            return tensor
        view = node.views[index]
        return tensor.part(view.channel, view.width())

    def _from_to(self, source: PlacedTensor, target: PlacedTensor) -> dict[Field, Any]:
        return {
            Field.SOURCE: source.slot,
            Field.SOURCE_PLANE: source.layout.plane,
            Field.SOURCE_LEAD: source.layout.lead,
            Field.SOURCE_STRIDE: source.layout.stride,
            Field.TARGET: target.slot,
            Field.TARGET_PLANE: target.layout.plane,
            Field.TARGET_LEAD: target.layout.lead,
            Field.TARGET_STRIDE: target.layout.stride,
            Field.ROWS: target.channels,
            Field.HEIGHT: target.layout.height,
            Field.WIDTH: target.layout.width,
            Field.LANES: target.layout.lanes,
        }

    def _pack(self, index: int, external: ExternalTensor) -> None:
        tensor = self.arena.allocate(external.name, 1, external.form)
        fields = {**self._from_to(tensor, tensor), Field.KIND: Kind.PACK, Field.EXTERNAL: index}
        is_mask = external.name in self.masks
        if external.form.tokens or is_mask:
            fields = self._token_copy(tensor, external.form, index, into_arena=True)
            fields[Field.UNCHECKED] = is_mask
        self._emit("(input)", fields)

    def _is_packed_in_groups(self, external: ExternalTensor) -> bool:
        """Return whether an input consists of tokens that only groups read."""
        of_single = self.arena.reads[external.name, 1]
        is_interleaved = external.name in self.arena.interleaved
        return external.form.tokens and is_interleaved and of_single == 1

    def _pack_group(self, index: int, external: ExternalTensor) -> None:
        """Copy the tokens of all images of a group into their lanes."""
        tensor = self.arena.allocate(external.name, self.lanes, external.form)
        fields = {
            **self._from_to(tensor, tensor),
            Field.KIND: Kind.PACK_TOKENS,
            Field.EXTERNAL: index,
        }
        self._emit("(input)", fields)

    def _token_copy(
        self, tensor: PlacedTensor, form: Form, external: int, *, into_arena: bool
    ) -> dict[Field, Any]:
        """Return the copy between a tensor of tokens and an external tensor, channels last."""
        inside = [
            (form.height, tensor.layout.stride),
            (form.width, 1),
            (form.channels, tensor.layout.plane),
        ]
        outside = [form.width * form.channels, form.channels, 1]
        loops = [
            (size, step, other) if not into_arena else (size, other, step)
            for (size, step), other in zip(inside, outside, strict=True)
        ]
        arena = SlotPart(tensor.slot, tensor.layout.lead)
        fields: dict[Field, Any] = {
            Field.SOURCE: 0 if into_arena else arena,
            Field.TARGET: arena if into_arena else 0,
            Field.SOURCE_IS: Place.EXTERNAL if into_arena else Place.ARENA,
            Field.TARGET_IS: Place.ARENA if into_arena else Place.EXTERNAL,
            Field.EXTERNAL: external,
            Field.IMAGE_SIZE: form.size,
        }
        return fields | copy_fields(loops, self.data)

    def _unpack(self, lanes: int) -> None:
        for index, external in enumerate(self.step.outputs):
            name = self.arena.root(external.name)
            is_single = (name, 1) in self.arena.tensors
            if is_single != (lanes == 1) or (name, lanes) not in self.arena.tensors:
                continue
            tensor = self.arena.get(external.name, lanes)
            number = len(self.step.inputs) + index
            fields = {
                **self._from_to(tensor, tensor),
                Field.KIND: Kind.UNPACK,
                Field.EXTERNAL: number,
                Field.TOKENS: external.form.tokens,
            }
            if external.form.tokens and lanes == 1:
                fields = self._token_copy(tensor, external.form, number, into_arena=False)
            self._emit("(output)", fields)
            self.arena.mark_read((external.name,), lanes)

    def _interleave(self, direct: set[str]) -> None:
        """Copy the tensors that groups read from single images into their lanes.

        Those in ``direct`` are packed into their lanes instead.
        """
        forms = {tensor.name: tensor.form for tensor in self.step.inputs}
        forms.update({node.name: node.form for node in self.step.nodes if node.form is not None})
        copied = [name for name in self.arena.interleaved if name not in direct]
        for name in copied:
            source = self.arena.get(name, 1)
            target = self.arena.allocate(name, self.lanes, forms[name])
            fields = {
                **self._from_to(source, target),
                Field.KIND: Kind.INTERLEAVE,
                Field.TARGET_LANES: self.lanes,
            }
            self._emit("(lanes)", fields)
        self.arena.mark_read(copied, 1)

    def _add(self, node: Node, lanes: int) -> None:
        if isinstance(node, Reshape):  # a view of the same slot
            return
        add = _ADD[type(node)]
        add(self, node, lanes)
        self.arena.mark_read(node.inputs, lanes)

    def _transposed(self, node: TransposedConvolution, lanes: int) -> None:
        """Compute the phases of a transposed convolution, and merge them."""
        assert node.form is not None
        convolution = phase_convolution(node)
        phases = convolution.name
        if phases == node.name:
            self._convolution(convolution, lanes)
            return
        self.arena.reads[phases, lanes] = 1
        self._convolution(convolution, lanes, owner=node.name)
        source = self.arena.get(phases, lanes)
        fields = self._from_to(source, self.arena.allocate(node.name, lanes, node.form)) | {
            Field.KIND: Kind.MERGE_PHASES,
            Field.STEP_Y: node.stride[0],
            Field.STEP_X: node.stride[1],
        }
        self._emit(node.name, fields)
        self.arena.mark_read((phases,), lanes)

    def _resize(self, node: Resize, lanes: int) -> None:
        assert node.form is not None
        source = self._input(node, 0, lanes)
        width = source.layout.width
        indices = [node.first[0], node.second[0], node.first[1], node.second[1]]
        fields = self._from_to(source, self.arena.allocate(node.name, lanes, node.form)) | {
            Field.KIND: Kind.RESIZE,
            Field.TABLE: self.data.add("longs", np.concatenate(indices)),
            Field.BIAS: self.data.add("constants", np.concatenate(node.weights)),
            Field.SCRATCH: self.arena.allocate_workspace(width * self.threads),
            Field.SCRATCH_SIZE: width,
            Field.SOURCE_WIDTH: width,
        }
        self._emit(node.name, fields)

    def _convolution(self, node: Convolution, lanes: int, owner: str = "") -> None:
        """Add a convolution; ``owner`` is the node that it is a part of, if it is one."""
        assert node.form is not None
        owner = owner or node.name
        source = self._input(node, 0, lanes)
        residual = self._input(node, 1, lanes) if len(node.inputs) > 1 else None
        target = self.arena.overwrite_residual(node, lanes) or self.arena.allocate(
            node.name, lanes, node.form
        )
        has_curve = node.activation.curve is not Curve.NONE
        fields = self._from_to(source, target)
        offsets, taps = self._input_offsets(node, source, target.layout, fields, owner)
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
                weights[part.kernel] = self._layer(*inputs, taps, target)
            skipped = int(offsets[part.first, 0] - offsets[0, 0]) if part.first and taps else 0
            fields[Field.TARGET] = SlotPart(target.slot, part.index * plane)
            if residual is not None:
                shift = part.index * residual.layout.plane
                fields[Field.OTHER] = SlotPart(residual.slot, shift)
            moved = {Field.SOURCE: SlotPart(fields[Field.SOURCE], skipped)}
            self._emit(owner, fields | moved | weights[part.kernel], clamp.limits)
        if has_curve:
            activate = self._from_to(target, target)
            activate |= {Field.KIND: Kind.ACTIVATE, Field.CURVE: node.activation.curve}
            self._emit(owner, activate, node.activation.limits)

    def _layer(
        self, node: Convolution, offsets: Longs, taps: list[Tap], target: PlacedTensor
    ) -> dict[Field, Any]:
        """Store the weights of a layer; return how it is divided into tiles and blocks."""
        layout = target.layout
        if layout.lanes == layout.height == layout.width == 1:
            return {Field.KIND: Kind.LINEAR, **self._weights(node, offsets, taps, 1, target)}
        tiling = tiling_of(layout)
        blocks = blocks_of(node, offsets, taps, tiling, layout)
        return {
            Field.KIND: Kind.CONVOLVE,
            Field.POSITION_BITS: self._position_bits(layout),
            Field.VECTORS: tiling.vectors,
            Field.TILES: tiling.tiles,
            Field.LINES: tiling.lines,
            **self._weights(node, offsets, taps, blocks, target),
        }

    def _input_offsets(
        self,
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
        if self.arena.layouts[target.lanes].is_direct(node):
            return direct_offsets(node, source.layout)
        return self._split_phases(node, source, target, fields, owner)

    def _weights(
        self,
        node: Convolution,
        input_offsets: Longs,
        taps: list[Tap],
        blocks: int,
        target: PlacedTensor,
    ) -> dict[Field, Any]:
        """Store the non-zero weights and the bias; only the first block adds the bias."""
        by_count = self.reordered and _is_cached(target)
        rows = sparse_rows_of(node, input_offsets, taps, blocks, self.threads, by_count=by_count)
        bias = np.zeros(rows.order.shape, np.float32)
        bias[0] = node.bias[rows.order[0]]
        return {
            Field.STARTS: self.data.add("longs", rows.starts),
            Field.ORDER: self.data.add("longs", rows.order.reshape(-1)),
            Field.WEIGHTS: self.data.add_weights(rows.offsets, rows.values),
            Field.BIAS: self.data.add("constants", bias.reshape(-1)),
            Field.SPLITS: self.data.add("longs", rows.first_rows),
            Field.BLOCKS: blocks,
        }

    def _split_phases(
        self,
        node: Convolution,
        source: PlacedTensor,
        target: Layout,
        fields: dict[Field, Any],
        owner: str,
    ) -> tuple[Longs, list[Tap]]:
        """Copy the input into its phases, and let the layer read them instead."""
        phases = phases_of(node, source.layout, target)
        slot = self.arena.allocate_scratch(max(1, len(phases.entries)) * phases.layout.plane)
        self._emit(
            owner,
            {
                Field.KIND: Kind.SPLIT_PHASES,
                Field.SOURCE: source.slot,
                Field.SOURCE_STRIDE: source.layout.stride,
                Field.TARGET: slot,
                Field.TARGET_PLANE: phases.layout.plane,
                Field.TARGET_STRIDE: phases.layout.stride,
                Field.LANES: target.lanes,
                Field.TABLE: self.data.add("longs", phases.entries.reshape(-1)),
                Field.ENTRIES: len(phases.entries),
                Field.TOGETHER: phases.together,
                Field.STEP_Y: node.stride[0],
                Field.STEP_X: node.stride[1],
            },
        )
        fields |= {Field.SOURCE: slot, Field.SOURCE_LEAD: phases.layout.lead}
        return phases.offsets, phases.taps

    def _position_bits(self, layout: Layout) -> int:
        if layout not in self.position_bits:
            offset = self.data.add("position_bits", layout.position_bits())
            self.position_bits[layout] = offset
        return self.position_bits[layout]

    def _pool(self, node: Pool, lanes: int) -> None:
        """Pool the rows and columns of all planes, then the slices of volumes."""
        assert node.form is not None
        source = self._input(node, 0, lanes)
        if not node.slices:
            self._pool_planes(node, lanes, source, self.arena.allocate(node.name, lanes, node.form))
            return
        name = f"{node.name}_planes"
        form = replace(node.form, channels=source.channels)
        planes = self.arena.allocate_temporary(name, lanes, form)
        self._pool_planes(node, lanes, source, planes)
        target = self.arena.allocate(node.name, lanes, node.form)
        channels = target.channels // len(node.slices)
        fields = self._from_to(planes, target) | {
            Field.KIND: Kind.MAX_SLICES if node.is_max else Kind.AVERAGE_SLICES,
            Field.TABLE: self.data.add("longs", np.array(node.slices, np.int64).reshape(-1)),
            Field.BIAS: self.data.add("constants", node.slice_factors),
            Field.ENTRIES: len(node.slices),
            Field.DEPTH: source.channels // channels,
        }
        self._emit(node.name, fields)
        self.arena.mark_read((name,), lanes)

    def _pool_planes(
        self, node: Pool, lanes: int, source: PlacedTensor, target: PlacedTensor
    ) -> None:
        width, stride, padding = _regular_columns(node) if lanes == 1 else (0, 1, 0)
        row = source.layout.width * lanes
        whole = (0, source.layout.height), (0, source.layout.width)
        windows = np.array([*node.rows, *node.columns], np.int64).reshape(-1)
        fields = self._from_to(source, target) | {
            Field.KIND: Kind.MAX_POOL if node.is_max else Kind.AVERAGE_POOL,
            Field.TABLE: self.data.add("longs", windows),
            Field.BIAS: self.data.add("constants", node.factors.reshape(-1)),
            Field.SCRATCH: self.arena.allocate_scratch(row * self.threads),
            Field.SCRATCH_SIZE: row,
            Field.SOURCE_WIDTH: source.layout.width,
            Field.WINDOW_WIDTH: width,
            Field.STEP_X: stride,
            Field.PADDING_LEFT: padding,
            Field.WINDOW_HEIGHT: max(end - start for start, end in node.rows),
            Field.WHOLE_RUN: source.layout.run if (*node.rows, *node.columns) == whole else 0,
        }
        self._emit(node.name, fields)

    def _concatenate(self, node: Concatenate, lanes: int) -> None:
        assert node.form is not None
        target = self.arena.allocate(node.name, lanes, node.form)
        channels = 0
        for name in node.inputs:
            source = self.arena.get(name, lanes)
            if self.arena.homes.get(name) != (node.name, channels):  # not written there directly
                fields = self._from_to(source, target) | {
                    Field.KIND: Kind.COPY,
                    Field.ROWS: source.channels,
                    Field.TARGET: SlotPart(target.slot, channels * target.layout.plane),
                }
                self._emit(node.name, fields)
            channels += source.channels

    def _elementwise(self, node: Combine | Activate, lanes: int) -> None:
        assert node.form is not None
        source = self._input(node, 0, lanes)
        target = self.arena.allocate(node.name, lanes, node.form)
        fields = self._from_to(source, target)
        if isinstance(node, Combine) and node.constant is not None:
            planes = constant_planes(node.constant, target.layout)
            fields |= {
                Field.KIND: Kind.MULTIPLY_CONSTANT if node.product else Kind.ADD_CONSTANT,
                Field.BIAS: self.data.add("constants", planes),
            }
        elif isinstance(node, Combine):
            other = self._input(node, 1, lanes)
            fields |= {
                Field.KIND: Kind.MULTIPLY if node.product else Kind.ADD,
                Field.OTHER: other.slot,
            }
        elif isinstance(node, Activate) and node.slopes is not None:
            slopes = self.data.add("constants", node.slopes)
            fields |= {Field.KIND: Kind.LEAKY_CHANNELS, Field.BIAS: slopes}
        else:
            fields |= {Field.KIND: Kind.ACTIVATE, Field.CURVE: node.activation.curve}
        self._emit(node.name, fields, node.activation.limits)

    def _broadcast(self, node: Broadcast, lanes: int) -> None:
        assert node.form is not None
        source, other = self._input(node, 0, lanes), self._input(node, 1, lanes)
        target = self.arena.allocate(node.name, lanes, node.form)
        fields = self._from_to(source, target) | {
            Field.KIND: Kind.MULTIPLY_CHANNELS if node.product else Kind.ADD_CHANNELS,
            Field.OTHER: other.slot,
            Field.OTHER_PLANE: other.layout.plane,
            Field.OTHER_LEAD: other.layout.lead,
        }
        self._emit(node.name, fields)

    def _normalize_groups(self, node: NormalizeGroups, lanes: int) -> None:
        assert node.form is not None
        source = self._input(node, 0, lanes)
        target = self.arena.allocate(node.name, lanes, node.form)
        fields = self._from_to(source, target) | {
            Field.KIND: Kind.NORMALIZE_GROUPS,
            Field.ROWS: node.groups,
            Field.CHANNELS: source.channels // node.groups,
            Field.BIAS: self.data.add("constants", np.concatenate([node.scale, node.bias])),
            Field.SPLITS: source.channels,
        }
        self._emit(node.name, fields, (node.epsilon, INFINITY))

    def _softmax(self, node: Softmax, lanes: int) -> None:
        assert node.form is not None
        source = self._input(node, 0, lanes)
        target = self.arena.allocate(node.name, lanes, node.form)
        fields = self._from_to(source, target) | {
            Field.KIND: Kind.SOFTMAX,
            Field.ROWS: target.layout.vectors,
            Field.CHANNELS: source.channels,
            Field.POSITION_BITS: self._position_bits(target.layout),
            Field.SCRATCH: self.arena.allocate_workspace(WIDTH * self.threads),
            Field.SCRATCH_SIZE: WIDTH,
        }
        self._emit(node.name, fields)

    def _normalize(self, node: Normalize, lanes: int) -> None:
        assert node.form is not None
        source = self._input(node, 0, lanes)
        target = self.arena.allocate(node.name, lanes, node.form)
        fields = self._from_to(source, target) | {
            Field.KIND: Kind.NORMALIZE,
            Field.ROWS: target.layout.vectors,
            Field.CHANNELS: source.channels,
            Field.CENTERED: node.centered,
            Field.BIAS: self.data.add("constants", np.concatenate([node.scale, node.bias])),
            Field.POSITION_BITS: self._position_bits(target.layout),
        }
        self._emit(node.name, fields, (node.epsilon, INFINITY))

    def _attend(self, node: Attention, lanes: int) -> None:
        assert node.form is not None
        sources = [self.arena.get(name, lanes) for name in node.inputs]
        target = self.arena.allocate(node.name, lanes, node.form)
        fields = self._from_to(sources[0], target)
        fields |= attention_fields(node, sources, target, self.data)
        fields |= {
            Field.POSITION_BITS: self._position_bits(target.layout),
            Field.SCRATCH: self.arena.allocate_workspace(self.threads * scratch_size(node.keys)),
        }
        self._emit(node.name, fields, (node.scale, -INFINITY if node.written_out else LEAST_SCORE))

    def _rearrange(self, node: Rearrange, lanes: int) -> None:
        assert node.form is not None
        target = self.arena.allocate(node.name, lanes, node.form)
        names = iter(node.inputs)
        for part in node.parts:
            source = None if part.source is None else self.arena.get(next(names), lanes)
            self._emit(node.name, rearrangement_fields(part, source, target, self.data))

    def _recurrent(self, node: Recurrent, lanes: int) -> None:
        """Add all layers. For one image, the input's part of all steps is computed first."""
        assert node.form is not None
        result = self.arena.allocate(node.name, lanes, node.form)
        states = [self._input(node, index, lanes) for index in range(1, len(node.inputs))]
        source = self._input(node, 0, lanes)
        for layer in range(len(node.layers)):
            temporary = [f"{node.name}.hidden{layer - 1}"] if layer else []
            if lanes == 1:
                gates = projection(node, layer)
                self.arena.reads[gates.name, lanes] = 1
                self._convolution(gates, lanes, owner=node.name)
                source = self.arena.get(gates.name, lanes)
                temporary.append(gates.name)
            hidden, is_last = result, layer == len(node.layers) - 1
            if not is_last:
                name = f"{node.name}.hidden{layer}"
                hidden = self.arena.allocate_temporary(name, lanes, hidden_form(node))
            fields = self._from_to(source, hidden)
            if is_last and not node.returned[0]:
                fields[Field.TARGET] = -1
            fields |= state_offsets(node, layer, states, result)
            fields |= recurrence_fields(node, layer, lanes, self.threads, self.arena, self.data)
            fields[Field.POSITION_BITS] = self._position_bits(Layout(1, 1, 1, 0, lanes, lanes))
            self._emit(node.name, fields)
            self.arena.mark_read(temporary, lanes)
            source = hidden


# How the operations of each kind of node are added to a program.
_ADD: dict[type[Node], Callable[..., None]] = {
    Convolution: _Builder._convolution,
    TransposedConvolution: _Builder._transposed,
    Resize: _Builder._resize,
    Pool: _Builder._pool,
    Concatenate: _Builder._concatenate,
    Combine: _Builder._elementwise,
    Activate: _Builder._elementwise,
    Broadcast: _Builder._broadcast,
    Normalize: _Builder._normalize,
    NormalizeGroups: _Builder._normalize_groups,
    Softmax: _Builder._softmax,
    Attention: _Builder._attend,
    Rearrange: _Builder._rearrange,
    Recurrent: _Builder._recurrent,
}


def _is_cached(tensor: PlacedTensor) -> bool:
    """Return whether a tensor is small enough for the second-level cache."""
    return 4 * tensor.channels * tensor.layout.plane <= _CACHED_BYTES


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
