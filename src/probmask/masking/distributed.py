"""Communication between the ranks of a distributed training. A single process sends nothing.

Every message of the package goes through this module. There are two kinds of training. With DDP,
every rank has all weights, and the functions below act on the default process group. With FSDP2,
every rank has some rows of each weight, and `RankShards` acts on the ranks that hold the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from probmask.core.shards import Shards


def running() -> bool:
    """Return whether a process group exists."""
    return distributed.is_available() and distributed.is_initialized()


def several_ranks() -> bool:
    """Return whether there is a process group with more than one rank."""
    return world_size() > 1


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return distributed.get_rank() if running() else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return distributed.get_world_size() if running() else 1


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    if not running():
        return [value]
    values: list[Any] = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def from_first_rank(value: int) -> int:
    """Return the value of rank 0, on every rank."""
    values = [value]
    if running():
        distributed.broadcast_object_list(values, src=0)
    return values[0]


def summed(values: Tensor, group: Any = None) -> Tensor:
    """Return the sum of ``values`` over the ranks of a group, by default over all ranks."""
    if not running():
        return values
    total = _sendable(values, group)
    distributed.all_reduce(total, group=group)
    return total.to(values.device)


def stacked(values: Tensor, group: Any = None) -> Tensor:
    """Return the ``values`` of the ranks of a group, stacked along a new first dimension."""
    if not running():
        return values[None]
    sent = _sendable(values, group)
    found = [torch.empty_like(sent) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, sent, group=group)
    return torch.stack(found).to(values.device)


def _sendable(values: Tensor, group: Any) -> Tensor:
    """Return a contiguous copy on a device that the backend can send from.

    NCCL accepts no CPU tensors, and a model may still be on the CPU when masks are attached.
    """
    nccl = distributed.get_backend(group) == "nccl"
    return (values.cuda() if nccl else values).contiguous().clone()


def averaged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean of each tensor over all ranks."""
    if not running():
        return list(tensors)
    return [summed(tensor) / world_size() for tensor in tensors]


def average_gradients_(parameters: Sequence[Tensor]) -> None:
    """Replace the gradient of each parameter by its mean over all ranks.

    DDP averages the gradients of the model's parameters; those that a method adds are not among
    them. A parameter without a gradient counts as zero, so that all ranks send the same tensors.
    """
    if not several_ranks():
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter, mean in zip(parameters, averaged(gradients), strict=True):
        parameter.grad = mean


class RankShards(Shards):
    """Shards on the ranks of a process group, in the order of these ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.index = distributed.get_rank(group)
        self.count = distributed.get_world_size(group)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the group."""
        return values if self.count == 1 else summed(values, self.group)

    def gathered(self, values: Tensor) -> Tensor:
        """Return the values of the group, stacked."""
        return values[None] if self.count == 1 else stacked(values, self.group)
