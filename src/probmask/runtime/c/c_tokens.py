"""The operations over tokens as calls of the C kernels: copies, LayerNorm and attention."""

import numpy as np

from probmask.runtime.c.c_operation import Operation
from probmask.runtime.kernels.operation_table import Field, Place


def rearrange(op: Operation) -> str:
    """Return the call of a copy."""
    loops = op.program.longs[op[Field.TABLE] : op[Field.TABLE] + 12].reshape(3, 4).tolist()
    names = ("sizes", "source_steps", "target_steps")
    members = dict(zip(names, map(tuple, loops), strict=True))
    source, target = op.at(Field.SOURCE), op.at(Field.TARGET)
    if op[Field.SOURCE_IS] == Place.EXTERNAL:
        source = f"{op.external(op[Field.IMAGE_SIZE])} + {op[Field.SOURCE]}"
    elif op[Field.SOURCE_IS] == Place.CONSTANT:
        sizes, steps, _ = loops
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        source = op.floats("constant", op[Field.SOURCE], last + 1)
    if op[Field.TARGET_IS] == Place.EXTERNAL:
        target = f"{op.external(op[Field.IMAGE_SIZE])} + {op[Field.TARGET]}"
    return f"pm_rearrange({op.define('pm_rearrangement', members)}, {source}, {target})"


def normalize(op: Operation) -> str:
    """Return the call of a normalization over channels."""
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


def attend(op: Operation) -> str:
    """Return the call of an attention."""
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
