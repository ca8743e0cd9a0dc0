"""The operations of a program as calls of the C kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.runtime.c.c_tables import Tables
from probmask.runtime.kernels.operation_table import GATES, Cell, Curve, Field, Kind, Place
from probmask.runtime.kernels.recurrence import TABLE_LONGS
from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import INFINITY
from probmask.runtime.plan.program import Program
from probmask.runtime.plan.recurrent_operations import recurrent_weights

# Position bytes are padded to this many: the widest vector that the C kernels use.
_WIDEST = 16
# Steps of a recurrent layer whose inputs are transposed at once: PM_STEPS in kernels.h.
_STEPS = 8
# The C names of the curves; a test checks that all have one.
CURVES = {
    Curve.NONE: "PM_CLAMP",
    Curve.SILU: "PM_SILU",
    Curve.GELU: "PM_GELU",
    Curve.GELU_TANH: "PM_GELU_TANH",
    Curve.HARDSWISH: "PM_HARDSWISH",
    Curve.TANH: "PM_TANH",
    Curve.MISH: "PM_MISH",
    Curve.LEAKY: "PM_LEAKY",
    Curve.ELU: "PM_ELU",
    Curve.SIGMOID: "PM_SIGMOID",
    Curve.HARDSIGMOID: "PM_HARDSIGMOID",
}


@dataclass(frozen=True)
class Operation:
    """A row of the program's table, and where its C source goes."""

    program: Program
    index: int
    tables: Tables
    # Name of the arena, and a suffix for all names of this operation.
    arena: str
    suffix: str
    # Pointers to the external tensors, and floats per image of each.
    externals: tuple[str, ...]

    def __getitem__(self, field: Field) -> int:
        return int(self.program.table[self.index, field])

    @property
    def limits(self) -> tuple[float, float]:
        """Lower and upper clamp."""
        low, high = self.program.limits[self.index]
        return float(low), float(high)

    @property
    def kind(self) -> Kind:
        """Kind of the operation."""
        return Kind(self[Field.KIND])

    def at(self, field: Field, lead: Field | None = None) -> str:
        """Return a pointer into the arena."""
        return f"{self.arena} + {self[field] + (self[lead] if lead is not None else 0)}"

    def after(self, field: Field, lead: Field, count: int = 0, plane: Field | None = None) -> str:
        """Return a pointer to an element ``count`` planes after a lead; 0 without the tensor."""
        if self[field] < 0:
            return "0"
        step = 1 if plane is None else self[plane]
        return f"{self.arena} + {self[field] + self[lead] + count * step}"

    def final(self, start: int, field: Field) -> str:
        """Return a pointer to a final state of a recurrent layer; 0 if it is not needed."""
        return "0" if self[field] < 0 else f"{self.arena} + {start + self[field]}"

    def define(self, kind: str, members: Mapping[str, Any]) -> str:
        """Define the structure of this operation; return a pointer to it."""
        return "&" + self.tables.structure(kind, f"op{self.suffix}", members)

    def floats(self, name: str, first: int, count: int) -> str:
        """Define an array of constants; return its name."""
        numbers = self.program.constants[first : first + count]
        return self.tables.array("float", f"{name}{self.suffix}", numbers)

    def integers(self, name: str, first: int, count: int) -> str:
        """Define an array of integers; return its name."""
        numbers = self.program.longs[first : first + count].astype(np.int32)
        return self.tables.array("int32_t", f"{name}{self.suffix}", numbers)

    @property
    def run(self) -> int:
        """Number of floats from the first position of the target to the last."""
        rows = (self[Field.HEIGHT] - 1) * self[Field.TARGET_STRIDE]
        return (rows + self[Field.WIDTH]) * self[Field.LANES]

    def positions(self) -> str:
        """Define the bytes of positions and padding; return their name, or 0 without padding."""
        kept = np.zeros(-(-self.run // _WIDEST) * _WIDEST, np.int8)
        rows, columns = np.arange(self[Field.HEIGHT])[:, None], np.arange(self[Field.WIDTH])
        places = (rows * self[Field.TARGET_STRIDE] + columns).reshape(-1, 1) * self[Field.LANES]
        kept[(places + np.arange(self[Field.LANES])).ravel()] = -1
        if kept.all():
            return "0"
        return self.tables.array("signed char", f"positions{self.suffix}", kept)


def _layer(op: Operation) -> dict[str, Any]:
    rows, blocks, program = op[Field.ROWS], op[Field.BLOCKS], op.program
    starts = program.longs[op[Field.STARTS] : op[Field.STARTS] + blocks * rows + 1]
    weights = slice(op[Field.WEIGHTS], op[Field.WEIGHTS] + int(starts[-1]))
    offsets, wide = _offsets(op, program.offsets[weights])
    counts = np.diff(starts).astype(np.int32)
    low, high = op.limits
    return {
        "source": op.at(Field.SOURCE, Field.SOURCE_LEAD),
        "target": op.at(Field.TARGET, Field.TARGET_LEAD),
        "residual": op.at(Field.OTHER, Field.TARGET_LEAD) if op[Field.OTHER] >= 0 else "0",
        "counts": op.tables.array("int32_t", f"counts{op.suffix}", counts),
        "offsets": offsets,
        "wide": wide,
        "values": op.tables.array("float", f"values{op.suffix}", program.values[weights]),
        "bias": op.floats("bias", op[Field.BIAS], rows),
        "rows": rows,
        "blocks": blocks,
        "low": low,
        "high": high,
    }


def _offsets(op: Operation, offsets: npt.NDArray[np.int32]) -> tuple[str, int]:
    return op.tables.offsets(f"offsets{op.suffix}", offsets)


def _convolve(op: Operation) -> str:
    members = _layer(op) | {
        "target_plane": op[Field.TARGET_PLANE],
        "residual_plane": op[Field.OTHER_PLANE],
        "run": op.run,
        "positions": op.positions(),
    }
    return f"pm_convolve({op.define('pm_layer', members)})"


def _linear(op: Operation) -> str:
    members = _layer(op)
    # One position: the engine reads and writes it without a lead.
    members["source"], members["target"] = op.at(Field.SOURCE), op.at(Field.TARGET)
    members["residual"] = op.at(Field.OTHER) if op[Field.OTHER] >= 0 else "0"
    members |= {"target_plane": op[Field.TARGET_PLANE], "residual_plane": op[Field.OTHER_PLANE]}
    return f"pm_linear({op.define('pm_layer', members)})"


def _image(op: Operation, tensor: str, plane: Field, stride: Field) -> dict[str, Any]:
    return {
        "tensor": tensor,
        "channels": op[Field.ROWS],
        "plane": op[plane],
        "height": op[Field.HEIGHT],
        "width": op[Field.WIDTH],
        "stride": op[stride],
        "lanes": op[Field.LANES],
        "tokens": op[Field.TOKENS],
    }


def _external(op: Operation, size: int) -> str:
    """Return a pointer to the current image of an external tensor."""
    return f"{op.externals[op[Field.EXTERNAL]]} + {size} * image"


def _image_size(op: Operation) -> int:
    return op[Field.ROWS] * op[Field.HEIGHT] * op[Field.WIDTH]


def _pack(op: Operation) -> str:
    tensor = op.at(Field.TARGET, Field.TARGET_LEAD)
    members = _image(op, tensor, Field.TARGET_PLANE, Field.TARGET_STRIDE)
    return f"pm_pack({op.define('pm_image', members)}, {_external(op, _image_size(op))})"


def _unpack(op: Operation) -> str:
    tensor = op.at(Field.SOURCE, Field.SOURCE_LEAD)
    members = _image(op, tensor, Field.SOURCE_PLANE, Field.SOURCE_STRIDE)
    return f"pm_unpack({op.define('pm_image', members)}, {_external(op, _image_size(op))})"


def _planes(op: Operation) -> dict[str, Any]:
    """Return the members that all operations from planes to planes have."""
    return {
        "source": op.at(Field.SOURCE, Field.SOURCE_LEAD),
        "target": op.at(Field.TARGET, Field.TARGET_LEAD),
        "channels": op[Field.ROWS],
        "source_plane": op[Field.SOURCE_PLANE],
        "target_plane": op[Field.TARGET_PLANE],
        "source_stride": op[Field.SOURCE_STRIDE],
        "target_stride": op[Field.TARGET_STRIDE],
        "height": op[Field.HEIGHT],
        "width": op[Field.WIDTH],
    }


def _interleave(op: Operation) -> str:
    members = _planes(op) | {"lanes": op[Field.TARGET_LANES]}
    return f"pm_interleave({op.define('pm_interleave', members)}, lane)"


def _split_phases(op: Operation) -> str:
    count = op[Field.ENTRIES]
    members = {
        "source": op.at(Field.SOURCE),
        "target": op.at(Field.TARGET),
        "planes": op.integers("planes", op[Field.TABLE], 4 * count),
        "count": count,
        "source_stride": op[Field.SOURCE_STRIDE],
        "target_stride": op[Field.TARGET_STRIDE],
        "step_y": op[Field.STEP_Y],
        "step_x": op[Field.STEP_X],
        "lanes": op[Field.LANES],
    }
    return f"pm_split_phases({op.define('pm_phases', members)})"


def _pool(op: Operation) -> str:
    is_max = op.kind is Kind.MAX_POOL
    height, width = op[Field.HEIGHT], op[Field.WIDTH]
    members = _planes(op) | {
        "windows": op.integers("windows", op[Field.TABLE], 2 * (height + width)),
        "factors": "0" if is_max else op.floats("factors", op[Field.BIAS], height * width),
        "scratch": op.at(Field.SCRATCH),
        "source_width": op[Field.SOURCE_WIDTH],
        "lanes": op[Field.LANES],
        "run": op[Field.WHOLE_RUN] if op[Field.LANES] == 1 else 0,
        "size": op[Field.WINDOW_WIDTH],
        "step": op[Field.STEP_X],
        "before": op[Field.PADDING_LEFT],
    }
    name = "pm_max_pool" if is_max else "pm_average_pool"
    return f"{name}({op.define('pm_pool', members)})"


def _pool_slices(op: Operation) -> str:
    slices = op[Field.ENTRIES]
    is_max = op.kind is Kind.MAX_SLICES
    members = {
        "source": op.at(Field.SOURCE),
        "target": op.at(Field.TARGET),
        "windows": op.integers("windows", op[Field.TABLE], 2 * slices),
        "factors": "0" if is_max else op.floats("factors", op[Field.BIAS], slices),
        "channels": op[Field.ROWS] // slices,
        "plane": op[Field.TARGET_PLANE],
        "slices": slices,
        "source_slices": op[Field.DEPTH],
    }
    return f"pm_pool_slices({op.define('pm_slices', members)})"


_ELEMENTWISE = {
    Kind.ADD: "pm_add",
    Kind.ADD_CONSTANT: "pm_add",
    Kind.MULTIPLY: "pm_multiply",
    Kind.MULTIPLY_CONSTANT: "pm_multiply",
    Kind.ACTIVATE: "pm_activate",
    Kind.COPY: "pm_copy",
}


def _elementwise(op: Operation) -> str:
    size = op[Field.ROWS] * op[Field.SOURCE_PLANE]
    other = "0"
    if op.kind in (Kind.ADD_CONSTANT, Kind.MULTIPLY_CONSTANT):
        other = op.floats("constant", op[Field.BIAS], size)
    elif op.kind in (Kind.ADD, Kind.MULTIPLY):
        other = op.at(Field.OTHER)
    low, high = op.limits
    members = {
        "source": op.at(Field.SOURCE),
        "other": other,
        "target": op.at(Field.TARGET),
        "size": size,
        "curve": CURVES[Curve(op[Field.CURVE])],
        "low": low,
        "high": high,
    }
    call = f"{_ELEMENTWISE[op.kind]}({op.define('pm_elementwise', members)})"
    return f"{call}; {_clear_padding(op)}" if op[Field.CURVE] >= Curve.SIGMOID else call


def _clear_padding(op: Operation) -> str:
    tensor = op.at(Field.TARGET, Field.TARGET_LEAD)
    members = _image(op, tensor, Field.TARGET_PLANE, Field.TARGET_STRIDE)
    members["lead"] = op[Field.TARGET_LEAD]
    structure = op.tables.structure("pm_image", f"padding{op.suffix}", members)
    return f"pm_clear_padding(&{structure})"


_CHANNELS = {
    Kind.ADD_CHANNELS: "pm_add_channels",
    Kind.MULTIPLY_CHANNELS: "pm_multiply_channels",
}


def _combine_channels(op: Operation) -> str:
    low, high = op.limits
    members = _planes(op) | {
        "other": op.at(Field.OTHER, Field.OTHER_LEAD),
        "other_plane": op[Field.OTHER_PLANE],
        "lanes": op[Field.LANES],
        "low": low,
        "high": high,
    }
    return f"{_CHANNELS[op.kind]}({op.define('pm_channels', members)})"


def _leaky_channels(op: Operation) -> str:
    members = _planes(op) | {
        "source": op.at(Field.SOURCE),
        "target": op.at(Field.TARGET),
        "other": op.floats("slopes", op[Field.BIAS], op[Field.ROWS]),
        "lanes": op[Field.LANES],
    }
    return f"pm_leaky_channels({op.define('pm_channels', members)})"


def _merge_phases(op: Operation) -> str:
    members = _planes(op) | {
        "step_y": op[Field.STEP_Y],
        "step_x": op[Field.STEP_X],
        "lanes": op[Field.LANES],
    }
    return f"pm_merge_phases({op.define('pm_merge', members)})"


def _resize(op: Operation) -> str:
    sides = op[Field.HEIGHT] + op[Field.WIDTH]
    members = _planes(op) | {
        "places": op.integers("places", op[Field.TABLE], 2 * sides),
        "weights": op.floats("weights", op[Field.BIAS], sides),
        "scratch": op.at(Field.SCRATCH),
        "source_width": op[Field.SOURCE_WIDTH],
    }
    return f"pm_resize({op.define('pm_resize', members)})"


def _normalize_groups(op: Operation) -> str:
    channels = op[Field.SPLITS]
    members = _planes(op) | {
        "scale": op.floats("scale", op[Field.BIAS], channels),
        "bias": op.floats("bias", op[Field.BIAS] + channels, channels),
        "groups": op[Field.ROWS],
        "channels": op[Field.CHANNELS],
        "epsilon": op.limits[0],
    }
    return f"pm_normalize_groups({op.define('pm_group_norm', members)})"


def _softmax(op: Operation) -> str:
    members = {
        "source": op.at(Field.SOURCE, Field.SOURCE_LEAD),
        "target": op.at(Field.TARGET, Field.TARGET_LEAD),
        "scale": "0",
        "bias": "0",
        "channels": op[Field.CHANNELS],
        "source_plane": op[Field.SOURCE_PLANE],
        "target_plane": op[Field.TARGET_PLANE],
        "run": op.run,
        "positions": op.positions(),
    }
    return f"pm_softmax({op.define('pm_norm', members)})"


def _rearrange(op: Operation) -> str:
    loops = op.program.longs[op[Field.TABLE] : op[Field.TABLE] + 12].reshape(3, 4).tolist()
    names = ("sizes", "source_steps", "target_steps")
    members = dict(zip(names, map(tuple, loops), strict=True))
    source, target = op.at(Field.SOURCE), op.at(Field.TARGET)
    if op[Field.SOURCE_IS] == Place.EXTERNAL:
        source = f"{_external(op, op[Field.IMAGE_SIZE])} + {op[Field.SOURCE]}"
    elif op[Field.SOURCE_IS] == Place.CONSTANT:
        sizes, steps, _ = loops
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        source = op.floats("constant", op[Field.SOURCE], last + 1)
    if op[Field.TARGET_IS] == Place.EXTERNAL:
        target = f"{_external(op, op[Field.IMAGE_SIZE])} + {op[Field.TARGET]}"
    return f"pm_rearrange({op.define('pm_rearrangement', members)}, {source}, {target})"


def _normalize(op: Operation) -> str:
    channels = op[Field.CHANNELS]
    single = op[Field.SOURCE_PLANE] == 1
    lead = (None, None) if single else (Field.SOURCE_LEAD, Field.TARGET_LEAD)
    members = {
        "source": op.at(Field.SOURCE, lead[0]),
        "target": op.at(Field.TARGET, lead[1]),
        "scale": op.floats("scale", op[Field.BIAS], channels),
        "bias": op.floats("bias", op[Field.BIAS] + channels, channels),
        "channels": channels,
        "source_plane": op[Field.SOURCE_PLANE],
        "target_plane": op[Field.TARGET_PLANE],
        "run": op.run,
        "centered": op[Field.CENTERED],
        "epsilon": op.limits[0],
        "positions": op.positions(),
    }
    return f"pm_normalize({op.define('pm_norm', members)})"


def _attend(op: Operation) -> str:
    heads = op[Field.ROWS] // op[Field.TILES]
    members = {
        "queries": op.at(Field.SOURCE),
        "keys": op.at(Field.OTHER),
        "values": op.at(Field.VALUES),
        "target": op.at(Field.TARGET),
        "heads": op.integers("heads", op[Field.TABLE], 4 * heads),
        "scratch": f"{op.arena}_scratch",
        "mask": _mask(op),
        "mask_plane": op[Field.MASK_PLANE],
        "mask_heads": op[Field.MASK_HEADS],
        "head_count": heads,
        "key_count": op[Field.KEYS],
        "depth": op[Field.DEPTH],
        "causal": op[Field.CAUSAL],
        "query_plane": op[Field.SOURCE_PLANE],
        "key_plane": op[Field.OTHER_PLANE],
        "value_plane": op[Field.VALUES_PLANE],
        "target_plane": op[Field.TARGET_PLANE],
        "run": op.run,
        "scale": op.limits[0],
        "zeros": int(np.isfinite(op.limits[1])),
        "positions": op.positions(),
    }
    return f"pm_attend({op.define('pm_attention', members)})"


def _mask(op: Operation) -> str:
    """Return a pointer to the mask of an attention, or 0."""
    if op[Field.MASK] < 0:
        return "0"
    if not op[Field.MASK_IS_CONSTANT]:
        return op.at(Field.MASK)
    size = op[Field.MASK_HEADS] * op[Field.KEYS] * op[Field.MASK_PLANE]
    if op[Field.MASK_PLANE] > 1:  # planes, from the first position on
        size -= op[Field.TARGET_LEAD]
    return op.floats("mask", op[Field.MASK], size)


_CELLS = {
    Cell.LSTM: "PM_LSTM",
    Cell.GRU: "PM_GRU",
    Cell.TANH: "PM_RNN_TANH",
    Cell.RELU: "PM_RNN_RELU",
}


def _recur(op: Operation) -> str:
    """Return one call per direction; the second one runs backwards."""
    return "; ".join(_recur_in(op, direction) for direction in range(op[Field.ROWS]))


def _recur_in(op: Operation, direction: int) -> str:
    cell, units = Cell(op[Field.CELL]), op[Field.UNITS]
    rows = GATES[cell] * units
    name = f"{op.suffix}_{direction}"
    memory = _recurrent_memory(op, name, rows)
    finals = op[Field.FINALS] + direction * units * op[Field.FINALS_PLANE]
    members = {
        "cell": _CELLS[cell],
        "gates": GATES[cell],
        "units": units,
        "steps": op[Field.STEPS],
        "backwards": direction,
        "source": op.after(Field.SOURCE, Field.SOURCE_LEAD, direction * rows, Field.SOURCE_PLANE),
        "source_plane": op[Field.SOURCE_PLANE],
        "weights": _recurrent_weights(op, direction, name, memory),
        **memory,
        "first_hidden": op.after(Field.OTHER, Field.STATE, direction),
        "first_state": op.after(Field.VALUES, Field.STATE, direction),
        "first_plane": op[Field.OTHER_PLANE],
        "target": op.after(Field.TARGET, Field.TARGET_LEAD, direction * units, Field.TARGET_PLANE),
        "target_plane": op[Field.TARGET_PLANE],
        "last_hidden": op.final(finals, Field.FINAL_HIDDEN),
        "last_state": op.final(finals, Field.FINAL_CELL),
        "last_plane": op[Field.FINALS_PLANE],
    }
    return f"pm_recur(&{op.tables.structure('pm_recurrence', f'op{name}', members)})"


def _recurrent_memory(op: Operation, name: str, rows: int) -> dict[str, str]:
    """Define the memory of a direction; vectors may read and write past the last unit."""
    units = op[Field.UNITS]
    sizes = {"hidden": units, "state": units, "sums": rows, "inputs": rows * _STEPS}
    for part, size in sizes.items():
        op.tables.lines.append(f"static float {part}{name}[{size + _WIDEST}] PM_ALIGNED;")
    return {part: f"{part}{name}" for part in sizes}


def _recurrent_weights(
    op: Operation, direction: int, name: str, memory: Mapping[str, str]
) -> dict[str, Any]:
    """Define the weights of the hidden state by row; return the members of their layer."""
    units, gates = op[Field.UNITS], GATES[Cell(op[Field.CELL])]
    first = op[Field.TABLE] + TABLE_LONGS * direction
    entries = op.program.longs[first : first + TABLE_LONGS].tolist()
    padded = -(-units // WIDTH) * WIDTH
    weight, bias = recurrent_weights(op.program, entries, gates * padded, units)
    kept = (np.arange(gates)[:, None] * padded + np.arange(units)).ravel()
    weight, bias = weight[kept], bias[kept]
    row, column = np.nonzero(weight)
    counts = np.bincount(row, minlength=len(weight)).astype(np.int32)
    offsets, wide = op.tables.offsets(f"offsets{name}", column.astype(np.int32))
    return {
        "source": memory["hidden"],
        "residual": "0",
        "target": memory["sums"],
        "counts": op.tables.array("int32_t", f"counts{name}", counts),
        "offsets": offsets,
        "wide": wide,
        "values": op.tables.array("float", f"values{name}", weight[row, column]),
        "bias": op.tables.array("float", f"bias{name}", bias),
        "rows": len(weight),
        "blocks": 1,
        "target_plane": 1,
        "low": -INFINITY,
        "high": INFINITY,
    }


# The kinds of operations that have a C kernel, and how they are called.
CALLS: dict[Kind, Callable[[Operation], str]] = {
    Kind.PACK: _pack,
    Kind.UNPACK: _unpack,
    Kind.INTERLEAVE: _interleave,
    Kind.CONVOLVE: _convolve,
    Kind.LINEAR: _linear,
    Kind.SPLIT_PHASES: _split_phases,
    Kind.MAX_POOL: _pool,
    Kind.AVERAGE_POOL: _pool,
    Kind.ADD: _elementwise,
    Kind.MULTIPLY: _elementwise,
    Kind.ACTIVATE: _elementwise,
    Kind.COPY: _elementwise,
    Kind.ADD_CONSTANT: _elementwise,
    Kind.MULTIPLY_CONSTANT: _elementwise,
    Kind.REARRANGE: _rearrange,
    Kind.NORMALIZE: _normalize,
    Kind.ATTEND: _attend,
    Kind.RECUR: _recur,
    Kind.MERGE_PHASES: _merge_phases,
    Kind.RESIZE: _resize,
    Kind.ADD_CHANNELS: _combine_channels,
    Kind.MULTIPLY_CHANNELS: _combine_channels,
    Kind.LEAKY_CHANNELS: _leaky_channels,
    Kind.NORMALIZE_GROUPS: _normalize_groups,
    Kind.SOFTMAX: _softmax,
    Kind.MAX_SLICES: _pool_slices,
    Kind.AVERAGE_SLICES: _pool_slices,
}
