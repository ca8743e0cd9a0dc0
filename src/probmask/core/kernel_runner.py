"""Compiled kernels where they can be used, and the threads that run them."""

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

_LEAST = 1 << 15  # entries below which waking another thread takes longer than they do
_PLAIN = (Tensor, nn.Parameter)
Span = tuple[int, int, int]


def kernels_for(name: str, *tensors: Tensor) -> Any:
    """The kernels ``probmask.core.NAME`` if they can work on these tensors, else None.

    They are for tensors in the memory of the CPU, and Numba must be installed. A graph that is
    being traced gets plain operations, from which the compiler makes kernels of its own.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    if any(type(t) not in _PLAIN or t.device.type != "cpu" for t in tensors):
        return None
    return _kernels(name)


def in_parts(count: int, work: Callable[[int, int], Any]) -> list[Any]:
    """work(begin, end) on as many parts of ``count`` entries as PyTorch has threads."""
    threads = max(1, min(torch.get_num_threads(), count // _LEAST))
    if threads == 1:
        return [work(0, count)]
    # Whole cache lines: no two threads write to the same.
    bounds = [count * k // threads // 16 * 16 for k in range(threads)] + [count]
    first, *others = pairwise(bounds)
    pool = _pool(os.getpid(), torch.get_num_threads() - 1)
    pending = [pool.submit(work, *part) for part in others]
    return [work(*first), *(each.result() for each in pending)]


def in_parts_of(sizes: Sequence[int], work: Callable[[list[Span]], Any]) -> list[Any]:
    """The same of tensors of these sizes together: threads are handed work once, not for each.

    ``work`` gets what belongs to its part: which tensor, from which entry on and up to which.
    """
    bounds = list(pairwise(accumulate(sizes, initial=0)))

    def part(begin: int, end: int) -> Any:
        spans = [(k, max(begin, a) - a, min(end, b) - a) for k, (a, b) in enumerate(bounds)]
        return work([span for span in spans if span[1] < span[2]])

    return in_parts(sum(sizes), part)


@lru_cache
def _kernels(name: str) -> Any:
    if not find_spec("numba"):
        return None
    try:
        return import_module(f"probmask.core.{name}")
    except (
        ImportError,
        RuntimeError,
    ) as error:  # another NumPy, or no room to cache
        warnings.warn(
            f"Numba cannot be used ({error}); PyTorch computes the masks instead, more slowly.",
            stacklevel=2,
        )
        return None


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, f"probmask-{process}")
