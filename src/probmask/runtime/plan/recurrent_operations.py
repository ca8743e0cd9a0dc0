"""The operations of a recurrent node: the input's part of the gates, and the steps.

The weights of the hidden state are stored by row, or in windows (see `recurrent_steps`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.runtime.kernels.operation_table import GATES, Cell, Field, Kind
from probmask.runtime.kernels.recurrence import scratch_size
from probmask.runtime.kernels.recurrent_steps import (
    HAS_WINDOWS,
    WINDOW,
    WINDOW_LONGS,
    WINDOW_STEP,
    WINDOWS_AT_ONCE,
)
from probmask.runtime.kernels.vectors import WIDTH
from probmask.runtime.lower.nodes import (
    CellWeights,
    Convolution,
    Floats,
    Form,
    Recurrent,
    unset_call,
)
from probmask.runtime.plan.arena import Arena, PlacedTensor, SlotPart
from probmask.runtime.plan.convolution_operations import add_convolution
from probmask.runtime.plan.operations import Operations
from probmask.runtime.plan.program_data import Data
from probmask.runtime.plan.tensor_layout import Layout, Longs


def add_recurrent(ops: Operations, node: Recurrent, lanes: int) -> None:
    """Add all layers. For one image, the input's part of all steps is computed first."""
    assert node.form is not None
    result = ops.arena.allocate(node.name, lanes, node.form)
    states = [ops.input(node, index, lanes) for index in range(1, len(node.inputs))]
    source = ops.input(node, 0, lanes)
    for layer in range(len(node.layers)):
        temporary = [f"{node.name}.hidden{layer - 1}"] if layer else []
        if lanes == 1:
            gates = projection(node, layer)
            ops.arena.reads[gates.name, lanes] = 1
            add_convolution(ops, gates, lanes, owner=node.name)
            source = ops.arena.get(gates.name, lanes)
            temporary.append(gates.name)
        hidden, is_last = result, layer == len(node.layers) - 1
        if not is_last:
            name = f"{node.name}.hidden{layer}"
            hidden = ops.arena.allocate_temporary(name, lanes, hidden_form(node))
        fields = ops.from_to(source, hidden)
        if is_last and not node.returned[0]:
            fields[Field.TARGET] = -1
        fields |= state_offsets(node, layer, states, result)
        fields |= recurrence_fields(node, layer, lanes, ops.threads, ops.arena, ops.data)
        fields[Field.POSITION_BITS] = ops.bits_of(Layout(1, 1, 1, 0, lanes, lanes))
        ops.emit(node.name, fields)
        ops.arena.mark_read(temporary, lanes)
        source = hidden


def hidden_form(node: Recurrent) -> Form:
    """Return the form of the hidden states of all steps."""
    assert node.form is not None
    channels = node.directions * node.units
    return Form(node.form.leading, channels, 1, node.steps, tokens=node.steps > 1)


def projection(node: Recurrent, layer: int) -> Convolution:
    """Return the input's part of all gates at all steps, as a linear layer over tokens.

    The bias of the hidden state is added too, unless a gate multiplies it.
    """
    cells = node.layers[layer]
    form = hidden_form(node)
    first = layer == 0
    weight = np.concatenate([cell.of_input for cell in cells])
    bias = [cell.input_bias + cell.state_bias - _separate_bias(node.cell, cell) for cell in cells]
    return Convolution(
        f"{node.name}.gates{layer}",
        (node.inputs[0] if first else f"{node.name}.hidden{layer - 1}",),
        unset_call,
        "",
        form=Form(form.leading, len(weight), 1, node.steps, tokens=form.tokens),
        input_forms=(node.input_forms[0] if first else form,),
        weight=weight[:, :, None, None],
        bias=np.concatenate(bias),
        rank=0,
        views=node.views[:1] if first else (),
    )


def _separate_bias(cell: Cell, weights: CellWeights) -> Floats:
    """Return the bias that is added to the hidden state's part of each gate."""
    bias = np.zeros_like(weights.state_bias)
    if cell is Cell.GRU:  # the reset gate multiplies the last third
        start = 2 * len(bias) // 3
        bias[start:] = weights.state_bias[start:]
    return bias


def state_offsets(
    node: Recurrent, layer: int, states: list[PlacedTensor], result: PlacedTensor
) -> dict[Field, Any]:
    """Return where a layer's initial states are, and where its final states go."""
    lanes = result.layout.lanes
    fields: dict[Field, Any] = {}
    if states:
        layout = states[0].layout
        fields = {
            Field.OTHER: states[0].slot,
            Field.OTHER_PLANE: layout.plane,
            Field.STATE: layout.lead + layer * node.directions * lanes,
        }
        if len(states) > 1:
            fields[Field.VALUES] = states[1].slot
    sequence, hidden, cell = node.returned
    position = (node.steps if sequence else 0) + layer
    finals = []
    for needed in (hidden, cell):
        finals.append(result.layout.lead + position * lanes if needed else -1)
        position += len(node.layers) if needed else 0
    return fields | {
        Field.FINALS: SlotPart(result.slot, 0),
        Field.FINALS_PLANE: result.layout.plane,
        Field.FINAL_HIDDEN: finals[0],
        Field.FINAL_CELL: finals[1],
    }


def recurrence_fields(
    node: Recurrent, layer: int, lanes: int, threads: int, arena: Arena, data: Data
) -> dict[Field, Any]:
    """Return the fields of a layer's steps, and store its weights."""
    cells = node.layers[layer]
    inputs = cells[0].of_input.shape[1]
    size = scratch_size(node.cell, inputs, node.units, lanes)
    store = _store_for_image if lanes == 1 else _store_for_group
    table = [entry for cell in cells for entry in store(node, cell, lanes, data)]
    return {
        Field.KIND: Kind.RECUR,
        Field.CELL: node.cell,
        Field.ROWS: node.directions,
        Field.CHANNELS: inputs,
        Field.UNITS: node.units,
        Field.STEPS: node.steps,
        Field.LANES: lanes,
        Field.TABLE: data.add("longs", np.array(table, np.int64)),
        Field.SCRATCH: arena.allocate_workspace(threads * size),
        Field.SCRATCH_SIZE: size,
    }


def _store_for_image(node: Recurrent, cell: CellWeights, lanes: int, data: Data) -> list[int]:
    """Store the weights of the hidden state; return the entries of the table."""
    gates = GATES[node.cell]
    weight = _padded(cell.of_state, gates)
    bias = _padded(_separate_bias(node.cell, cell), gates)
    if not HAS_WINDOWS:
        return _store_rows(weight, bias, lanes, data)
    starts, windows, values = windows_of(weight)
    return [
        data.add("longs", starts),
        0,
        data.add("longs", windows.reshape(-1)),
        data.add("constants", values.reshape(-1)),
        data.add("constants", bias),
    ]


def _store_for_group(node: Recurrent, cell: CellWeights, lanes: int, data: Data) -> list[int]:
    """Store rows of the inputs' weights and the hidden state's; those of a GRU are separate."""
    separate = _separate_bias(node.cell, cell)
    bias = cell.input_bias + cell.state_bias - separate
    weight = np.concatenate([cell.of_input, cell.of_state], axis=1)
    if node.cell is Cell.GRU:
        weight = np.concatenate([weight, weight])
        rows, inputs = len(cell.of_input), cell.of_input.shape[1]
        weight[:rows, inputs:] = 0
        weight[rows:, :inputs] = 0
        bias = np.concatenate([bias, separate])
    # Rows of equal length follow each other, as in `sparse_rows_of`.
    order = np.argsort(np.count_nonzero(weight, axis=1), kind="stable")
    entries = _store_rows(weight[order], bias[order], lanes, data)
    entries[2] = data.add("longs", order)
    return entries


def _store_rows(weight: Floats, bias: Floats, lanes: int, data: Data) -> list[int]:
    row, column = np.nonzero(weight)
    starts = np.zeros(len(weight) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(weight)), out=starts[1:])
    weights = data.add_weights(column * lanes, weight[row, column])
    return [data.add("longs", starts), weights, 0, 0, data.add("constants", bias)]


def _padded(array: Floats, gates: int) -> Floats:
    """Return rows in which each gate has a whole number of vectors; the new rows are zero."""
    by_gate = array.reshape(gates, -1, *array.shape[1:])
    missing = -by_gate.shape[1] % WIDTH
    filled = np.pad(by_gate, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 1)])
    return filled.reshape(-1, *array.shape[1:])


def windows_of(weight: Floats) -> tuple[Longs, Longs, Floats]:
    """Divide the weights of groups of sixteen rows into windows of inputs.

    The next window of a group starts at the first weight that is not yet in a window. Each row
    whose next weight lies in the window contributes it. All groups are processed at the same time.

    Returns:
        first: The first window of each group.
        windows: Where each window starts, in bytes, and the places of its rows' inputs in it, as
            bytes.
        values: The weights of each window.
    """
    rows, columns = weight.shape
    order = np.argsort(weight == 0, axis=1, kind="stable")  # non-zero weights first
    counts = np.count_nonzero(weight, axis=1)
    ordered = np.where(np.arange(columns) < counts[:, None], order, columns + WINDOW)
    ordered = np.pad(ordered, [(0, 0), (0, 1)], constant_values=columns + WINDOW)
    taken = np.zeros(rows, np.int64)
    each = np.arange(rows)
    starts, places, values = [], [], []
    while (taken < counts).any():
        following = ordered[each, taken].reshape(-1, WIDTH)
        start = following.min(1) // WINDOW_STEP * WINDOW_STEP
        inside = following < np.minimum(start + WINDOW, columns)[:, None]
        column = np.where(inside, following, start[:, None])
        found = weight[each, np.minimum(column, columns - 1).reshape(-1)].reshape(-1, WIDTH)
        starts.append(start)
        places.append(column - start[:, None])
        values.append(np.where(inside, found, 0))
        taken += inside.reshape(-1)
    return _by_group(rows // WIDTH, starts, places, values, columns)


def _by_group(
    groups: int,
    starts: list[npt.NDArray[Any]],
    places: list[npt.NDArray[Any]],
    values: list[npt.NDArray[Any]],
    columns: int,
) -> tuple[Longs, Longs, Floats]:
    """Order the windows by group, and fill up each group with empty ones."""
    rounds = -(-len(starts) // WINDOWS_AT_ONCE) * WINDOWS_AT_ONCE
    start = np.full((rounds, groups), columns)
    place, value = (np.zeros((rounds, groups, WIDTH)) for _ in range(2))
    for i in range(len(starts)):
        start[i], place[i], value[i] = starts[i], places[i], values[i]
    used = (start < columns).sum(0)
    used = -(-used // WINDOWS_AT_ONCE) * WINDOWS_AT_ONCE
    kept = np.arange(rounds) < used[:, None]
    windows = np.zeros((int(used.sum()), WINDOW_LONGS), np.int64)
    start = np.where(start < columns, start, 0)
    windows[:, 0] = 4 * start.T[kept]
    windows[:, 1:] = place.transpose(1, 0, 2)[kept].astype(np.uint8).view(np.int64)
    first = np.concatenate([[0], np.cumsum(used)]).astype(np.int64)
    return first, windows, value.transpose(1, 0, 2)[kept].astype(np.float32)


def recurrent_weights(
    program: Any, entries: Sequence[int], rows: int, units: int
) -> tuple[Floats, Floats]:
    """Return the weights of the hidden state of one image, dense, and their bias.

    The inverse of what a program stores. ``entries`` are those of its table for one direction.
    """
    first, weights, windows, values, bias = (int(entry) for entry in entries)
    dense = np.zeros((rows, units), np.float32)
    bias_of_rows = program.constants[bias : bias + rows]
    if not HAS_WINDOWS:
        starts = program.longs[first : first + rows + 1]
        row = np.repeat(np.arange(rows), np.diff(starts))
        stored = slice(weights, weights + int(starts[-1]))
        dense[row, program.offsets[stored]] = program.values[stored]
        return dense, bias_of_rows
    starts = program.longs[first : first + rows // WIDTH + 1]
    count = int(starts[-1])
    group = np.repeat(np.arange(rows // WIDTH), np.diff(starts))
    stored = program.longs[windows : windows + count * WINDOW_LONGS].reshape(count, WINDOW_LONGS)
    places = np.ascontiguousarray(stored[:, 1:]).view(np.uint8).reshape(count, WIDTH)
    found = program.constants[values : values + count * WIDTH].reshape(count, WIDTH)
    window, lane = np.nonzero(found)
    column = stored[window, 0] // 4 + places[window, lane]
    dense[group[window] * WIDTH + lane, column] = found[window, lane]
    return dense, bias_of_rows
