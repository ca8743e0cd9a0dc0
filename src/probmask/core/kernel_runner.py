"""Load compiled kernels where they can be used, and run them on several threads.

Numba is optional and slow to import. It is imported by the first call that can use a kernel.
Kernels read tensors as vectors in memory order and write their results to large memory pages.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_SMALLEST_PART = 1 << 15  # with fewer entries, waking a thread takes longer than the work
_CACHE_LINE = 16  # fp32 entries
_PLAIN_TYPES = (Tensor, nn.Parameter)

# Part of a tensor: the index of the tensor, the first entry, and the end (exclusive).
Span = tuple[int, int, int]


def kernels_for(name: str, *tensors: Tensor) -> Any:
    """Return the module ``probmask.core.NAME`` if its kernels work on these tensors, else None.

    The kernels need Numba and tensors in CPU memory. While a graph is traced this returns None:
    the caller's PyTorch operations are traced, and the graph compiler makes its own kernels.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    if any(type(t) not in _PLAIN_TYPES or t.device.type != "cpu" for t in tensors):
        return None
    return _kernels(name)


def map_parts(count: int, work: Callable[[int, int], Any]) -> list[Any]:
    """Split ``count`` entries over the threads; return work(begin, end) of each part, in order."""
    threads = max(1, min(torch.get_num_threads(), count // _SMALLEST_PART))
    if threads == 1:
        return [work(0, count)]
    # A part has whole cache lines, so no two threads write to the same line.
    line = _CACHE_LINE
    bounds = [count * k // threads // line * line for k in range(threads)] + [count]
    first, *others = pairwise(bounds)
    pool = _pool(os.getpid(), torch.get_num_threads() - 1)
    pending = [pool.submit(work, *part) for part in others]
    return [work(*first), *(each.result() for each in pending)]


def map_spans(sizes: Sequence[int], work: Callable[[list[Span]], Any]) -> list[Any]:
    """Split the entries of several tensors over the threads; return work(spans) of each part.

    The tensors are split as if they were joined, so each thread is started once, not once per
    tensor.
    """
    bounds = list(pairwise(accumulate(sizes, initial=0)))

    def part(begin: int, end: int) -> Any:
        spans = [(k, max(begin, a) - a, min(end, b) - a) for k, (a, b) in enumerate(bounds)]
        return work([span for span in spans if span[1] < span[2]])

    return map_parts(sum(sizes), part)


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

    NumPy requests large pages for large arrays; PyTorch does not by default. In pages of 4 KB,
    allocating a result of many megabytes takes longer than computing it: 2 ns per number, at every
    step in which the allocator gets new memory from the system.
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


@lru_cache
def _kernels(name: str) -> Any:
    if not find_spec("numba"):
        return None
    try:
        return import_module(f"probmask.core.{name}")
    except ImportError as error:  # Numba needs another NumPy
        warnings.warn(
            f"Numba cannot be used ({error}). PyTorch computes the masks instead, more slowly.",
            stacklevel=2,
        )
        return None


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the threads of this process; a forked process does not have its parent's threads."""
    return ThreadPoolExecutor(threads, f"probmask-{process}")
