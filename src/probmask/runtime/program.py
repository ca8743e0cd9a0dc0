"""A part of the network as a table for the compiled driver: places of tensors, weights, masks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.runtime.fields import COLUMNS, Curve, Field, Kind
from probmask.runtime.layout import Layout, Layouts, Tap, phase_sizes, plane_layout, taps
from probmask.runtime.nodes import (
    Activate,
    Clamp,
    Combine,
    Concatenate,
    Convolution,
    Form,
    Node,
    Pair,
    Pool,
    Reshape,
)
from probmask.runtime.tiles import MOST, SHAPES
from probmask.runtime.vectors import WIDTH

Longs = npt.NDArray[np.int64]
# What a row costs beside its weights, in weights: its bias and the storing of its results.
_ROW_COST = 4
# Readable floats after the last tensor.
_MARGIN = 64


@dataclass(frozen=True)
class Outside:
    """A tensor that comes from PyTorch or goes there."""

    name: str
    form: Form
    tail: tuple[int, ...]


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


@dataclass
class _Slot:
    """Room for planes of one layout; tensors that do not live at once share it."""

    layout: Layout
    channels: int
    place: int = -1


@dataclass
class _Tensor:
    slot: _Slot
    layout: Layout
    channels: int


class _Pools:
    """Constant numbers of all operations, each kind in one array."""

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
        self.layouts = {1: Layouts(nodes[:lone], 1), lanes: Layouts(nodes[lone:], lanes)}
        if lanes == 1:
            self.layouts = {1: Layouts(nodes, 1)}
        self.roots = {node.name: node.inputs[0] for node in nodes if isinstance(node, Reshape)}
        self.tensors: dict[tuple[str, int], _Tensor] = {}
        self.slots: list[_Slot] = []
        self.kept: set[tuple[str, int]] = set()  # whose place another tensor has taken over
        self.free: dict[Layout, list[_Slot]] = {}
        self.rows: list[tuple[dict[Field, Any], Clamp, str]] = []
        self.pools = _Pools()
        self.masks: dict[Layout, int] = {}
        self.uses = self._count_uses()

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
        arena_size = self._place_slots()
        table = np.zeros((len(self.rows), COLUMNS), np.int64)
        for i, (fields, _, _) in enumerate(self.rows):
            for key, value in fields.items():
                table[i, key] = value.place if isinstance(value, _Slot) else value
        limits = np.array([(a.low, a.high) for _, a, _ in self.rows], np.float32).reshape(-1, 2)
        return Program(
            table=table,
            limits=limits,
            lone=lone_operations,
            group=self.lanes if not lone else 1,
            arena_size=arena_size,
            longs=self.pools.joined("longs", np.int64),
            offsets=np.concatenate([np.zeros(0, np.int32), *self.pools.offsets]),
            values=np.concatenate([np.zeros(0, np.float32), *self.pools.values]),
            constants=self.pools.joined("constants", np.float32),
            masks=self.pools.joined("masks", np.int32),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            owners=tuple(owner for _, _, owner in self.rows),
        )

    # Tensors and their places

    def _root(self, name: str) -> str:
        """The tensor that a name, perhaps of a view, stands for."""
        while name in self.roots:
            name = self.roots[name]
        return name

    def _count_uses(self) -> Counter[tuple[str, int]]:
        """How often each tensor is read, by name and lanes; views count for what they show."""
        uses: Counter[tuple[str, int]] = Counter()
        crossing = set()
        late = {node.name for node in self.nodes[self.lone :]} - set(self.roots)
        for i, node in enumerate(self.nodes):
            if isinstance(node, Reshape):
                continue
            lanes = 1 if i < self.lone else self.lanes
            for name in map(self._root, node.inputs):
                uses[name, lanes] += 1
                if i >= self.lone and name not in late:
                    crossing.add(name)
        for name in crossing:
            uses[name, 1] += 1
        for outside in self.outputs:
            name = self._root(outside.name)
            uses[name, self.lanes if name in late else 1] += 1
        self.crossing = sorted(crossing)
        return uses

    def _new(self, name: str, lanes: int, form: Form) -> _Tensor:
        layout = self.layouts[lanes].of(form)
        slot = self._take(layout, form.channels)
        tensor = _Tensor(slot, layout, form.channels)
        self.tensors[name, lanes] = tensor
        if not self.uses[name, lanes]:
            self._give_back(slot)
        return tensor

    def _take(self, layout: Layout, channels: int) -> _Slot:
        """The room that was given back last: it is most likely still in the cache."""
        free = self.free.setdefault(layout, [])
        if free:
            slot = free.pop()
            slot.channels = max(slot.channels, channels)
            return slot
        slot = _Slot(layout, channels)
        self.slots.append(slot)
        return slot

    def _give_back(self, slot: _Slot) -> None:
        self.free.setdefault(slot.layout, []).append(slot)

    def _read(self, name: str, lanes: int) -> _Tensor:
        return self.tensors[self._root(name), lanes]

    def _used(self, names: Sequence[str], lanes: int) -> None:
        for name in map(self._root, names):
            self.uses[name, lanes] -= 1
            if not self.uses[name, lanes] and (name, lanes) not in self.kept:
                self._give_back(self.tensors[name, lanes].slot)

    def _place_slots(self) -> int:
        place = 0
        for slot in self.slots:
            slot.place = place
            size = slot.channels * slot.layout.plane
            place += -(-size // 16) * 16 + 16
        return place + _MARGIN

    def _room(self, floats: int) -> _Slot:
        """Room that no tensor shares."""
        slot = _Slot(Layout(1, floats, floats, 0, floats, 1), 1)
        self.slots.append(slot)
        return slot

    # Operations

    def _emit(self, owner: str, fields: dict[Field, Any], after: Clamp | None = None) -> None:
        self.rows.append(({Field.OTHER: -1, **fields}, after or Clamp(), owner))

    def _from_to(self, source: _Tensor, target: _Tensor) -> dict[Field, Any]:
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
        tensor = self._new(outside.name, 1, outside.form)
        fields = {**self._from_to(tensor, tensor), Field.KIND: Kind.PACK, Field.OUTSIDE: index}
        self._emit("(input)", fields)

    def _unpack(self, lanes: int) -> None:
        for index, outside in enumerate(self.outputs):
            name = self._root(outside.name)
            alone = (name, 1) in self.tensors
            if alone != (lanes == 1) or (name, lanes) not in self.tensors:
                continue
            tensor = self._read(outside.name, lanes)
            number = len(self.inputs) + index
            fields = {
                **self._from_to(tensor, tensor),
                Field.KIND: Kind.UNPACK,
                Field.OUTSIDE: number,
            }
            self._emit("(output)", fields)
            self._used((outside.name,), lanes)

    def _spread(self) -> None:
        """What the groups read of single images, into their lanes."""
        forms = {outside.name: outside.form for outside in self.inputs}
        forms.update({node.name: node.form for node in self.nodes if node.form is not None})
        for name in self.crossing:
            source = self._read(name, 1)
            target = self._new(name, self.lanes, forms[name])
            fields = {
                **self._from_to(source, target),
                Field.KIND: Kind.SPREAD,
                Field.TARGET_LANES: self.lanes,
            }
            self._emit("(lanes)", fields)
        self._used(self.crossing, 1)

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
        self._used(node.inputs, lanes)

    def _convolution(self, node: Convolution, lanes: int) -> None:
        assert node.form is not None
        source = self._read(node.inputs[0], lanes)
        other = self._read(node.inputs[1], lanes) if len(node.inputs) > 1 else None
        target = self._in_place_of_residual(node, lanes) or self._new(node.name, lanes, node.form)
        layouts = self.layouts[lanes]
        multiply = lanes == 1 and node.form.positions == 1
        curve = node.after.curve is not Curve.NONE
        fields = self._from_to(source, target)
        if node.form.positions == 1:
            places = _places_of_one(node, source.layout)
            fields[Field.SOURCE_LEAD] = 0
        elif layouts.is_direct(node):
            places = _places_direct(node, source.layout)
        else:
            places = self._phases(node, source, target.layout, fields)
        blocks = 1
        if not multiply:
            tiling = _tiling(target.layout)
            blocks = _blocks(node, *places, tiling, target.layout)
            fields |= {
                Field.MASK: self._mask(target.layout),
                Field.VECTORS: tiling.vectors,
                Field.TILES: tiling.tiles,
                Field.LINES: tiling.lines,
            }
        starts, offsets, values = _sparse_rows(node, *places, blocks)
        bias = np.concatenate([node.bias, np.zeros((blocks - 1) * len(node.bias), np.float32)])
        per_row = np.diff(starts).reshape(blocks, -1).sum(0)
        fields |= {
            Field.KIND: Kind.MULTIPLY if multiply else Kind.CONVOLVE,
            Field.STARTS: self.pools.add("longs", starts),
            Field.WEIGHTS: self.pools.add_weights(offsets, values),
            Field.BIAS: self.pools.add("constants", bias),
            Field.SPLITS: self.pools.add("longs", _splits(per_row, self.threads)),
            Field.BLOCKS: blocks,
        }
        if other is not None:
            fields |= {Field.OTHER: other.slot, Field.OTHER_PLANE: other.layout.plane}
        self._emit(node.name, fields, Clamp() if curve else node.after)
        if curve:
            activation = self._from_to(target, target)
            activation |= {Field.KIND: Kind.ACTIVATE, Field.CURVE: node.after.curve}
            self._emit(node.name, activation)

    def _in_place_of_residual(self, node: Convolution, lanes: int) -> _Tensor | None:
        """The residual's place, if nothing else reads it: each result needs only its own."""
        if len(node.inputs) < 2 or not self.uses[node.name, lanes]:
            return None
        source, other = map(self._root, node.inputs)
        if self.uses[other, lanes] != 1 or other == source:
            return None
        tensor = self.tensors[other, lanes]
        self.tensors[node.name, lanes] = tensor
        self.kept.add((other, lanes))
        return tensor

    def _phases(
        self, node: Convolution, source: _Tensor, target: Layout, fields: dict[Field, Any]
    ) -> tuple[npt.NDArray[np.int64], list[Tap]]:
        """Copy the input into the planes of its phases, those that a weight reads."""
        found = taps(node)
        shifts = [tap.shift for tap in found]
        lanes = target.lanes
        sizes = [phase_sizes(node, tap.phase) for tap in found]
        layout = plane_layout(
            max([1, *(height for height, _ in sizes)]),
            max([1, *(width for _, width in sizes)]),
            target.stride,
            lanes,
            shifts,
            run=target.vectors * WIDTH,
        )
        inputs = node.input_forms[0].channels
        read = _read_taps(node, found)
        phases = sorted({tap.phase for tap in found})
        index: dict[tuple[int, Pair], int] = {}
        for channel in range(inputs):
            for phase in phases:
                if any(read[channel, k] for k, tap in enumerate(found) if tap.phase == phase):
                    index[channel, phase] = len(index)
        entries = [
            (
                channel * source.layout.plane + source.layout.place(*phase),
                number * layout.plane + layout.lead,
                *phase_sizes(node, phase),
            )
            for (channel, phase), number in index.items()
        ]
        room = self._room(max(1, len(index)) * layout.plane)
        self._emit(
            node.name,
            {
                Field.KIND: Kind.PHASES,
                Field.SOURCE: source.slot,
                Field.SOURCE_STRIDE: source.layout.stride,
                Field.TARGET: room,
                Field.TARGET_STRIDE: layout.stride,
                Field.LANES: lanes,
                Field.TABLE: self.pools.add("longs", np.array(entries, np.int64).reshape(-1)),
                Field.ENTRIES: len(entries),
                Field.STEP_Y: node.stride[0],
                Field.STEP_X: node.stride[1],
            },
        )
        fields |= {Field.SOURCE: room, Field.SOURCE_LEAD: layout.lead}
        places = np.zeros((inputs, len(found)), np.int64)
        for channel in range(inputs):
            for k, tap in enumerate(found):
                plane = index.get((channel, tap.phase), 0) * layout.plane
                y, x = tap.shift
                places[channel, k] = plane + (y * layout.stride + x) * lanes
        return places, found

    def _mask(self, layout: Layout) -> int:
        if layout not in self.masks:
            self.masks[layout] = self.pools.add("masks", layout.mask())
        return self.masks[layout]

    def _pool(self, node: Pool, lanes: int) -> None:
        assert node.form is not None
        source = self._read(node.inputs[0], lanes)
        target = self._new(node.name, lanes, node.form)
        size, step, before = _regular(node) if lanes == 1 else (0, 1, 0)
        row = source.layout.width * lanes
        whole = (0, source.layout.height), (0, source.layout.width)
        windows = np.array([*node.rows, *node.columns], np.int64).reshape(-1)
        fields = self._from_to(source, target) | {
            Field.KIND: Kind.MAX_POOL if node.largest else Kind.AVERAGE_POOL,
            Field.TABLE: self.pools.add("longs", windows),
            Field.BIAS: self.pools.add("constants", node.divisors.reshape(-1)),
            Field.SCRATCH: self._room(row * self.threads),
            Field.SCRATCH_SIZE: row,
            Field.SOURCE_WIDTH: source.layout.width,
            Field.WINDOW: size,
            Field.STEP_X: step,
            Field.BEFORE: before,
            Field.WHOLE: source.layout.run if (*node.rows, *node.columns) == whole else 0,
        }
        self._emit(node.name, fields)

    def _concatenate(self, node: Concatenate, lanes: int) -> None:
        assert node.form is not None
        target = self._new(node.name, lanes, node.form)
        done = 0
        for name in node.inputs:
            source = self._read(name, lanes)
            fields = self._from_to(source, target) | {
                Field.KIND: Kind.COPY,
                Field.ROWS: source.channels,
            }
            self._emit(node.name, fields)
            self.rows[-1][0][Field.TARGET] = _Shifted(target.slot, done * target.layout.plane)
            done += source.channels

    def _elementwise(self, node: Combine | Activate, lanes: int) -> None:
        assert node.form is not None
        source = self._read(node.inputs[0], lanes)
        target = self._new(node.name, lanes, node.form)
        fields = self._from_to(source, target)
        if isinstance(node, Combine):
            other = self._read(node.inputs[1], lanes)
            fields |= {
                Field.KIND: Kind.SCALE if node.product else Kind.ADD,
                Field.OTHER: other.slot,
            }
        else:
            fields |= {Field.KIND: Kind.ACTIVATE, Field.CURVE: node.after.curve}
        self._emit(node.name, fields, node.after)


class _Shifted(_Slot):
    """A place within a slot."""

    def __init__(self, slot: _Slot, shift: int) -> None:
        self.slot, self.shift = slot, shift

    @property
    def place(self) -> int:  # type: ignore[override]
        """Known once the slot has its own."""
        return self.slot.place + self.shift


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


# Weights


def _places_of_one(node: Convolution, layout: Layout) -> tuple[npt.NDArray[np.int64], list[Tap]]:
    """For one output position: where each weight's input lies, by channel and tap."""
    form = node.input_forms[0]
    if node.rank == 0:  # each number of the image is a channel of the weight
        y, x = np.divmod(np.arange(form.positions), form.width)
        within = layout.lead + (y * layout.stride + x) * layout.lanes
        places = (np.arange(form.channels)[:, None] * layout.plane + within).reshape(-1, 1)
        return places, [Tap(0, 0, (0, 0), (0, 0))]
    found = taps(node)
    steps = [
        (tap.shift[0] * node.stride[0] + tap.phase[0], tap.shift[1] * node.stride[1] + tap.phase[1])
        for tap in found
    ]
    within = np.array([layout.place(*step) for step in steps], np.int64)
    return np.arange(form.channels)[:, None] * layout.plane + within, found


def _places_direct(node: Convolution, layout: Layout) -> tuple[npt.NDArray[np.int64], list[Tap]]:
    """Where each weight's inputs begin, from the plane's first position."""
    found = taps(node)
    within = np.array(
        [(tap.shift[0] * layout.stride + tap.shift[1]) * layout.lanes for tap in found], np.int64
    )
    channels = np.arange(node.input_forms[0].channels)
    return channels[:, None] * layout.plane + within, found


def _read_taps(node: Convolution, found: Sequence[Tap]) -> npt.NDArray[np.bool_]:
    """By input channel and tap: whether any output channel has a weight there."""
    outputs, per_group = node.weight.shape[:2]
    kept = _tap_weights(node, found) != 0
    grouped = kept.reshape(node.groups, outputs // node.groups, per_group, len(found))
    read: npt.NDArray[np.bool_] = grouped.any(1).reshape(node.groups * per_group, len(found))
    return read


def _tap_weights(node: Convolution, found: Sequence[Tap]) -> npt.NDArray[np.float32]:
    rows, columns = [tap.row for tap in found], [tap.column for tap in found]
    return node.weight[:, :, rows, columns]


def _sparse_rows(
    node: Convolution, places: npt.NDArray[np.int64], found: Sequence[Tap], blocks: int
) -> tuple[Longs, npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Of each block and output channel: where its weights begin, their inputs and values."""
    weights = _tap_weights(node, found)
    outputs, per_group = weights.shape[:2]
    row, channel, tap = np.nonzero(weights)
    group = row // max(1, outputs // node.groups)
    block = channel * blocks // max(1, per_group)
    order = np.argsort(block * outputs + row, kind="stable")
    starts = np.zeros(blocks * outputs + 1, np.int64)
    np.cumsum(np.bincount(block * outputs + row, minlength=blocks * outputs), out=starts[1:])
    offsets = places[group * per_group + channel, tap]
    return starts, offsets[order], weights[row, channel, tap][order]


@dataclass(frozen=True)
class _Tiling:
    """How a plane is cut into tiles: into so many, of lines of so many vectors; 0: of the run."""

    tiles: int
    lines: int
    vectors: int


def _tiling(layout: Layout) -> _Tiling:
    """Rows of the image where the padding between them would cost more than more tiles do."""
    run = layout.vectors
    options = {_Tiling(-(-run // MOST), 0, run): run + 2 * -(-run // MOST)}
    vectors, rest = divmod(layout.width * layout.lanes, WIDTH)
    for lines, fitting in SHAPES:
        if not rest and fitting == vectors and layout.height % lines == 0:
            tiles = layout.height // lines
            options[_Tiling(tiles, lines, vectors)] = tiles * (lines * vectors + 2)
    return min(options, key=lambda tiling: options[tiling])


# Of the first cache, for what a tile reads; the rest is for weights and sums.
_CACHE = 20_000  # bytes
# Weights of a row that a block has to have, to be worth the loading and storing of its sums.
_LEAST_WEIGHTS = 6


def _blocks(
    node: Convolution,
    places: npt.NDArray[np.int64],
    found: Sequence[Tap],
    tiling: _Tiling,
    layout: Layout,
) -> int:
    """Of input channels: so many that what a tile reads of one stays in the first cache."""
    if node.groups > 1 or not found:
        return 1
    channels = len(places)
    if tiling.lines:
        length = ((tiling.lines - 1) * layout.stride + layout.width) * layout.lanes
    else:
        length = -(-tiling.vectors // tiling.tiles) * WIDTH
    span = int(places[0].max() - places[0].min()) + length
    wanted = 4 * span * channels / _CACHE
    weights = np.count_nonzero(node.weight) / max(1, len(node.weight))
    return max(1, min(round(wanted), int(weights / _LEAST_WEIGHTS), channels))


def _splits(weights: Longs, threads: int) -> Longs:
    """The first row of each thread, such that all have about as much to do."""
    cost = np.concatenate([[0], np.cumsum(weights + _ROW_COST)])
    wanted = cost[-1] * np.arange(threads + 1) / threads
    splits = np.searchsorted(cost, wanted)
    splits[0], splits[-1] = 0, len(weights)
    first_rows: Longs = splits.astype(np.int64)
    return first_rows
