"""Memory of tensors: the order of their entries, and allocation in large pages."""

import numpy as np
import torch
from torch import Tensor


def storage_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the largest stride to the smallest.

    A dense tensor permuted to this order is contiguous, whether it is row-major or channels last.
    """
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def storage_vectors(*tensors: Tensor) -> list[Tensor] | None:
    """Return each tensor as a 1-D view of its entries, in one memory order common to all.

    The vectors are views: writing to them writes to the tensors. Returns None if the tensors have
    different memory orders or gaps between their entries.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = storage_order(tensors[0])
        tensors = tuple(tensor.permute(order) for tensor in tensors)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
    return [tensor.view(-1) for tensor in tensors]


def empty_in_large_pages(shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialized row-major CPU tensor of fp32 or fp64.

    NumPy asks the system for large pages for large arrays, PyTorch does not by default. In pages of
    4 KB, allocating a result of many megabytes takes longer than computing it: 2 ns per number, at
    every step, if the allocator returned the memory in between.
    """
    wide = np.float64 if dtype == torch.float64 else np.float32
    return torch.from_numpy(np.empty(tuple(shape), wide))


def empty_like_in_large_pages(tensor: Tensor) -> Tensor:
    """Return an uninitialized fp32 CPU tensor with the shape and memory order of ``tensor``."""
    if tensor.is_contiguous():
        return empty_in_large_pages(tensor.shape)
    target = torch.empty_like(tensor, device="meta")
    flat = empty_in_large_pages(torch.Size((tensor.numel(),)))
    return flat.as_strided(target.shape, target.stride())
