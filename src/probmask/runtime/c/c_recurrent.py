"""The operations of recurrent layers as calls of the C kernels."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from probmask.runtime.c.c_operation import WIDEST, Operation
from probmask.runtime.kernels.operation_table import GATES, Cell, Field
from probmask.runtime.kernels.recurrence import TABLE_LONGS
from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import INFINITY
from probmask.runtime.plan.recurrent_operations import recurrent_weights

# Steps of a recurrent layer whose inputs are transposed at once: PM_STEPS in kernels.h.
_STEPS = 8
_CELLS = {
    Cell.LSTM: "PM_LSTM",
    Cell.GRU: "PM_GRU",
    Cell.TANH: "PM_RNN_TANH",
    Cell.RELU: "PM_RNN_RELU",
}


def recur(op: Operation) -> str:
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
        op.tables.lines.append(f"static float {part}{name}[{size + WIDEST}] PM_ALIGNED;")
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
