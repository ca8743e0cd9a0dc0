"""The operators LSTM, GRU and RNN of ONNX as recurrent modules of PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probmask.runtime.from_onnx.onnx_file import OnnxGraph, Operation
from probmask.runtime.from_onnx.onnx_values import tensor, unsupported

# ONNX stacks the gates of an LSTM as i, o, f, c and those of a GRU as z, r, h. These are their
# places in the order of PyTorch: i, f, c, o and r, z, h.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
RECURRENT = frozenset(_GATES)
# Operators that return zeros if their first input is zeros.
_KEEP_ZEROS = frozenset(
    ("Cast", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
)


class RecurrentLayer(nn.Module):
    """One recurrent operator: a layer with one direction, forward or in reverse, or with two."""

    def __init__(self, op: Operation, graph: OnnxGraph) -> None:
        super().__init__()
        weights = _constants(op, graph.constants)
        directions, rows, features = weights[0].shape
        units = rows // len(_GATES[op.kind])
        settings: dict[str, Any] = {"batch_first": bool(op.attributes.get("layout", 0))}
        activation = _last_activation(op, directions)
        if op.kind == "RNN":
            settings["nonlinearity"] = activation
        kind = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}[op.kind]
        self.layer = kind(features, units, bidirectional=directions == 2, **settings)
        self.is_reversed = op.attributes.get("direction", "forward") == "reverse"
        _set_weights(self.layer, op.kind, weights)

    def forward(self, inputs: list[Any]) -> tuple[Tensor, ...]:
        """Return the sequence and the final states, with the dimensions of ONNX."""
        x, *states = (None if value is None else tensor(value) for value in _states_of(inputs))
        assert x is not None
        layer, steps = self.layer, 1 if self.layer.batch_first else 0
        x = x.flip(steps) if self.is_reversed else x
        given = self._states(x, states)
        sequence, final = layer(x, given if isinstance(layer, nn.LSTM) else given[0])
        sequence = sequence.flip(steps) if self.is_reversed else sequence
        split = sequence.unflatten(2, (2 if layer.bidirectional else 1, layer.hidden_size))
        finals = final if isinstance(final, tuple) else (final,)
        if layer.batch_first:
            return (split, *(state.transpose(0, 1) for state in finals))
        return (split.transpose(1, 2), *finals)

    def _states(self, x: Tensor, states: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the initial states as directions × batch × units."""
        layer = self.layer
        batch = x.shape[0 if layer.batch_first else 1]
        made = []
        for state in states:
            if state is None:
                shape = (2 if layer.bidirectional else 1, batch, layer.hidden_size)
                made.append(x.new_zeros(shape))
            else:
                made.append(state.transpose(0, 1) if layer.batch_first else state)
        return made[0], made[1]


def _padded(names: Sequence[Any], missing: Any = "") -> list[Any]:
    """Return all eight inputs: x, W, R, B, lengths, two initial states and peepholes."""
    return [*names, *[missing] * (8 - len(names))]


def _states_of(inputs: list[Any]) -> list[Any]:
    """Return x and the two initial states."""
    padded = _padded(inputs, None)
    return [padded[0], *padded[5:7]]


def _constants(op: Operation, constants: Mapping[str, Any]) -> list[Any]:
    """Return the weights of the input, those of the state, and both biases of all directions.

    Raise `InputError` if the operator has a form that PyTorch does not have.
    """
    _, *names, lengths, _, _, peepholes = _padded(op.inputs)
    if lengths:
        raise unsupported(op, "sequences of different lengths")
    if peepholes or op.attributes.get("input_forget", 0) or "clip" in op.attributes:
        raise unsupported(op, "peepholes, input_forget or clip")
    if op.kind == "GRU" and not op.attributes.get("linear_before_reset", 0):
        raise unsupported(op, "linear_before_reset=0")
    if not names[2]:
        rows = constants[names[0]].shape[:2] if names[0] in constants else (1, 1)
        constants = {**constants, "": np.zeros((rows[0], 2 * rows[1]), np.float32)}
    if any(name not in constants for name in names):
        raise unsupported(op, "weights that are not constants")
    arrays = [constants[name] for name in names]
    directions = 2 if op.attributes.get("direction", "forward") == "bidirectional" else 1
    gates = len(_GATES[op.kind])
    rows, units = arrays[1].shape[1:]
    shapes = [(directions, rows), (directions, rows, units), (directions, 2 * rows)]
    found = [arrays[0].shape[:2], arrays[1].shape, arrays[2].shape]
    if rows != gates * units or shapes != found or arrays[0].ndim != 3:
        raise unsupported(op, "weights of unexpected shapes")
    return arrays


def _last_activation(op: Operation, directions: int) -> str:
    """Return the activation of the state. Raise `InputError` if PyTorch does not have them."""
    usual = _ACTIVATIONS[op.kind] * directions
    names: list[str] = [name.lower() for name in op.attributes.get("activations", usual)]
    if names != usual and (op.kind, names) != ("RNN", ["relu"] * directions):
        raise unsupported(op, f"the activations {', '.join(names)}")
    return names[-1]


def _set_weights(layer: nn.RNNBase, kind: str, weights: list[Any]) -> None:
    """Set the parameters from arrays of directions × gates and units × …, biases in pairs."""
    of_input, of_state, biases = (torch.from_numpy(np.array(array)) for array in weights)
    pairs = biases.reshape(len(biases), 2, -1)
    with torch.no_grad():
        for direction, suffix in enumerate(("_l0", "_l0_reverse")[: len(of_input)]):
            parts = (of_input[direction], of_state[direction], *pairs[direction])
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            for name, stacked in zip(names, parts, strict=True):
                gates = stacked.chunk(len(_GATES[kind]))
                ordered = torch.cat([gates[place] for place in _GATES[kind]])
                setattr(layer, f"{name}{suffix}", nn.Parameter(ordered, requires_grad=False))


def without_zero_states(graph: OnnxGraph) -> OnnxGraph:
    """Return the graph without the initial states that are always zero.

    Kernels do not read them, and files often fix their batch size.
    """
    operations = [
        _without_zero_states(op, graph) if op.kind in RECURRENT else op for op in graph.operations
    ]
    return replace(graph, operations=operations)


def _without_zero_states(op: Operation, graph: OnnxGraph) -> Operation:
    names = _padded(op.inputs)
    states = ["" if _is_zero(name, graph) else name for name in names[5:7]]
    return replace(op, inputs=(*names[:5], *states, names[7]))


def _is_zero(name: str, graph: OnnxGraph) -> bool:
    """Return whether a value is always zero."""
    if not name:
        return True
    constant = graph.constants.get(name)
    if constant is not None:
        return not np.any(constant)
    maker = next((op for op in graph.operations if name in op.outputs), None)
    if maker is None:
        return False
    if maker.kind == "ConstantOfShape":
        return not np.any(maker.attributes.get("value", 0))
    return maker.kind in _KEEP_ZEROS and _is_zero(maker.inputs[0], graph)
