"""The operations of a program as calls of the C kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.runtime.c.c_operation import Operation, planes_of
from probmask.runtime.c.c_recurrent import recur
from probmask.runtime.c.c_tokens import attend, normalize, rearrange
from probmask.runtime.kernels.operation_table import Curve, Field, Kind

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


def _image_size(op: Operation) -> int:
    return op[Field.ROWS] * op[Field.HEIGHT] * op[Field.WIDTH]


def _pack(op: Operation) -> str:
    tensor = op.at(Field.TARGET, Field.TARGET_LEAD)
    members = _image(op, tensor, Field.TARGET_PLANE, Field.TARGET_STRIDE)
    return f"pm_pack({op.define('pm_image', members)}, {op.external(_image_size(op))})"


def _unpack(op: Operation) -> str:
    tensor = op.at(Field.SOURCE, Field.SOURCE_LEAD)
    members = _image(op, tensor, Field.SOURCE_PLANE, Field.SOURCE_STRIDE)
    return f"pm_unpack({op.define('pm_image', members)}, {op.external(_image_size(op))})"


def _interleave(op: Operation) -> str:
    members = planes_of(op) | {"lanes": op[Field.TARGET_LANES]}
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
    members = planes_of(op) | {
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
    members = planes_of(op) | {
        "other": op.at(Field.OTHER, Field.OTHER_LEAD),
        "other_plane": op[Field.OTHER_PLANE],
        "lanes": op[Field.LANES],
        "low": low,
        "high": high,
    }
    return f"{_CHANNELS[op.kind]}({op.define('pm_channels', members)})"


def _leaky_channels(op: Operation) -> str:
    members = planes_of(op) | {
        "source": op.at(Field.SOURCE),
        "target": op.at(Field.TARGET),
        "other": op.floats("slopes", op[Field.BIAS], op[Field.ROWS]),
        "lanes": op[Field.LANES],
    }
    return f"pm_leaky_channels({op.define('pm_channels', members)})"


def _merge_phases(op: Operation) -> str:
    members = planes_of(op) | {
        "step_y": op[Field.STEP_Y],
        "step_x": op[Field.STEP_X],
        "lanes": op[Field.LANES],
    }
    return f"pm_merge_phases({op.define('pm_merge', members)})"


def _resize(op: Operation) -> str:
    sides = op[Field.HEIGHT] + op[Field.WIDTH]
    members = planes_of(op) | {
        "places": op.integers("places", op[Field.TABLE], 2 * sides),
        "weights": op.floats("weights", op[Field.BIAS], sides),
        "scratch": op.at(Field.SCRATCH),
        "source_width": op[Field.SOURCE_WIDTH],
    }
    return f"pm_resize({op.define('pm_resize', members)})"


def _normalize_groups(op: Operation) -> str:
    channels = op[Field.SPLITS]
    members = planes_of(op) | {
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
    Kind.REARRANGE: rearrange,
    Kind.NORMALIZE: normalize,
    Kind.ATTEND: attend,
    Kind.RECUR: recur,
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
