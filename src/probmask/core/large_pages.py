"""Memory for large results."""

import numpy as np
import torch
from torch import Tensor


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
