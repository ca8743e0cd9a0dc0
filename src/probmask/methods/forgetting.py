"""Letting the random values fade that the weights of a fresh network began with.

Early in a training a magnitude is mostly where its weight began, which says nothing about what the
weight is good for.
"""

import torch
from torch import Tensor, nn

# A fresh network may have been looked at before it is trained: more batches mean a training.
_FEW_BATCHES = 64
# The least that a weight of half precision can lose at once: less would be rounded away.
_COARSE = 2.0**-6


def is_fresh(model: nn.Module, sites: int) -> bool:
    """Whether the weights can be told to be random: BatchNorm everywhere that has seen no data.

    Everywhere is at least one for two of the weights that are masked: a new neck of BatchNorm on
    a pretrained network without it says nothing about the network's weights.
    """
    found = [module.running_var for module in _tracking(model)]
    fresh = all(v is not None and torch.equal(v, torch.ones_like(v)) for v in found)
    return fresh and 2 * len(found) >= max(1, sites)


def was_loaded(model: nn.Module) -> bool:
    """Whether BatchNorm has seen more data than the first update brings: a checkpoint's."""
    counts = [module.num_batches_tracked for module in _tracking(model)]
    return any(count is not None and int(count) > _FEW_BATCHES for count in counts)


def fade_(weight: Tensor, start: Tensor, left: float) -> None:
    """Take away so much of the start that at most ``left`` of it is in the weight.

    What is in it is measured, as the component of the weight along the start: weight decay takes
    its part of it too, and subtracting all would leave the negative of that.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    w, along = weight.to(wide), start.to(wide)
    norm = torch.dot(along.reshape(-1), along.reshape(-1)).clamp_min(torch.finfo(wide).tiny)
    excess = (torch.dot(w.reshape(-1), along.reshape(-1)) / norm - left).clamp_min(0.0)
    if w is not weight and left > 0:
        excess = torch.where(excess < _COARSE, 0.0, excess)
    w.addcmul_(along, excess, value=-1)
    if w is not weight:
        weight.copy_(w)


def _tracking(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None
    ]
