"""The inputs of a network: arrays become tensors, and what does not fit raises."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from probmask.errors import InputError
from probmask.runtime.lower.nodes import Network

_tracing_state, _STRIDED = torch._C._get_tracing_state, torch.strided


def example_tensors(example: Any, *, caller: str = "runtime.compile") -> tuple[Tensor, ...]:
    """Return copies of the example inputs as a tuple of tensors on the CPU."""
    items = example if isinstance(example, tuple) else (example,)
    tensors = [_as_tensor(item) for item in items]
    usable = [t.cpu().clone() for t in tensors if t is not None and t.device.type != "meta"]
    if not items or len(usable) < len(items):
        found = ", ".join(map(_description, items)) or "an empty tuple"
        raise InputError(
            f"{caller}(example=…): the example is a dense tensor, an array, or a tuple of "
            f"them, not {found}."
        )
    if not all(tensor.numel() for tensor in usable):
        raise InputError(
            f"{caller}(example=…): the example is empty; pass a batch of at least one input."
        )
    return tuple(usable)


class LastInputs:
    """The shapes and types of the inputs of the last call.

    The full check of `check_inputs` takes several microseconds, as long as a small layer. Tensors
    like those of the last call need a few comparisons only.
    """

    def __init__(self) -> None:
        self._accepted: tuple[tuple[torch.Size, torch.dtype], ...] = ()

    def resemble(self, inputs: Sequence[Any]) -> bool:
        """Return whether the inputs are plain tensors with the shapes and types of the last."""
        accepted = self._accepted  # read once: other threads may replace it
        if not accepted or len(accepted) != len(inputs) or _tracing_state() is not None:
            return False
        for x, (shape, dtype) in zip(inputs, accepted):  # noqa: B905, it is slower
            if not (
                type(x) is Tensor
                and not x.is_nested
                and x.shape == shape
                and x.dtype is dtype
                and x.layout is _STRIDED
                and x.is_cpu
                and not x.requires_grad
                and not is_functorch_wrapped_tensor(x)
            ):
                return False
        return True

    def remember(self, values: Iterable[Tensor]) -> None:
        """Accept inputs like these from now on; they passed the full check."""
        self._accepted = tuple((x.shape, x.dtype) for x in values)


def check_inputs(network: Network, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """Return the inputs of a call as tensors by name. Raise if one does not fit."""
    if len(inputs) != len(network.inputs):
        count = len(network.inputs)
        raise InputError(f"the network takes {count} input{'s' * (count != 1)}, not {len(inputs)}.")
    if _tracing_state() is not None:
        raise InputError("torch.jit.trace cannot record an engine; trace the model instead.")
    values = {}
    sizes: dict[str, int] = {}  # of dimensions that may vary, by name
    specs = zip(network.inputs, network.input_shapes, network.input_dtypes, strict=True)
    for item, (name, shape, dtype) in zip(inputs, specs, strict=True):
        tensor = _as_tensor(item)
        if tensor is None or not _fits(tensor, shape, dtype, sizes):
            expected = "×".join(str(size) if isinstance(size, int) else "N" for size in shape)
            raise InputError(
                f"the network takes {name} of {expected} {_name_of(dtype)} on the CPU, not "
                f"{_description(item)}."
                f"{_batch_hint(tensor, shape, network.batch_fixed_by)}"
            )
        if torch.is_grad_enabled() and isinstance(item, Tensor) and item.requires_grad:
            raise InputError(
                f"{name} requires a gradient, but an engine computes none. Call the engine under "
                f"torch.no_grad(), or pass {name}.detach()."
            )
        values[name] = tensor
    return values


def _as_tensor(item: Any) -> Tensor | None:
    """Return a tensor that shares memory with the item if PyTorch can, otherwise a copy.

    Return None for anything but tensors and arrays whose numbers are in memory.
    """
    if isinstance(item, np.ndarray) and not isinstance(item, np.ma.MaskedArray):
        try:
            native = np.require(item, item.dtype.newbyteorder("="), ("C", "W"))
            return torch.from_numpy(native)
        except TypeError:  # texts, objects, dates
            return None
    if not isinstance(item, Tensor) or not _is_dense(item):
        return None
    return item.detach() if item.requires_grad else item


def _is_dense(tensor: Tensor) -> bool:
    """Return whether kernels can read the tensor from its memory.

    Subclasses with a `__torch_dispatch__` of their own (fake tensors, DTensor), and the tensors of
    vmap and grad, have no memory of their own.
    """
    return (
        not tensor.is_nested
        and tensor.layout == torch.strided
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not is_functorch_wrapped_tensor(tensor)
    )


def _fits(
    tensor: Tensor, shape: tuple[int | str, ...], dtype: torch.dtype, sizes: dict[str, int]
) -> bool:
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and len(shape) == tensor.dim()
        and all(
            given == (size if isinstance(size, int) else sizes.setdefault(size, given))
            for size, given in zip(shape, tensor.shape, strict=True)
        )
    )


def _batch_hint(tensor: Tensor | None, shape: tuple[int | str, ...], fixed_by: str) -> str:
    """Return a sentence if only the batch size is wrong, and the model's code fixes it."""
    if tensor is None or tensor.dim() != len(shape) or not shape:
        return ""
    (given, *rest), (batch, *others) = tensor.shape, shape
    if not isinstance(batch, int) or given == batch or rest != others:
        return ""
    reason = f" ({fixed_by})" if fixed_by else ""
    return (
        f" The model's forward fixes the batch size at {batch}{reason}. Compile an engine for each "
        "batch size."
    )


def _description(item: Any) -> str:
    """Return what was passed instead of a tensor that fits."""
    if isinstance(item, np.ma.MaskedArray):
        return "a masked array; fill it first, with .filled(value)"
    if isinstance(item, np.ndarray):
        return f"an array of {_sizes(item.shape)} {item.dtype}"
    if not isinstance(item, Tensor):
        return "None" if item is None else f"an object of type {type(item).__name__}"
    if item.is_nested or is_functorch_wrapped_tensor(item):
        return "a nested tensor" if item.is_nested else "a tensor inside torch.func or vmap"
    content = f"{_sizes(item.shape)} {_name_of(item.dtype)}"
    if item.layout != torch.strided:
        return f"a tensor of {content} in the layout {_name_of(item.layout)}; call .to_dense()"
    if not _is_dense(item):
        return f"a {type(item).__name__} of {content}"
    return f"{content} on {item.device.type}"


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "0-dimensional"


def _name_of(value: Any) -> str:
    """Return the name of a dtype or a layout."""
    return str(value).removeprefix("torch.")
