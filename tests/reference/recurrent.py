"""LSTM, GRU and RNN, one image, one step and one unit at a time."""

import math

import numpy as np


def recurrent(module, x, states=None):
    """Return the sequence and the final states of a module for a batch × steps × features array.

    Everything is computed in double precision. ``states`` are arrays of layers and directions ×
    batch × units; the results have the same form, and the sequence that of ``x``.
    """
    directions = 2 if module.bidirectional else 1
    shape = (module.num_layers * directions, len(x), module.hidden_size)
    hidden, cell = (np.zeros(shape), np.zeros(shape)) if states is None else map(np.copy, states)
    sequence = np.asarray(x, np.float64)
    for layer in range(module.num_layers):
        outputs = np.zeros((*sequence.shape[:2], directions * module.hidden_size))
        for direction in range(directions):
            parameters = _parameters(module, layer, direction)
            index = layer * directions + direction
            first = direction * module.hidden_size
            for image in range(len(x)):
                h, c = hidden[index, image], cell[index, image]
                steps = range(sequence.shape[1])
                for t in reversed(steps) if direction else steps:
                    h, c = _step(module, parameters, sequence[image, t], h, c)
                    outputs[image, t, first : first + module.hidden_size] = h
                hidden[index, image], cell[index, image] = h, c
        sequence = outputs
    return sequence, hidden, cell


def _parameters(module, layer, direction):
    suffix = f"_l{layer}{'_reverse' if direction else ''}"
    own = {name: p.detach().double().numpy() for name, p in module.named_parameters()}
    zeros = np.zeros(len(own[f"weight_ih{suffix}"]))
    weights = own[f"weight_ih{suffix}"], own[f"weight_hh{suffix}"]
    return *weights, own.get(f"bias_ih{suffix}", zeros), own.get(f"bias_hh{suffix}", zeros)


def _step(module, parameters, x, h, c):
    of_input, of_state, input_bias, state_bias = parameters
    units = module.hidden_size
    new_h, new_c = np.zeros(units), np.zeros(units)

    def part(weight, bias, vector, gate, unit):
        return float(weight[gate * units + unit] @ vector + bias[gate * units + unit])

    for unit in range(units):
        xs = [part(of_input, input_bias, x, g, unit) for g in range(len(of_input) // units)]
        hs = [part(of_state, state_bias, h, g, unit) for g in range(len(of_state) // units)]
        if module.mode == "LSTM":
            i, f, g, o = (a + b for a, b in zip(xs, hs, strict=True))
            new_c[unit] = _sigmoid(f) * c[unit] + _sigmoid(i) * math.tanh(g)
            new_h[unit] = _sigmoid(o) * math.tanh(new_c[unit])
        elif module.mode == "GRU":
            r, z = (_sigmoid(a + b) for a, b in zip(xs[:2], hs[:2], strict=True))
            n = math.tanh(xs[2] + r * hs[2])
            new_h[unit] = (1 - z) * n + z * h[unit]
        else:
            total = xs[0] + hs[0]
            new_h[unit] = max(total, 0.0) if module.mode == "RNN_RELU" else math.tanh(total)
    return new_h, new_c


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


def matrix_of_windows(starts, windows, values, columns):
    """Return the dense matrix that `windows_of` has divided, lane by lane."""
    lanes = values.shape[1]
    matrix = np.zeros(((len(starts) - 1) * lanes, columns))
    for group in range(len(starts) - 1):
        for index in range(starts[group], starts[group + 1]):
            places = windows[index, 1:].copy().view(np.uint8)
            for lane in range(lanes):
                column = windows[index, 0] // 4 + int(places[lane])
                matrix[group * lanes + lane, column] += values[index, lane]
    return matrix
