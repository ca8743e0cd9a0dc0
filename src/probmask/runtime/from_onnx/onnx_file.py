"""Reading an ONNX file: its operations in order, constants, inputs and outputs."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probmask.errors import InputError
from probmask.messages import one_line

_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Operation:
    """One node of an ONNX graph. A missing optional input has the name ''."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Input:
    """An input of the network. A size that may vary is a name, or None without one."""

    name: str
    shape: tuple[int | str | None, ...] | None
    dtype: Any


@dataclass(frozen=True)
class OnnxGraph:
    """What an ONNX file contains."""

    operations: Sequence[Operation]
    constants: Mapping[str, Any]
    inputs: Sequence[Input]
    outputs: Sequence[str]
    opset: int


def read_onnx(path: str | os.PathLike[str], known: Collection[str]) -> OnnxGraph:
    """Read an ONNX file.

    Raise `InputError` if it is damaged, or has an operator that is not among the known ones.
    """
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise InputError(
            f"runtime.compile({Path(path).name}): reading ONNX needs the package onnx; run pip "
            "install 'probmask[onnx]'."
        ) from error
    if Path(path).is_dir():
        raise InputError(
            f"runtime.compile({path}): this is a directory; pass the path of an ONNX file."
        )
    if not Path(path).is_file():
        wrong = "is a directory, not a file" if Path(path).is_dir() else "no such file"
        raise InputError(f"runtime.compile({path}): {wrong}.")
    try:
        model = onnx.load(os.fspath(path))
        graph = _graph(model, onnx)
        _check_operators(path, graph, known)
        _check_order(graph)
    except InputError:
        raise
    except Exception as error:  # protobuf, ONNX and NumPy raise many kinds
        raise InputError(
            f"runtime.compile({path}): not an intact ONNX file ({one_line(error)[:200]})."
        ) from error
    if not graph.inputs or not graph.outputs:
        raise InputError(f"runtime.compile({path}): the network has no inputs or no outputs.")
    return graph


def _check_operators(
    path: str | os.PathLike[str], graph: OnnxGraph, known: Collection[str]
) -> None:
    unknown = sorted({op.kind for op in graph.operations} - set(known))
    if unknown:
        plural = "s" * (len(unknown) > 1)
        raise InputError(
            f"runtime.compile({path}): the ONNX operator{plural} {', '.join(unknown)} "
            f"{'are' if plural else 'is'} not supported; docs/performance.md lists those that are."
        )


def _check_order(graph: OnnxGraph) -> None:
    """Raise if an operation reads what nothing computes before it, or an output is missing."""
    known = {*graph.constants, *(item.name for item in graph.inputs), ""}
    for op in graph.operations:
        for name in op.inputs:
            if name not in known:
                raise ValueError(f"{op.kind} {op.name} reads {name!r:.80}, which nothing computes")
        known.update(op.outputs)
    for name in graph.outputs:
        if name not in known:
            raise ValueError(f"nothing computes the output {name!r:.80}")


def _graph(model: Any, onnx: Any) -> OnnxGraph:
    graph = model.graph
    constants = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
    for item in graph.sparse_initializer:
        constants[item.values.name] = _dense(item, onnx)
    operations = []
    for op in (_operation(node, onnx) for node in graph.node):
        value = _constant(op) if op.kind == "Constant" else None
        if value is not None:
            constants[op.outputs[0]] = value
        else:
            operations.append(op)
    inputs = [_input(value, onnx) for value in graph.input if value.name not in constants]
    opset = next((o.version for o in model.opset_import if o.domain in _DOMAINS), 0)
    outputs = [value.name for value in graph.output]
    return OnnxGraph(operations, constants, inputs, outputs, opset)


def _operation(node: Any, onnx: Any) -> Operation:
    attributes = {item.name: _attribute(item, onnx) for item in node.attribute}
    kind = node.op_type if node.domain in _DOMAINS else f"{node.domain}.{node.op_type}"
    return Operation(kind, node.name, tuple(node.input), tuple(node.output), attributes)


def _constant(op: Operation) -> Any:
    """Return the value of a constant; None if it is a text."""
    for key in ("value", "sparse_value"):
        if key in op.attributes:
            return op.attributes[key]
    for key, dtype in (("value_int", np.int64), ("value_float", np.float32)):
        for name in (key, f"{key}s"):
            if name in op.attributes:
                return np.array(op.attributes[name], dtype)
    return None


def _attribute(item: Any, onnx: Any) -> Any:
    value = onnx.helper.get_attribute_value(item)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, onnx.SparseTensorProto):
        return _dense(value, onnx)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [part.decode() if isinstance(part, bytes) else part for part in value]
    return value


def _dense(sparse: Any, onnx: Any) -> Any:
    """Return a sparse tensor as a dense array; its indices are flat, or one row per value."""
    shape = tuple(sparse.dims)
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    if indices.ndim == 2:
        indices = np.ravel_multi_index(tuple(indices.T), shape)
    dense = np.zeros(int(np.prod(shape)), values.dtype)
    dense[indices] = values
    return dense.reshape(shape)


def _input(value: Any, onnx: Any) -> Input:
    tensor = value.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(dim.dim_value or dim.dim_param or None for dim in tensor.shape.dim)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return Input(value.name, shape, dtype)
