"""Sites with something trained beside the weight: a gate, a score, a threshold, a probability."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

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
