"""Which names of a model stand for one tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


def same_memory(state: Mapping[str, Any]) -> list[list[str]]:
    """Return the names in groups that stand for the same memory."""
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        key: Any = name
        if isinstance(value, Tensor) and value.layout == torch.strided and not is_lazy(value):
            if value.is_meta:
                key = id(value)
            elif value.data_ptr():  # an empty tensor has no memory to share
                where = (value.device, value.data_ptr())
                key = (*where, value.dtype, value.shape, value.stride())
        groups.setdefault(key, []).append(name)
    return list(groups.values())
