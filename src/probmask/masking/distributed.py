"""Communication between the ranks of a distributed training. A single process sends nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed


def running() -> bool:
    """Return whether a process group exists."""
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return distributed.get_rank() if running() else 0


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    if not running():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def from_first_rank(value: int) -> int:
    """Return the value of rank 0, on every rank."""
    values = [value]
    if running():
        distributed.broadcast_object_list(values, src=0)
    return values[0]


def averaged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean of each tensor over all ranks."""
    if not running():
        return list(tensors)
    # NCCL accepts no CPU tensors, and a model may still be on the CPU when masks are attached.
    nccl = distributed.get_backend() == "nccl"
    means = []
    for tensor in tensors:
        total = (tensor.cuda() if nccl else tensor).clone()
        distributed.all_reduce(total)
        means.append((total / distributed.get_world_size()).to(tensor.device))
    return means


def average_gradients_(parameters: Sequence[Tensor]) -> None:
    """Replace the gradient of each parameter by its mean over all ranks.

    DDP averages the gradients of the model's parameters; those that a method adds are not among
    them. A parameter without a gradient counts as zero, so that all ranks send the same tensors.
    """
    if not running() or distributed.get_world_size() == 1:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter, mean in zip(parameters, averaged(gradients), strict=True):
        parameter.grad = mean
