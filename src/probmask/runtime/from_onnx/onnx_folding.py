"""Evaluation of the operations of an ONNX network that depend on constants only."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from probmask.errors import InputError
from probmask.messages import one_line
from probmask.runtime.from_onnx.onnx_file import OnnxGraph, Operation
from probmask.runtime.from_onnx.onnx_operators import OPERATORS
from probmask.runtime.from_onnx.onnx_values import as_value


def folded(graph: OnnxGraph) -> OnnxGraph:
    """Return the graph with the results of operations on constants as constants.

    Operations and constants that nothing reads are dropped.
    """
    constants, kept = dict(graph.constants), []
    for op in graph.operations:
        if op.kind in OPERATORS and all(name in constants for name in op.inputs if name):
            constants |= _results(op, constants, graph.opset)
        else:
            kept.append(op)
    needed, read = [], set(graph.outputs)
    for op in reversed(kept):
        if read.intersection(op.outputs):
            needed.append(op)
            read.update(op.inputs)
    constants = {name: array for name, array in constants.items() if name in read}
    return replace(graph, operations=needed[::-1], constants=constants)


def _results(op: Operation, constants: dict[str, Any], opset: int) -> dict[str, Any]:
    """Return the results of an operation by name, as arrays."""
    given = [constants[name] if name else None for name in op.inputs]
    try:
        made = evaluated(op, given, opset)
    except InputError:
        raise
    except Exception as error:  # PyTorch and NumPy raise many kinds
        raise InputError(
            f"runtime.compile: the ONNX operator {op.kind} ({op.name}) cannot be computed from its "
            f"constants: {one_line(error)[:200]}"
        ) from error
    return {
        name: value.numpy() if isinstance(value, Tensor) else value
        for name, value in zip(op.outputs, made, strict=False)
    }


def evaluated(op: Operation, given: list[Any], opset: int) -> list[Any]:
    """Return the results of an operation."""
    with np.errstate(all="ignore"):
        made = OPERATORS[op.kind](op, given, opset)
    return [as_value(value) for value in (made if isinstance(made, tuple) else (made,))]
