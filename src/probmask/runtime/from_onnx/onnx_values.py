"""The values that operators of ONNX take and return.

A value is a tensor, or an array: a constant of the file, or sizes, which `Shape` returns, and what
is computed from them. An array of sizes has the dtype object if one of them may vary, so that
`torch.export` can keep the batch size open. Arrays are computed by NumPy while the network is
built or exported, and tensors by PyTorch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.errors import InputError
from probmask.runtime.from_onnx.onnx_file import Operation

# Takes the operation, its inputs (None for a missing one) and the version of the operators.
Operator = Callable[[Operation, Sequence[Any], int], Any]
# The types of numbers that NumPy does not have, and those that PyTorch computes them in.
_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}


def as_value(made: Any) -> Any:
    """Return the result of an operator as a tensor or an array."""
    if isinstance(made, Tensor):
        return made
    if not isinstance(made, np.ndarray):
        made = _array(made)
    if made.dtype != object or any(is_symbolic(item) for item in made.flat):
        return made
    numbers = np.array(made.tolist()).reshape(made.shape)
    return numbers.astype(np.float32) if numbers.dtype.kind == "f" else numbers


def _array(made: Any) -> Any:
    """Return a number, or a list of numbers, as an array."""
    if isinstance(made, list | tuple):
        return np.array(made, object) if made else np.zeros(0, np.int64)
    return np.array(made, object) if is_symbolic(made) else np.asarray(made)


def is_symbolic(item: Any) -> bool:
    """Return whether a number depends on a size that may vary."""
    return isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool)


def is_array(value: Any) -> bool:
    """Return whether a value is known when the network is built or exported."""
    return isinstance(value, np.ndarray)


def tensor(value: Any) -> Tensor:
    """Return a value as a tensor."""
    if isinstance(value, Tensor):
        return value
    if value.dtype == object:
        return torch.tensor(value.tolist())
    if value.dtype.name in _WIDER:
        value = value.astype(_WIDER[value.dtype.name])
    elif value.dtype.kind == "V":  # bfloat16 and the types of 8 bits
        value = value.astype(np.float32)
    return torch.from_numpy(np.require(value, requirements=("C", "W")))


def optional_tensor(inputs: Sequence[Any], index: int) -> Tensor | None:
    """Return an input as a tensor; None if it is missing."""
    given = optional(inputs, index)
    return None if given is None else tensor(given)


def optional(inputs: Sequence[Any], index: int) -> Any:
    """Return an input; None if it is missing."""
    return inputs[index] if len(inputs) > index else None


def numbers(value: Any, what: str, op: Operation) -> list[Any]:
    """Return an array as a list. Raise if the value is computed from the inputs of the network."""
    if is_array(value):
        return list(value.reshape(-1).tolist())
    raise InputError(
        f"runtime.compile: the ONNX operator {op.kind} ({op.name}) computes its {what} from the "
        "inputs of the network; only constants and sizes are supported."
    )


def axes_of(op: Operation, inputs: Sequence[Any], index: int = 1) -> list[int] | None:
    """Return the axes, which older versions have as an attribute."""
    given = optional(inputs, index)
    if given is not None:
        return [int(axis) for axis in numbers(given, "axes", op)]
    return op.attributes.get("axes")


def unsupported(op: Operation, form: str) -> InputError:
    """Return the error for an operator in a form without a counterpart."""
    return InputError(
        f"runtime.compile: the ONNX operator {op.kind} ({op.name}) has {form}, which is not "
        "supported."
    )
