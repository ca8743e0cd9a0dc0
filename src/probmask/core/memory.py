"""The order in which a tensor's entries lie in memory: row-major, channels last, or any other."""

import numpy as np
import torch
from torch import Tensor


def storage_order(tensor: Tensor) -> list[int]:
    """Its dimensions from the slowest to the fastest: so permuted, a dense tensor is contiguous."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def as_stored(*tensors: Tensor) -> list[Tensor] | None:
    """All entries of each as a vector, in the order in memory that the tensors have in common.

    Views: what is written to them is written to the tensors. None if they lie in different orders,
    or with gaps.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = storage_order(tensors[0])
        tensors = tuple(tensor.permute(order) for tensor in tensors)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
    return [tensor.view(-1) for tensor in tensors]


def room_for(shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in the CPU's memory with nothing in it yet, in row-major order; fp32 or fp64.

    NumPy asks the system for large pages where an array is large; PyTorch does not by itself. In
    pages of 4 KB, a result of many megabytes takes longer to be given its memory than to be
    computed: 2 ns per number, at every step, if the allocator has given it back in between.
    """
    wide = np.float64 if dtype == torch.float64 else np.float32
    return torch.from_numpy(np.empty(tuple(shape), wide))


def room_like(tensor: Tensor) -> Tensor:
    """The same for fp32 entries that lie in the order in which this tensor's do."""
    if tensor.is_contiguous():
        return room_for(tensor.shape)
    laid_out = torch.empty_like(tensor, device="meta")
    flat = room_for(torch.Size((tensor.numel(),)))
    return flat.as_strided(laid_out.shape, laid_out.stride())
