"""Recurrent layers: LSTM, GRU and RNN.

All layers and directions of a module are one node, so that PyTorch runs it with its own kernel.
"""

import operator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from probmask.runtime.kernels.operation_table import Cell
from probmask.runtime.lower.copy_nodes import copied, form_of
from probmask.runtime.lower.graph import Built, Graph, arguments_of, label_of, size_of
from probmask.runtime.lower.nodes import (
    CellWeights,
    Fallback,
    Floats,
    Recurrent,
    unset_call,
)
from probmask.runtime.lower.pytorch_calls import ViewCall
from probmask.runtime.lower.view_nodes import trailing_of
from probmask.runtime.lower.views import Axis, Factor, View, concrete, merged

_aten = torch.ops.aten
CELLS: dict[Any, Cell] = {
    _aten.lstm.input: Cell.LSTM,
    _aten.gru.input: Cell.GRU,
    _aten.rnn_tanh.input: Cell.TANH,
    _aten.rnn_relu.input: Cell.RELU,
}
# Operations of single steps, and of sequences of different lengths.
SINGLE_STEPS = (
    _aten.lstm_cell.default,
    _aten.gru_cell.default,
    _aten.rnn_tanh_cell.default,
    _aten.rnn_relu_cell.default,
)
_ZEROS = (_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default)


def build_single_step(graph: Graph, node: fx.Node) -> Built:
    """Leave a cell to PyTorch, with the reason."""
    return graph.eager(node, "a single step has no kernel; nn.LSTM, nn.GRU and nn.RNN have")


def build_recurrent(graph: Graph, node: fx.Node) -> Built:
    """Build an LSTM, a GRU or an RNN with constant weights over sequences of one length."""
    arguments = arguments_of(node)
    x, parameters = arguments["input"], arguments["params"]
    cell = CELLS[node.target]
    of_cell = 4 if arguments["has_biases"] else 2
    count = arguments["num_layers"] * (2 if arguments["bidirectional"] else 1)
    if len(parameters) > of_cell * count:
        return graph.eager(node, "proj_size has no kernel")
    value = x.meta["val"]
    if value.dtype != torch.float32:
        return graph.eager(node, f"kernels compute in float32, not in {value.dtype}")
    layers = _layers(graph, parameters, of_cell, 2 if arguments["bidirectional"] else 1)
    if layers is None or arguments["train"]:
        return None
    steps = value.shape[1 if arguments["batch_first"] else 0]
    if not isinstance(size_of(steps), int):
        return graph.eager(node, "the length of the sequence varies; kernels need a fixed one")
    sequence = _sequence(graph, node, x, batch_first=arguments["batch_first"])
    states = _states(graph, node, arguments["hx"], sequence.leading)
    made = Recurrent(
        node.name,
        tuple(view.root for view in (sequence, *states)),
        unset_call,
        label_of(node),
        input_forms=tuple(graph.form_of_root(view) for view in (sequence, *states)),
        views=(sequence, *states),
        cell=cell,
        layers=layers,
        steps=int(steps),
        returned=_returned(node, cell),
    )
    results = _results(made, sequence, batch_first=arguments["batch_first"])
    root = next(iter(results.values()))
    made.form = form_of(root)
    made.trailing = (root.positions, root.channels) if root.positions > 1 else (root.channels,)
    made.call = RecurrentCall(made)
    graph.recurrent[node.name] = results
    return made


def _layers(
    graph: Graph, parameters: list[Any], of_cell: int, directions: int
) -> tuple[tuple[CellWeights, ...], ...] | None:
    """Return the weights by layer and direction; None if they are not constant and finite."""
    known = [graph.constant(parameter) for parameter in parameters]
    arrays = [
        tensor.contiguous().numpy().copy()
        for tensor in known
        if tensor is not None and tensor.dtype == torch.float32 and tensor.isfinite().all()
    ]
    if len(arrays) < len(known):
        return None
    cells = [_cell_weights(arrays[i : i + of_cell]) for i in range(0, len(arrays), of_cell)]
    return tuple(tuple(cells[i : i + directions]) for i in range(0, len(cells), directions))


def _cell_weights(arrays: list[Floats]) -> CellWeights:
    if len(arrays) == 2:
        arrays = [*arrays, *(np.zeros(len(arrays[0]), np.float32) for _ in range(2))]
    return CellWeights(*arrays)


def _sequence(graph: Graph, node: fx.Node, x: fx.Node, *, batch_first: bool) -> View:
    """Return the input as batch × steps × features of a root, by a copy if it is not one."""
    view = graph.view_of(x)
    if view is not None and view.has_batch():
        ordered = view if batch_first else view.permuted([1, 0, 2])
        if _is_sequence(ordered) and graph.form_of_root(view).height == 1:
            return ordered
        if _has_batch_first(ordered):
            made = copied(graph, x, ordered, _channels_last, suffix="sequence")
            if made is not None:
                return made
    name = f"{node.name}_input"
    transposed = _Moved((0, 1, 2) if batch_first else (1, 0, 2))
    graph.nodes[name] = Fallback(
        name, (graph.source(x),), transposed, f"{name} (order)", reason="a view"
    )
    sizes = [x.meta["val"].shape[i] for i in transposed.order]
    return _root_of(name, sizes)


def _root_of(name: str, sizes: list[Any]) -> View:
    """Return the view of a tensor of batch × positions × channels from PyTorch."""
    batch, positions, channels = sizes
    view = View(name, int(channels), int(positions), str(size_of(batch)), int(positions) > 1, ())
    return replace(
        view,
        dimensions=(
            merged([Factor(view.batch, Axis.BATCH, 1)]),
            merged([Factor(view.positions, Axis.POSITION, 1)]),
            merged([Factor(view.channels, Axis.CHANNEL, 1)]),
        ),
    )


def _has_batch_first(view: View) -> bool:
    """Return whether the first dimension, and only that, runs over the batch."""
    batch, *others = view.dimensions
    is_first = [factor.axis for factor in batch] in ([Axis.BATCH], [])
    return is_first and all(f.axis is not Axis.BATCH for dimension in others for f in dimension)


def _is_sequence(view: View) -> bool:
    """Return whether the dimensions are batch, all positions in their order, and channels."""
    _, positions, _ = view.dimensions
    in_order = positions in ((), (Factor(view.positions, Axis.POSITION, 1),))
    return _has_batch_first(view) and in_order and view.is_whole() and view.has_channels_last()


def _channels_last(_: Factor, last: bool) -> Axis:
    return Axis.CHANNEL if last else Axis.POSITION


def _states(graph: Graph, node: fx.Node, given: Any, leading: str) -> tuple[View, ...]:
    """Return the initial states as batch × layers and directions × units; empty if all are zero."""
    states = given if isinstance(given, list | tuple) else [given]
    if all(_is_zero(graph, state) for state in states):
        return ()
    return tuple(_state(graph, node, state, i, leading) for i, state in enumerate(states))


def _is_zero(graph: Graph, state: fx.Node) -> bool:
    constant = graph.shared_constant(state)
    return state.target in _ZEROS or (constant is not None and not constant.any())


def _state(graph: Graph, node: fx.Node, state: fx.Node, index: int, leading: str) -> View:
    view = graph.view_of(state)
    if view is not None and view.has_batch() and view.leading == leading:
        ordered = view.permuted([1, 0, 2])
        if _has_batch_first(ordered):
            made = copied(graph, state, ordered, _channels_last, suffix="state")
            if made is not None:
                return made
    name = f"{node.name}_state{index}"
    constant = graph.constant(state)
    call = _Moved((1, 0, 2))
    if constant is None:
        graph.nodes[name] = Fallback(
            name, (graph.source(state),), call, f"{name} (order)", reason="a view"
        )
    else:
        graph.nodes[name] = Fallback(name, (), _Fixed(call(constant)), f"{name} (constant)")
    sizes = [state.meta["val"].shape[i] for i in call.order]
    return _root_of(name, sizes)


class _Moved:
    """A tensor with its dimensions in another order; a single position has no dimension."""

    def __init__(self, order: tuple[int, int, int]) -> None:
        self.order = order

    def __call__(self, x: Tensor) -> Tensor:
        moved = x.permute(self.order)
        return moved if moved.shape[1] > 1 else moved.squeeze(1)


class _Fixed:
    """A constant tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self) -> Tensor:
        return self.value


def _returned(node: fx.Node, cell: Cell) -> tuple[bool, bool, bool]:
    """Return whether the sequence, the final hidden states and the final cell states are read."""
    read = {
        int(user.args[1])  # type: ignore[arg-type]
        for user in node.users
        if user.target is operator.getitem and user.users
    }
    return (0 in read or not read, 1 in read, 2 in read and cell is Cell.LSTM)


def _results(node: Recurrent, sequence: View, *, batch_first: bool) -> dict[int, View]:
    """Return the views of the outputs that are read, by their number."""
    layers, directions, units = len(node.layers), node.directions, node.units
    counts = [node.steps, layers, layers]
    counts = [n if needed else 0 for n, needed in zip(counts, node.returned, strict=True)]
    channels, positions = directions * units, sum(counts)
    root = View(node.name, channels, positions, sequence.leading, positions > 1, ())
    batch = merged([Factor(root.batch, Axis.BATCH, 1)])
    results = {}
    for i, needed in enumerate(node.returned):
        if not needed:
            continue
        over_positions = Factor(counts[i], Axis.POSITION, 1)
        if i == 0:
            time = merged([over_positions])
            first = (batch, time) if batch_first else (time, batch)
            last = Factor(channels, Axis.CHANNEL, 1)
        else:
            by_direction = Factor(directions, Axis.CHANNEL, units)
            first = (merged([over_positions, by_direction]), batch)
            last = Factor(units, Axis.CHANNEL, 1)
        results[i] = replace(root, dimensions=(*first, merged([last])), position=sum(counts[:i]))
    return results


def build_recurrent_result(graph: Graph, node: fx.Node) -> Built:
    """Register one output of a recurrent layer, which is a view of its root."""
    whole, index = node.args
    if not isinstance(whole, fx.Node) or whole.name not in graph.recurrent:
        return None
    assert isinstance(index, int)
    view = graph.recurrent[whole.name].get(index)
    if view is None:  # nothing reads it
        return True
    graph.views[node.name] = view
    graph.moves.add(node.name)
    if view.is_canonical() and tuple(map(concrete, node.meta["val"].shape)) == view.shape:
        graph.aliases[node.name] = whole.name
        graph.nodes[whole.name].trailing = trailing_of(node)
        return True
    return Fallback(
        node.name, (whole.name,), ViewCall(view), label_of(node), reason="a view", moved=view
    )


class RecurrentCall:
    """A recurrent layer in PyTorch, with its results in the order of the root."""

    def __init__(self, node: Recurrent) -> None:
        self.node = node

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return batch × positions × channels."""
        node = self.node
        x, *states = (ViewCall(view)(root) for view, root in zip(node.views, inputs, strict=True))
        hidden, cell = self._states(x, states)
        weights = [
            torch.from_numpy(array)
            for layer in node.layers
            for own in layer
            for array in (own.of_input, own.of_state, own.input_bias, own.state_bias)
        ]
        settings = (True, len(node.layers), 0.0, False, node.directions == 2, True)
        if node.cell is Cell.LSTM:
            results: tuple[Tensor, ...] = torch.lstm(x, (hidden, cell), weights, *settings)
        else:
            function = {Cell.GRU: torch.gru, Cell.TANH: torch.rnn_tanh, Cell.RELU: torch.rnn_relu}
            results = function[node.cell](x, hidden, weights, *settings)
        return self._joined(results)

    def _states(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the initial states as layers and directions × batch × units."""
        node = self.node
        if not states:
            zeros = x.new_zeros(len(node.layers) * node.directions, len(x), node.units)
            return zeros, zeros
        ordered = [state.transpose(0, 1).contiguous() for state in states]
        return ordered[0], ordered[-1]

    def _joined(self, results: tuple[Tensor, ...]) -> Tensor:
        node = self.node
        parts = [results[0]] if node.returned[0] else []
        for needed, states in zip(node.returned[1:], results[1:], strict=False):
            if needed:
                by_layer = states.reshape(len(node.layers), node.directions, *states.shape[1:])
                parts.append(by_layer.permute(2, 0, 1, 3).flatten(2))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return joined.reshape(len(joined), *node.trailing)
