"""The inputs that an ONNX file declares: their batch dimension, and an example."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.errors import InputError
from probmask.runtime.from_onnx.onnx_file import Input


def batch_dims(inputs: Sequence[Input]) -> list[int | None]:
    """Return the dimension of each input that the file leaves open for the batch; None without one.

    Files name open sizes. The batch has the name that most inputs have, the first of several.
    """
    names = Counter(
        size for item in inputs for size in dict.fromkeys(item.shape or ()) if isinstance(size, str)
    )
    common = max(names, key=lambda name: names[name], default=None)
    return [_batch_dim(item, common) for item in inputs]


def _batch_dim(item: Input, name: str | None) -> int | None:
    if item.shape and name in item.shape:
        return item.shape.index(name)
    return 0 if item.shape and item.shape[0] is None else None


def example_of(path: str | os.PathLike[str], inputs: Sequence[Input]) -> tuple[Tensor, ...]:
    """Return inputs with the shapes in the file and a batch of one."""
    made = []
    generator = np.random.default_rng(0)
    for item, batch in zip(inputs, batch_dims(inputs), strict=True):
        shape = [1 if i == batch else size for i, size in enumerate(item.shape or ())]
        sizes = [size for size in shape if isinstance(size, int)]
        if item.shape is None or len(sizes) < len(shape):
            known = "unknown" if item.shape is None else "×".join(map(_shown, item.shape))
            raise InputError(
                f"runtime.compile({Path(path).name}): the file leaves sizes of the input "
                f"{item.name} open ({known}); pass an example."
            )
        if np.dtype(item.dtype).kind == "f":
            made.append(torch.from_numpy(generator.normal(size=sizes).astype(item.dtype)))
        else:
            made.append(torch.from_numpy(np.ones(sizes, item.dtype)))
    return tuple(made)


def random_inputs(inputs: Sequence[Input], batch: int) -> tuple[Tensor, ...]:
    """Return different rows for inputs of fixed sizes, whose first dimension is the batch."""
    made = []
    generator = np.random.default_rng(0)
    for item in inputs:
        sizes: Any = [batch, *(item.shape or ())[1:]]
        is_float = np.dtype(item.dtype).kind == "f"
        array = generator.normal(size=sizes) if is_float else generator.integers(0, 2, sizes)
        made.append(torch.from_numpy(array.astype(item.dtype)))
    return tuple(made)


def check_example(path: str | os.PathLike[str], inputs: Sequence[Input], example: Any) -> None:
    """Raise if the example does not have as many inputs as the network."""
    given = len(example) if isinstance(example, tuple) else 1
    if given != len(inputs):
        names = ", ".join(item.name for item in inputs)
        raise InputError(
            f"runtime.compile({Path(path).name}): the network takes {len(inputs)} "
            f"input{'s' * (len(inputs) != 1)} ({names}), and the example has {given}; pass a tuple "
            "with one array or tensor for each."
        )


def _shown(size: int | str | None) -> str:
    return str(size) if isinstance(size, int) else "?"
