"""Another batch size than that of an ONNX file.

Exporters write the batch size into the shapes of Reshape operators. A reshape keeps the order of
the elements: those before the batch dimension, the batch, and those after it. So it determines
which size of its result contains the batch size, and this size is left open.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.messages import one_line
from probmask.runtime.from_onnx.onnx_file import OnnxGraph, Operation
from probmask.runtime.from_onnx.onnx_inputs import random_inputs
from probmask.runtime.from_onnx.onnx_network import OnnxNetwork
from probmask.runtime.from_onnx.onnx_operators import JOINED

# Operators whose second input is the shape of their result.
_SHAPED = ("Expand", "Reshape")


def opened(graph: OnnxGraph) -> OnnxGraph:
    """Return a graph for any batch size, if the file fixes it by constant shapes only.

    Its inputs have the batch as their first dimension. The result is compared with the graph of
    the file, each row on its own; if it differs, the graph is returned as it is.
    """
    sizes = {item.shape[0] if item.shape else None for item in graph.inputs}
    fixed = all(isinstance(s, int) for item in graph.inputs for s in item.shape or (None,))
    if (
        not fixed
        or len(sizes) != 1
        or not any(_has_constant_shape(graph, op) for op in graph.operations)
    ):
        return graph
    (batch,) = sizes
    assert isinstance(batch, int)
    rows = random_inputs(graph.inputs, batch + 1)
    try:
        with torch.no_grad():
            changed = _Reshapes(graph, rows, batch).opened()
            agrees = changed is not None and _agrees(graph, changed, rows, batch)
    except Exception:  # an operator that needs the batch size of the file
        return graph
    return changed if changed is not None and agrees else graph


def _has_constant_shape(graph: OnnxGraph, op: Operation) -> bool:
    return op.kind in _SHAPED and len(op.inputs) > 1 and op.inputs[1] in graph.constants


class _Reshapes:
    """The reshapes of a graph, while it runs with the batch of the file and with a larger one."""

    def __init__(self, graph: OnnxGraph, rows: Sequence[Tensor], batch: int) -> None:
        self.graph, self.batch = graph, batch
        self.network = OnnxNetwork(graph)
        self.values = self.network.known_values([x[:batch] for x in rows])
        self.larger = self.network.known_values(rows)
        # By the factor of the batch in a size: the part of it that comes before the batch.
        self.before = {1: 1}

    def opened(self) -> OnnxGraph | None:
        """Return the graph with open shapes.

        Return None if none has to be opened, or if a reshape does not keep the batch apart.
        """
        operations, constants = [], dict(self.graph.constants)
        for op in self.graph.operations:
            results = self.network.results(op, self.values)
            if _has_constant_shape(self.graph, op):
                shape = self._open_shape(op, results[op.outputs[0]])
                if shape is None:
                    return None
                if shape != constants[op.inputs[1]].tolist():
                    name = f"{op.outputs[0]}, shape"
                    op = replace(op, inputs=(op.inputs[0], name))
                    constants[name] = self.larger[name] = np.array(shape, np.int64)
            operations.append(op)
            self.values |= results
            self.larger |= self.network.results(op, self.larger)
        if operations == list(self.graph.operations):
            return None
        return replace(self.graph, operations=operations, constants=constants)

    def _open_shape(self, op: Operation, result: Any) -> list[int] | None:
        """Return the shape of a reshape, with -1 for the size that contains the batch.

        In the shape of an Expand, 1 keeps a size as it is.
        """
        shape = list(result.shape)
        own, larger = (values[op.inputs[0]].shape for values in (self.values, self.larger))
        if op.kind == "Expand":
            kept = [1] * (len(shape) - len(own)) + list(own)
            return [1 if a == b else a for a, b in zip(shape, kept, strict=True)]
        varying = [i for i, (a, b) in enumerate(zip(own, larger, strict=True)) if a != b]
        if not varying:
            return shape
        factor, rest = divmod(own[varying[0]], self.batch)
        if len(varying) > 1 or rest or factor not in self.before:
            return None
        outer = math.prod(own[: varying[0]]) * self.before[factor]
        inner = math.prod(own[varying[0] + 1 :]) * (factor // self.before[factor])
        places = [i for i in range(len(shape)) if self._contains_batch(shape, i, outer, inner)]
        if not places:
            return None
        place = min(places, key=lambda i: shape[i] != self.batch)
        before = outer // math.prod(shape[:place])
        if self.before.setdefault(shape[place] // self.batch, before) != before:
            return None
        return [*shape[:place], -1, *shape[place + 1 :]]

    def _contains_batch(self, shape: list[int], place: int, outer: int, inner: int) -> bool:
        """Return whether a size is the product of the batch and of what remains around it."""
        before, after = math.prod(shape[:place]), math.prod(shape[place + 1 :])
        if outer % before or inner % after:
            return False
        return shape[place] == outer // before * self.batch * (inner // after)


def _agrees(graph: OnnxGraph, changed: OnnxGraph, rows: Sequence[Tensor], batch: int) -> bool:
    """Return whether a graph computes for more rows what the file does for its batch of them."""
    own, other = OnnxNetwork(graph), OnnxNetwork(changed)
    found = _leaves(other(*rows))
    for start in (0, 1):
        expected = _leaves(own(*(x[start : start + batch] for x in rows)))
        for mine, theirs in zip(found, expected, strict=True):
            dims = [
                i for i, (a, b) in enumerate(zip(mine.shape, theirs.shape, strict=True)) if a != b
            ]
            if len(dims) != 1 or theirs.shape[dims[0]] != batch:
                return False
            if not _close(mine.narrow(dims[0], start, batch), theirs):
                return False
    return True


def _leaves(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _close(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = float(expected.abs().nan_to_num().max())
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * scale, equal_nan=True)


def what_fixes_the_batch(
    network: OnnxNetwork, examples: tuple[Tensor, ...], dims: list[int | None]
) -> str:
    """Return the operator that does not take another batch size."""
    larger = [
        x if dim is None else torch.cat([x, x.narrow(dim, 0, 1)], dim)
        for x, dim in zip(examples, dims, strict=True)
    ]
    for inputs in (examples, larger):
        values = network.known_values(inputs)
        for op in network.operations:
            try:
                values |= network.results(op, values)
            except Exception as error:  # PyTorch raises many kinds
                return _reason(network, op, error)
    return "which of its operators does, is not known"


def _reason(network: OnnxNetwork, op: Operation, error: Exception) -> str:
    named = f"the {JOINED.get(op.kind, op.kind)} operator `{op.name or op.outputs[0]}`"
    shape = network.arrays.get(op.inputs[-1]) if op.inputs else None
    if JOINED.get(op.kind, op.kind) in _SHAPED and shape is not None:
        return f"{named} has the constant shape {shape.tolist()}"
    return f"{named}: {one_line(error)[:120]}"
