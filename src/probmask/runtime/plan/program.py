"""A part of the network as a table for the compiled driver: places of tensors, weights, masks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.operation_table import COLUMNS, Curve, Field, Kind
from probmask.runtime.lower.nodes import (
    Activate,
    Clamp,
    Combine,
    Concatenate,
    Convolution,
    Node,
    Pool,
    Reshape,
)
from probmask.runtime.plan.arena import Shifted, Slot, Tensor, Tensors
from probmask.runtime.plan.steps import Outside
from probmask.runtime.plan.tensor_layout import Layout, Longs, Tap, blocks_of, tiling_of
from probmask.runtime.plan.weights import (
    phases_of,
    places_direct,
    places_of_one,
    sparse_rows,
    splits,
)


@dataclass(frozen=True)
class Program:
    """What the driver needs; see `fields` for the table."""

    table: Longs
    limits: npt.NDArray[np.float32]
    lone: int  # operations that run for each image by itself
    group: int  # images that the other operations take at once
    arena_size: int
    longs: Longs
    offsets: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    constants: npt.NDArray[np.float32]
    masks: npt.NDArray[np.int32]
    inputs: tuple[Outside, ...]
    outputs: tuple[Outside, ...]
    # Which node each operation belongs to.
    owners: tuple[str, ...]


def build(
    nodes: Sequence[Node],
    inputs: Sequence[Outside],
    outputs: Sequence[Outside],
    *,
    threads: int,
    lanes: int = 1,
    lone: int | None = None,
) -> Program:
    """Plan the nodes: the first ``lone`` image by image, the others for ``lanes`` at once."""
    lone = len(nodes) if lone is None or lanes == 1 else lone
    return _Builder(nodes, inputs, outputs, threads, lanes, lone).program()


class _Builder:
    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Outside],
        outputs: Sequence[Outside],
        threads: int,
        lanes: int,
        lone: int,
    ) -> None:
        self.nodes, self.inputs, self.outputs = nodes, inputs, outputs
        self.threads, self.lanes, self.lone = threads, lanes, lone
        names = [outside.name for outside in outputs]
        self.tensors = Tensors(nodes, names, lanes, lone)
        self.rows: list[tuple[dict[Field, Any], Clamp, str]] = []
        self.numbers = Numbers()
        self.masks: dict[Layout, int] = {}

    def program(self) -> Program:
        for index, outside in enumerate(self.inputs):
            self._pack(index, outside)
        for node in self.nodes[: self.lone]:
            self._add(node, 1)
        self._unpack(1)
        lone = len(self.nodes) == self.lone
        if not lone:
            self._spread()
        lone_operations = len(self.rows)
        for node in self.nodes[self.lone :]:
            self._add(node, self.lanes)
        if not lone:
            self._unpack(self.lanes)
        arena_size = self.tensors.place_all()
        table = np.zeros((len(self.rows), COLUMNS), np.int64)
        for i, (fields, _, _) in enumerate(self.rows):
            for key, value in fields.items():
                table[i, key] = value.place if isinstance(value, Slot) else value
        limits = np.array([(a.low, a.high) for _, a, _ in self.rows], np.float32).reshape(-1, 2)
        return Program(
            table=table,
            limits=limits,
            lone=lone_operations,
            group=self.lanes if not lone else 1,
            arena_size=arena_size,
            longs=self.numbers.joined("longs", np.int64),
            offsets=np.concatenate([np.zeros(0, np.int32), *self.numbers.offsets]),
            values=np.concatenate([np.zeros(0, np.float32), *self.numbers.values]),
            constants=self.numbers.joined("constants", np.float32),
            masks=self.numbers.joined("masks", np.int32),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            owners=tuple(owner for _, _, owner in self.rows),
        )

    def _emit(self, owner: str, fields: dict[Field, Any], after: Clamp | None = None) -> None:
        self.rows.append(({Field.OTHER: -1, **fields}, after or Clamp(), owner))

    def _from_to(self, source: Tensor, target: Tensor) -> dict[Field, Any]:
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

    def _pack(self, index: int, outside: Outside) -> None:
        tensor = self.tensors.new(outside.name, 1, outside.form)
        fields = {**self._from_to(tensor, tensor), Field.KIND: Kind.PACK, Field.OUTSIDE: index}
        self._emit("(input)", fields)

    def _unpack(self, lanes: int) -> None:
        for index, outside in enumerate(self.outputs):
            name = self.tensors.root(outside.name)
            alone = (name, 1) in self.tensors.tensors
            if alone != (lanes == 1) or (name, lanes) not in self.tensors.tensors:
                continue
            tensor = self.tensors.read(outside.name, lanes)
            number = len(self.inputs) + index
            fields = {
                **self._from_to(tensor, tensor),
                Field.KIND: Kind.UNPACK,
                Field.OUTSIDE: number,
            }
            self._emit("(output)", fields)
            self.tensors.used((outside.name,), lanes)

    def _spread(self) -> None:
        """What the groups read of single images, into their lanes."""
        forms = {outside.name: outside.form for outside in self.inputs}
        forms.update({node.name: node.form for node in self.nodes if node.form is not None})
        for name in self.tensors.crossing:
            source = self.tensors.read(name, 1)
            target = self.tensors.new(name, self.lanes, forms[name])
            fields = {
                **self._from_to(source, target),
                Field.KIND: Kind.SPREAD,
                Field.TARGET_LANES: self.lanes,
            }
            self._emit("(lanes)", fields)
        self.tensors.used(self.tensors.crossing, 1)

    def _add(self, node: Node, lanes: int) -> None:
        if isinstance(node, Reshape):  # another name for the same place
            return
        if isinstance(node, Convolution):
            self._convolution(node, lanes)
        elif isinstance(node, Pool):
            self._pool(node, lanes)
        elif isinstance(node, Concatenate):
            self._concatenate(node, lanes)
        else:
            assert isinstance(node, Combine | Activate)
            self._elementwise(node, lanes)
        self.tensors.used(node.inputs, lanes)

    def _convolution(self, node: Convolution, lanes: int) -> None:
        assert node.form is not None
        source = self.tensors.read(node.inputs[0], lanes)
        other = self.tensors.read(node.inputs[1], lanes) if len(node.inputs) > 1 else None
        target = self.tensors.in_place_of_residual(node, lanes) or self.tensors.new(
            node.name, lanes, node.form
        )
        layouts = self.tensors.layouts[lanes]
        multiply = lanes == 1 and node.form.positions == 1
        curve = node.after.curve is not Curve.NONE
        fields = self._from_to(source, target)
        if node.form.positions == 1:
            places = places_of_one(node, source.layout)
            fields[Field.SOURCE_LEAD] = 0
        elif layouts.is_direct(node):
            places = places_direct(node, source.layout)
        else:
            places = self._phases(node, source, target.layout, fields)
        blocks = 1
        if not multiply:
            tiling = tiling_of(target.layout)
            blocks = blocks_of(node, *places, tiling, target.layout)
            fields |= {
                Field.MASK: self._mask(target.layout),
                Field.VECTORS: tiling.vectors,
                Field.TILES: tiling.tiles,
                Field.LINES: tiling.lines,
            }
        starts, offsets, values = sparse_rows(node, *places, blocks)
        bias = np.concatenate([node.bias, np.zeros((blocks - 1) * len(node.bias), np.float32)])
        per_row = np.diff(starts).reshape(blocks, -1).sum(0)
        fields |= {
            Field.KIND: Kind.MULTIPLY if multiply else Kind.CONVOLVE,
            Field.STARTS: self.numbers.add("longs", starts),
            Field.WEIGHTS: self.numbers.add_weights(offsets, values),
            Field.BIAS: self.numbers.add("constants", bias),
            Field.SPLITS: self.numbers.add("longs", splits(per_row, self.threads)),
            Field.BLOCKS: blocks,
        }
        if other is not None:
            fields |= {Field.OTHER: other.slot, Field.OTHER_PLANE: other.layout.plane}
        self._emit(node.name, fields, Clamp() if curve else node.after)
        if curve:
            activation = self._from_to(target, target)
            activation |= {Field.KIND: Kind.ACTIVATE, Field.CURVE: node.after.curve}
            self._emit(node.name, activation)

    def _phases(
        self, node: Convolution, source: Tensor, target: Layout, fields: dict[Field, Any]
    ) -> tuple[Longs, list[Tap]]:
        """Copy the input into the planes of its phases, those that a weight reads."""
        phases = phases_of(node, source.layout, target)
        room = self.tensors.room(max(1, len(phases.entries)) * phases.layout.plane)
        self._emit(
            node.name,
            {
                Field.KIND: Kind.PHASES,
                Field.SOURCE: source.slot,
                Field.SOURCE_STRIDE: source.layout.stride,
                Field.TARGET: room,
                Field.TARGET_STRIDE: phases.layout.stride,
                Field.LANES: target.lanes,
                Field.TABLE: self.numbers.add("longs", phases.entries.reshape(-1)),
                Field.ENTRIES: len(phases.entries),
                Field.STEP_Y: node.stride[0],
                Field.STEP_X: node.stride[1],
            },
        )
        fields |= {Field.SOURCE: room, Field.SOURCE_LEAD: phases.layout.lead}
        return phases.places, phases.taps

    def _mask(self, layout: Layout) -> int:
        if layout not in self.masks:
            self.masks[layout] = self.numbers.add("masks", layout.mask())
        return self.masks[layout]

    def _pool(self, node: Pool, lanes: int) -> None:
        assert node.form is not None
        source = self.tensors.read(node.inputs[0], lanes)
        target = self.tensors.new(node.name, lanes, node.form)
        size, step, before = _regular(node) if lanes == 1 else (0, 1, 0)
        row = source.layout.width * lanes
        whole = (0, source.layout.height), (0, source.layout.width)
        windows = np.array([*node.rows, *node.columns], np.int64).reshape(-1)
        fields = self._from_to(source, target) | {
            Field.KIND: Kind.MAX_POOL if node.largest else Kind.AVERAGE_POOL,
            Field.TABLE: self.numbers.add("longs", windows),
            Field.BIAS: self.numbers.add("constants", node.divisors.reshape(-1)),
            Field.SCRATCH: self.tensors.room(row * self.threads),
            Field.SCRATCH_SIZE: row,
            Field.SOURCE_WIDTH: source.layout.width,
            Field.WINDOW: size,
            Field.STEP_X: step,
            Field.BEFORE: before,
            Field.DEPTH: max(end - start for start, end in node.rows),
            Field.WHOLE: source.layout.run if (*node.rows, *node.columns) == whole else 0,
        }
        self._emit(node.name, fields)

    def _concatenate(self, node: Concatenate, lanes: int) -> None:
        assert node.form is not None
        target = self.tensors.new(node.name, lanes, node.form)
        done = 0
        for name in node.inputs:
            source = self.tensors.read(name, lanes)
            fields = self._from_to(source, target) | {
                Field.KIND: Kind.COPY,
                Field.ROWS: source.channels,
            }
            self._emit(node.name, fields)
            self.rows[-1][0][Field.TARGET] = Shifted(target.slot, done * target.layout.plane)
            done += source.channels

    def _elementwise(self, node: Combine | Activate, lanes: int) -> None:
        assert node.form is not None
        source = self.tensors.read(node.inputs[0], lanes)
        target = self.tensors.new(node.name, lanes, node.form)
        fields = self._from_to(source, target)
        if isinstance(node, Combine):
            other = self.tensors.read(node.inputs[1], lanes)
            fields |= {
                Field.KIND: Kind.SCALE if node.product else Kind.ADD,
                Field.OTHER: other.slot,
            }
        else:
            fields |= {Field.KIND: Kind.ACTIVATE, Field.CURVE: node.after.curve}
        self._emit(node.name, fields, node.after)


def _regular(node: Pool) -> tuple[int, int, int]:
    """Size and distance of the windows' columns, and their padding before; size 0: they differ."""
    sizes = [end - start for start, end in node.columns]
    size = max(sizes)
    if len(sizes) == 1:
        return (size, 1, 0) if node.columns[0][0] == 0 else (0, 1, 0)
    # The first window may be cut by the padding, and so may the last ones.
    step = node.columns[-1][1] - node.columns[-2][1] or node.columns[-1][0] - node.columns[-2][0]
    before = size - node.columns[0][1]
    width = node.input_forms[0].width
    wanted = [
        (max(0, o * step - before), min(width, o * step - before + size)) for o in range(len(sizes))
    ]
    return (size, step, before) if before >= 0 and wanted == list(node.columns) else (0, 1, 0)


class Numbers:
    """What operations read beside their row of the table: weights, windows, divisors, masks."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Any]] = {k: [] for k in ("longs", "constants", "masks")}
        self.sizes: Counter[str] = Counter()
        self.offsets: list[npt.NDArray[np.int32]] = []
        self.values: list[npt.NDArray[np.float32]] = []
        self.weights = 0

    def add(self, kind: str, numbers: Any) -> int:
        """Append numbers; return their place."""
        place = self.sizes[kind]
        self.parts[kind].append(numbers)
        self.sizes[kind] += len(numbers)
        return place

    def add_weights(self, offsets: Any, values: Any) -> int:
        """Append the non-zero weights of a layer; return their place."""
        place = self.weights
        self.offsets.append(offsets.astype(np.int32))
        self.values.append(values.astype(np.float32))
        self.weights += len(values)
        return place

    def joined(self, kind: str, dtype: Any) -> Any:
        """All numbers of a kind."""
        return np.concatenate([np.zeros(0, dtype), *self.parts[kind]]).astype(dtype)
