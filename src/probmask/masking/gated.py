"""Sites with something trained beside the weight: a gate, a score, a threshold, a probability."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from probmask.errors import InputError
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site


class GatedWeight(MaskedWeight):
    """One site with its ``gate``, which is trained, and what was ``drawn`` for the coming passes.

    ``drawn`` (noise, or a mask) has the gate's shape; it is no buffer, so that every rank keeps its
    own. Both are fp32 whatever the weight is: in bf16 a gate could not take small steps.
    """

    def __init__(self, site: Site, gate: Tensor) -> None:
        super().__init__(site)
        self.gate = nn.Parameter(gate.to(site.weight.device, torch.float32))
        self.drawn = torch.zeros_like(self.gate, requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved.float() if tensor.is_meta else tensor.to(moved.device)

        gate, grad = self.gate.data, self.gate.grad
        super()._apply(fn, recurse)
        self.gate.grad = None
        self.gate.data = move(gate)  # not through bf16 and back
        self.gate.grad = None if grad is None else move(grad)
        self.drawn = move(self.drawn)
        return self


def straight_through(mask: Tensor, gate: Tensor) -> Tensor:
    """The mask; its gradient goes to the gate unchanged, as if the mask were the gate."""
    passed: Tensor = _StraightThrough.apply(mask, gate)  # type: ignore[no-untyped-call]
    return passed


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor, gate: Tensor) -> Tensor:
        return mask.to(gate.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def output_shape(site: Site) -> tuple[int, ...]:
    """The shape of one gate per output of the layer, such that it broadcasts over the weight.

    A transposed convolution has its outputs in the second dimension; with groups, the same output
    of all groups shares a gate.
    """
    shape = site.weight.shape
    transposed = isinstance(site.holders[0][0], _ConvTransposeNd) and len(shape) > 1
    return tuple(size if axis == int(transposed) else 1 for axis, size in enumerate(shape))


def dense_layers(
    caller: str, sites: Sequence[Site], keep: int, *, first: bool | None, last: bool | None
) -> frozenset[int]:
    """Which of the first and last site are kept whole: those asked for, refused if too large.

    None asks for it only where the budget allows: where these layers take at most half of it.
    """
    asked = {0: first, len(sites) - 1: last} if len(sites) > 1 else {0: first or last}
    forced = {index for index, wish in asked.items() if wish}
    if sum(sites[index].size for index in forced) > keep:
        names = " and ".join(sites[index].name for index in sorted(forced))
        raise InputError(
            f"{caller}: {names} alone exceed the budget of {keep} weights; lower sparsity or let "
            "them be pruned too."
        )
    whole = forced | {index for index, wish in asked.items() if wish is None}
    allowed = sum(sites[index].size for index in whole) <= keep / 2
    return frozenset(whole if allowed else forced)
